import pytest

from ppldm.utils.machine import nvidia_smi
from ppldm.utils.machine import resources as machine


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("max 100000", None),
        ("-1 100000", None),
        ("", None),
        (" ", None),
        ("200000 100000", 2.0),
        ("150000 100000", 1.5),
        ("50000 100000", 0.5),
        ("0 100000", None),
    ],
)
def test_cpu_quota(text, cores):
    assert machine.parse_cpu_quota(text) == cores


@pytest.mark.parametrize("files", [{"cpu.max": "150000 100000\n"}, {"cpu/cpu.cfs_quota_us": "150000\n"}])
def test_usable_cores_are_cut_by_either_version_of_control_groups(tmp_path, monkeypatch, files):
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: set(range(8)))
    assert machine.count_usable_cores() == 8
    (tmp_path / "cpu").mkdir()
    for name, text in {**files, "cpu/cpu.cfs_period_us": "100000\n"}.items():
        (tmp_path / name).write_text(text)
    assert machine.count_usable_cores() == 1


def test_memory_is_the_smaller_of_machine_and_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    whole = machine.usable_memory_bytes()
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.usable_memory_bytes() == whole
    (tmp_path / "memory.max").write_text("1048576\n")
    assert machine.usable_memory_bytes() == 1048576


def test_parsers_of_system_texts():
    assert machine.parse_value("MemTotal:       16 kB\nMemFree: 1 kB\n", "MemTotal") == "16 kB"
    assert machine.parse_value("", "MemTotal") == ""
    assert machine.parse_value("processor : 0\nvendor_id\t: AuthenticAMD\n", "vendor_id") == "AuthenticAMD"
    assert machine.parse_value("CPU implementer : 0x41\n", "vendor_id") == ""


@pytest.mark.parametrize(
    ("said", "version"),
    [('openjdk version "17.0.15" 2025-04-15\n', "17.0.15"), ('java version "1.8.0_402"', "1.8.0_402"), ("", None)],
)
def test_version_of_java(monkeypatch, said, version):
    monkeypatch.setattr(machine, "run_program", lambda *command: said)
    assert machine.read_java_version() == version


def test_missing_programs_and_libraries_are_no_error(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert nvidia_smi.list_gpus() == []
    assert machine.read_java_version() is None
    assert not machine.has_library("libno-such-library.so.7")
    assert machine.has_library("libc.so.6")

"""A file is finished or absent, and a folder belongs to one process."""

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ppldm.utils.errors import ConfigError, DataError, OutputError
from ppldm.utils.files import (
    atomic_dir,
    atomic_write,
    claimed_dir,
    finish_file,
    link_or_copy,
    local_path,
    lock_folder,
    make_output_dir,
    meant_path,
    naming_full_disk,
    read_json_object,
    remove_dir,
    remove_leftovers,
    write_text,
)


@pytest.fixture
def calls(monkeypatch):
    """Names of what is made durable and what is renamed, as ("fsync" | "rename", path), in the order of the calls."""
    recorded, fsync, replace = [], os.fsync, os.replace

    def record_fsync(handle):
        recorded.append(("fsync", os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    def record_rename(source, target):
        recorded.append(("rename", str(source)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_rename)
    return recorded


def test_a_file_is_durable_before_it_has_its_name_and_its_name_after(tmp_path, calls):
    with atomic_write(tmp_path / "a") as file:
        file.write(b"x" * 100)
        temporary = file.name if isinstance(file.name, str) else os.readlink(f"/proc/self/fd/{file.fileno()}")
    assert calls == [("fsync", temporary), ("rename", temporary), ("fsync", str(tmp_path))]


def test_what_is_written_is_flushed_before_it_is_made_durable(tmp_path, monkeypatch):
    sizes, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (sizes.append(os.fstat(handle).st_size), fsync(handle)))
    write_text(tmp_path / "a", "x" * 100)
    assert sizes[0] == 100


def test_a_file_of_another_library_is_durable_before_it_has_its_name(tmp_path, calls):
    (tmp_path / "a.tmp").write_bytes(b"x")
    finish_file(tmp_path / "a.tmp", tmp_path / "a")
    temporary = str(tmp_path / "a.tmp")
    assert calls == [("fsync", temporary), ("rename", temporary), ("fsync", str(tmp_path))]


@pytest.mark.parametrize("make", [atomic_dir, claimed_dir])
def test_all_of_a_tree_is_durable_before_it_has_its_name_and_its_name_after(tmp_path, calls, make):
    with make(tmp_path / "tree") as folder:
        (folder / "a").write_bytes(b"a")
        (folder / "b" / "c").mkdir(parents=True)
        (folder / "b" / "c" / "d").write_bytes(b"d")
        needed = {str(folder / name) for name in ("", "a", "b", "b/c", "b/c/d")}
    renamed = calls.index(("rename", str(folder)))
    assert needed <= {path for call, path in calls[:renamed] if call == "fsync"}
    assert calls[renamed + 1 :] == [("fsync", str(tmp_path))]


def test_an_error_leaves_the_old_file_and_no_other(tmp_path):
    write_text(tmp_path / "a", "old")
    with pytest.raises(RuntimeError), atomic_write(tmp_path / "a", "w") as file:
        file.write("new")
        raise RuntimeError
    assert (tmp_path / "a").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    for content in ("first", "second"):
        with atomic_dir(tmp_path / "d") as folder:
            (folder / "sub").mkdir()
            (folder / "sub" / "file").write_text(content)
        assert (tmp_path / "d/sub/file").read_text() == content
    with pytest.raises(RuntimeError), atomic_dir(tmp_path / "d") as folder:
        (folder / "half").write_text("x")
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["d"]
    assert (tmp_path / "d/sub/file").read_text() == "second"


class Killed(BaseException):
    """Ends the process here."""


def test_what_a_killed_process_left_goes(tmp_path, monkeypatch):
    (tmp_path / "keep").mkdir()
    (tmp_path / ".lock").touch()
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)
    monkeypatch.setattr("pathlib.Path.unlink", lambda *_, **__: None)
    with pytest.raises(Killed), atomic_dir(tmp_path / "d") as folder:
        (folder / "half").write_bytes(bytes(100))
        raise Killed
    with pytest.raises(Killed), atomic_write(tmp_path / "f") as file:
        file.write(bytes(20))
        file.flush()
        raise Killed
    (tmp_path / "old").mkdir()
    remove_dir(tmp_path / "old")
    monkeypatch.undo()
    assert len(list(tmp_path.iterdir())) == 5
    assert remove_leftovers(tmp_path) == 120
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "keep"]


@pytest.mark.parametrize("links", [True, False])
def test_one_file_in_two_places(tmp_path, monkeypatch, links):
    if not links:
        monkeypatch.setattr("os.link", lambda *_: (_ for _ in ()).throw(OSError("no links here")))
    (tmp_path / "new").write_text("new")
    (tmp_path / "target").write_text("old")
    for _ in range(2):
        link_or_copy(tmp_path / "new", tmp_path / "target")
        assert (tmp_path / "target").read_text() == "new" == (tmp_path / "new").read_text()
        assert len(list(tmp_path.iterdir())) == 2


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=f"cannot write to the folder {tmp_path}/file/sub"):
        make_output_dir(tmp_path / "file" / "sub")


HOLD = (
    "import sys, time; from ppldm.utils.files import lock_folder; f = lock_folder(sys.argv[1]); print(1, flush=True); "
)


def test_a_folder_is_held_until_its_process_ends(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLD + "time.sleep(60)", tmp_path], stdout=subprocess.PIPE)
    holder.stdout.readline()
    with pytest.raises(OutputError, match="another process is writing to"):
        lock_folder(tmp_path, wait_seconds=0.2)
    holder.kill()
    with lock_folder(tmp_path, wait_seconds=20):
        pass
    holder.wait()


def test_waiting_for_a_process_that_ends(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLD + "time.sleep(0.5)", tmp_path], stdout=subprocess.PIPE)
    holder.stdout.readline()
    started = time.monotonic()
    lock_folder(tmp_path, wait_seconds=20).close()
    assert time.monotonic() - started < 15
    holder.wait()


def test_a_claimed_folder_is_finished_or_absent_and_what_a_killed_run_left_is_gone(tmp_path):
    unfinished = tmp_path / ".out.unfinished"
    (unfinished / "half").mkdir(parents=True)
    (unfinished / "half/file").write_text("half")
    with claimed_dir(tmp_path / "out") as folder:
        (folder / "whole").write_text("whole")
        assert not (tmp_path / "out").exists() and not (unfinished / "half").exists()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["whole"] and not unfinished.exists()
    with pytest.raises(KeyError), claimed_dir(tmp_path / "other") as folder:
        (folder / "half").write_text("half")
        raise KeyError
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_interrupted_claim_is_gone_on_with_under_an_equal_plan_alone(tmp_path):
    plan = {"a": [1, "ü"]}

    def interrupt(error, plan, name):
        with pytest.raises(error), claimed_dir(tmp_path / "out", plan) as folder:
            (folder / name).write_text(name)
            raise error("no")

    def names(folder):
        return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))

    interrupt(KeyboardInterrupt, plan, "1")
    interrupt(OutputError, plan, "2")
    assert names(tmp_path / ".out.unfinished") == ["1", "2"]
    interrupt(OSError, {"a": 2}, "3")
    assert names(tmp_path / ".out.unfinished") == ["3"]
    interrupt(DataError, {"a": 2}, "4")
    assert list(tmp_path.iterdir()) == []
    interrupt(KeyboardInterrupt, plan, "1")
    with claimed_dir(tmp_path / "out", plan) as folder:
        (folder / "2").write_text("2")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["1", "2"]


def test_addresses_are_no_folders(tmp_path):
    assert local_path("a//b") == Path("a/b") and local_path(tmp_path) == tmp_path
    assert local_path("file:///a%20b/c") == Path("/a b/c")
    for address, remedy in (("hdfs://host:8020/a", "NFS gateway"), ("S3A://b/c", "mount-s3"), ("x-y://z", "mount it")):
        with pytest.raises(ConfigError, match=f"{address} is an address.*{remedy}"):
            local_path(address)


def test_a_folder_is_claimed_by_one_process(tmp_path):
    code = (
        "import sys, time; from ppldm.utils.files import claimed_dir\n"
        "with claimed_dir(sys.argv[1]) as folder:\n"
        "    (folder / sys.argv[2]).write_text('x'); print('in', flush=True); time.sleep(0.5)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "out")]
    first = subprocess.Popen([*command, "first"], stdout=subprocess.PIPE, text=True)
    assert first.stdout.readline() == "in\n"
    second = subprocess.run([*command, "second"], capture_output=True, text=True)
    assert first.wait() == 0 and second.returncode == 1 and "another process has just finished" in second.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["first"]


@pytest.mark.parametrize("before", ["it is made", "it is locked"])
def test_a_folder_that_gets_its_name_while_another_process_claims_it_is_kept(tmp_path, monkeypatch, before):
    unfinished, out, times = tmp_path / ".out.unfinished", tmp_path / "out", []

    def finish_elsewhere(function):
        def wrapper(*words, **settings):
            if not times and unfinished.exists():
                times.append(1)
                os.rename(unfinished, out)
            return function(*words, **settings)

        return wrapper

    unfinished.mkdir()
    (unfinished / "whole").write_text("whole")
    if before == "it is made":
        monkeypatch.setattr("pathlib.Path.is_dir", finish_elsewhere(Path.is_dir))
    else:
        monkeypatch.setattr("ppldm.utils.files.lock_folder", finish_elsewhere(lock_folder))
    with pytest.raises(OutputError, match="another process has just finished"), claimed_dir(out):
        raise AssertionError
    monkeypatch.undo()
    assert times and [path.name for path in out.iterdir()] == ["whole"]


def test_a_folder_is_held_until_it_has_its_name(tmp_path, monkeypatch):
    asked = "import sys; from ppldm.utils.files import is_held; print(is_held(sys.argv[1]))"
    held = []

    def replace(source, target):
        held.append(subprocess.run([sys.executable, "-c", asked, source], capture_output=True, text=True).stdout)
        os.rename(source, target)

    with claimed_dir(tmp_path / "out") as folder:
        (folder / "whole").write_text("whole")
        monkeypatch.setattr("ppldm.utils.files.os.replace", replace)
    assert held == ["True\n"] and [path.name for path in (tmp_path / "out").iterdir()] == ["whole"]


def full_disk(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_names_what_was_being_written(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError) as caught, atomic_write(tmp_path / "file") as file:
        file.write(b"x")
    assert caught.value.filename == str(tmp_path / "file")
    with pytest.raises(OSError) as caught, atomic_dir(tmp_path / "folder") as folder:
        (folder / "file").write_bytes(b"x")
    assert caught.value.filename == str(tmp_path / "folder")
    assert not list(tmp_path.iterdir())


def test_an_error_that_names_its_file_keeps_the_name(tmp_path):
    for number, name in ((errno.ENOSPC, "other"), (errno.EIO, None)):
        with pytest.raises(OSError) as caught, naming_full_disk(tmp_path / "file"):
            raise OSError(number, "no", name)
        assert caught.value.filename == name


@pytest.mark.parametrize(
    "content, said",
    [
        (None, "cannot read .*f.json: No such file.*; take another"),
        ("{", "f.json is not JSON .*; take another"),
        ("[" * 100_000, "f.json is not JSON .*; take another"),
        ("[]", "f.json does not hold a JSON object; take another"),
    ],
)
def test_a_json_object_that_cannot_be_read(tmp_path, content, said):
    path = tmp_path / "f.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=said):
        read_json_object(path, ConfigError, "take another")


def test_a_json_object_is_read(tmp_path):
    (tmp_path / "f.json").write_text('{"a": 1}')
    assert read_json_object(tmp_path / "f.json", ConfigError) == {"a": 1}


@pytest.mark.parametrize(
    "path, said",
    [
        ("picturs", "did you mean pictures?"),
        ("picturs/cat", "did you mean pictures/cats?"),
        *((path, "otherwise") for path in ("pictures", "zzz", ".", "/", "a" * 300, f"pictures/{'b' * 300}/c", "x\0y")),
    ],
)
def test_the_nearest_path_is_meant_and_none_is_an_error(tmp_path, monkeypatch, path, said):
    (tmp_path / "pictures/cats").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert meant_path(path, "otherwise") == said

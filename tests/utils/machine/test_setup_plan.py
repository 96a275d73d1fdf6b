"""The commands of an environment. That they run where nothing is installed is seen in tests/test_setup.py."""

import shlex
from pathlib import Path

import pytest

from ppldm.utils.errors import ConfigError
from ppldm.utils.machine.devices import KINDS
from ppldm.utils.machine.nvidia_smi import BUILDS, INDEX, Gpu
from ppldm.utils.machine.setup_plan import PIP_FLAGS, choose_device, main, plan

DEVICES = [*(name for name in KINDS if name != "gpu"), *(build.name for build in BUILDS)]
VENV = Path("/some where/venv")
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def root(tmp_path):
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements/lock.txt").write_text("numpy==1.26.4\npaddlepaddle==3.3.1\npaddlesde==0.2.5\n")
    return tmp_path


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("has_venv", [True, False])
@pytest.mark.parametrize("installer", ["pip", "uv", "/own/uv"])
def test_one_paddle_and_all_else_of_the_lock(root, device, has_venv, installer):
    for installed in DEVICES:
        lines = plan(device, VENV, has_venv=has_venv, installed=installed, root=root, installer=installer)
        commands = [shlex.split(line) for line in lines]
        assert (["python3", "-m", "venv", "--clear", str(VENV)] in commands) == (not has_venv)
        removed = [command for command in commands if "uninstall" in command]
        assert len(removed) == (has_venv and installed != device)
        from_paddle = [command for command in commands if "--index-url" in command]
        assert len(from_paddle) == (device != "cpu")
        kind = KINDS.get(device, KINDS["gpu"])
        for command in from_paddle:
            assert f"{kind.package}=={kind.version or '3.3.1'}" in command and "--no-deps" not in command
            assert command[-1] == f"{INDEX}{kind.index or device}/"
        beside = [command for command in commands if command[-1].startswith("paddlepaddle==")]
        assert [command[-1] for command in beside] == [f"paddlepaddle=={kind.version}"] * kind.plugin
        lists = str(root / f"requirements/{'lock' if device == 'cpu' else 'lock-gpu'}.txt")
        assert [one[-1] for one in commands if "--requirement" in one and "--no-deps" in one] == [lists]
        assert commands[-1][-2:] == ["--editable", str(root)] and "--no-deps" in commands[-1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("installer", ["pip", "uv", "/own/uv"])
def test_one_program_installs_all_but_uv_itself_and_what_is_of_paddles_own_index(root, device, installer):
    python = str(VENV / "bin/python")
    commands = [shlex.split(line) for line in plan(device, VENV, root=root, installer=installer)][1:]
    by_pip = [python, "-m", "pip", "install", *PIP_FLAGS]
    of_pypi = [*by_pip, "--requirement", str(root / "requirements/uv.txt")]
    assert (commands[0] == of_pypi) == (installer == "uv") and of_pypi not in commands[1:]
    starts = {"pip": by_pip, "uv": [python, "-m", "uv"], "/own/uv": ["/own/uv"]}
    for one in commands:
        if one == of_pypi or "--index-url" in one:
            assert one[: len(by_pip)] == by_pip
        else:
            assert one[: len(starts[installer])] == starts[installer]
            assert ("--python" in one) == (installer != "pip") and (installer == "pip" or python in one)
            # As pip does by itself: where Python may write no bytecode, each start would compile all that it imports.
            assert ("--compile-bytecode" in one) == (installer != "pip" and "--requirement" in one)


def test_the_lock_of_gpus_is_that_of_cpus_without_paddle():
    def lines(name):
        return [line for line in (ROOT / "requirements" / name).read_text().splitlines() if not line.startswith("#")]

    cpu = lines("lock.txt")
    without = [line for line in cpu if not line.startswith("paddlepaddle==")]
    assert lines("lock-gpu.txt") == without and len(without) == len(cpu) - 1


def test_the_machine_chooses_and_nvidia_comes_first():
    gpu = Gpu("card", "550.54.14", 8.0)
    for kind in KINDS.values():
        if kind.name not in ("cpu", "gpu"):
            assert choose_device(None, None, [], "3.10", [kind])[0] == kind.name
            assert choose_device("cpu", None, [], "3.10", [kind])[0] == "cpu"
            assert choose_device(None, None, [gpu], "3.10", [kind])[0] == "cu126"
            assert choose_device(kind.name, None, [gpu], "3.10")[0] == kind.name
    assert choose_device(None, None, [], "3.12")[0] == "cpu"


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])
def test_a_python_that_paddle_is_not_built_for_is_refused(kind, python):
    if python in kind.pythons:
        choose_device(kind.name, None, [], python)
    else:
        with pytest.raises(
            ConfigError, match=f"{kind.words} is built for Python 3.10 only, and this is {python}; .*PY"
        ):
            choose_device(kind.name, None, [], python)


@pytest.mark.parametrize("has_venv", [False, True])
def test_the_shell_scripts_flags_are_understood(monkeypatch, capsys, has_venv):
    words = ["commands", "cpu", "--venv", str(VENV), *["--has-venv"] * has_venv, "--installed", "cpu", "--pip"]
    monkeypatch.setattr("sys.argv", ["setup_plan", *words])
    main()
    assert capsys.readouterr().out.splitlines() == plan("cpu", VENV, has_venv=has_venv)

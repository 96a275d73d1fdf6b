"""The commands of an environment. That they run where nothing is installed is seen in tests/test_setup.py."""

import shlex
import subprocess
from pathlib import Path

import pytest

from ppldm.utils.machine.builds import BUILDS
from ppldm.utils.machine.setup_plan import plan

DEVICES = ["cpu", *(build.name for build in BUILDS)]
VENV = Path("/some where/venv")


@pytest.fixture
def root(tmp_path):
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements/lock.txt").write_text("numpy==1.26.4\npaddlepaddle==3.3.1\npaddlesde==0.2.5\n")
    return tmp_path


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("installed", DEVICES)
@pytest.mark.parametrize("has_venv", [True, False])
def test_one_paddle_and_all_else_of_the_lock(root, device, installed, has_venv):
    commands = [shlex.split(line) for line in plan(device, VENV, has_venv=has_venv, installed=installed, root=root)]
    assert (["python3", "-m", "venv", "--clear", str(VENV)] in commands) == (not has_venv)
    removed = [command for command in commands if "uninstall" in command]
    assert len(removed) == (has_venv and installed != device)
    from_paddle = [command for command in commands if "--index-url" in command]
    assert len(from_paddle) == (device != "cpu")
    for command in from_paddle:
        assert "paddlepaddle-gpu==3.3.1" in command and "--no-deps" not in command
        assert command[-1].endswith(f"/{device}/")
    (lists,) = (command[command.index("--requirement") + 1] for command in commands if "--requirement" in command)
    assert (lists == str(root / "requirements/lock.txt")) == (device == "cpu")
    assert commands[-1][-2:] == ["--editable", str(root)] and "--no-deps" in commands[-1]
    assert all(command[0] in ("python3", "grep", str(VENV / "bin/python")) for command in commands)


def test_the_gpu_plan_leaves_only_paddle_out_of_the_lock(root, tmp_path):
    venv = tmp_path / "a venv"
    venv.mkdir()
    (line,) = (line for line in plan("cu126", venv, root=root) if line.startswith("grep"))
    subprocess.run(["bash", "-c", line], check=True)
    assert (venv / "lock-without-paddle.txt").read_text() == "numpy==1.26.4\npaddlesde==0.2.5\n"

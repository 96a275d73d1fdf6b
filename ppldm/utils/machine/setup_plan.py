"""The commands that make an environment for ppldm: the lock, with the build of Paddle that the machine's device needs.

    python -m ppldm.utils.machine.setup_plan device [--device cpu|gpu] [--cuda 12.6]
    python -m ppldm.utils.machine.setup_plan commands DEVICE --venv .venv [--has-venv] [--installed DEVICE]

The first prints `cpu` or `cu126` (and why, on stderr), the second one command a line, as a person would paste it into
a shell. run_scripts/lib.sh prints and runs them. Nothing is installed yet when this runs: it needs only Python.
"""

import argparse
import re
import shlex
import sys
from pathlib import Path

from ..errors import ConfigError, exit_on_error
from . import devices
from .builds import BUILDS, check_build, choose_build, find_build

ROOT = Path(__file__).resolve().parents[3]
CPU = "cpu"
PIP_FLAGS = ("--no-input", "--no-warn-script-location")


def choose_device(device: str | None, cuda: str | None, gpus: list[devices.Gpu]) -> tuple[str, str]:
    """`cpu` or the name of a GPU build (`cu126`), and the reason in words.

    `device` and `cuda` are what was asked for, None where the machine decides. Raises ConfigError for what cannot run.
    """
    if device not in (None, CPU, "gpu"):
        raise ConfigError(f"--device {device}: choose cpu or gpu, or omit it")
    if device == CPU:
        if cuda:
            raise ConfigError("--cuda goes with --device gpu, not with --device cpu; omit one of them")
        return CPU, "--device cpu was given"
    if not gpus and device is None and cuda is None:
        return CPU, f"{devices.NO_GPU} (--device gpu installs for one all the same)"
    build = find_build(cuda) if cuda else choose_build(gpus)
    check_build(build, gpus)
    seen = "; ".join(dict.fromkeys(map(str, gpus))) or "no GPU to be seen here; the driver is not checked"
    return build.name, f"CUDA {build.cuda} for {seen}"


def plan(
    device: str,
    venv: Path,
    *,
    python: str = "python3",
    has_venv: bool = False,
    installed: str = CPU,
    root: Path = ROOT,
) -> list[str]:
    """Shell commands that make `venv` hold exactly the lock, Paddle's build for `device`, and ppldm itself.

    `has_venv`: the folder is a virtual environment already. `installed`: the device of the Paddle in it, whose files
    another build must not be unpacked over.
    """
    lock = root / "requirements/lock.txt"
    own_python = str(venv / "bin/python")
    install = [own_python, "-m", "pip", "install", *PIP_FLAGS]
    exactly = [*install, "--no-deps", "--no-build-isolation"]
    commands = [] if has_venv else [[python, "-m", "venv", "--clear", str(venv)]]
    if has_venv and installed != device:
        commands.append([own_python, "-m", "pip", "uninstall", "--yes", "paddlepaddle", "paddlepaddle-gpu"])
    # The few packages without a wheel are built with the lock's own setuptools, not with the newest.
    commands.append([*install, "--constraint", str(lock), "pip", "setuptools", "setuptools-scm"])
    lines = [shlex.join(command) for command in commands]
    if device == CPU:
        lines.append(shlex.join([*exactly, "--requirement", str(lock)]))
    else:
        (build,) = (build for build in BUILDS if build.name == device)
        others = venv / "lock-without-paddle.txt"
        paddle = f"paddlepaddle-gpu=={paddle_version(lock.read_text())}"
        lines.append(f"grep -v ^paddlepaddle== {shlex.quote(str(lock))} >{shlex.quote(str(others))}")
        lines.append(shlex.join([*exactly, "--requirement", str(others)]))
        # With what it requires: the libraries that the same index has.
        lines.append(shlex.join([*install, "--constraint", str(lock), paddle, "--index-url", build.index_url]))
    return [*lines, shlex.join([*exactly, "--editable", str(root)])]


def paddle_version(lock: str) -> str:
    """The version of Paddle that the text of the lock pins: the same one for every device."""
    return re.search(r"^paddlepaddle==(\S+)$", lock, re.MULTILINE).group(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    choose = actions.add_parser("device")
    choose.add_argument("--device")
    choose.add_argument("--cuda")
    choose.add_argument("--look", action="store_true", help="what the machine has; the same without any flag")
    show = actions.add_parser("commands")
    show.add_argument("device")
    show.add_argument("--venv", type=Path, required=True)
    show.add_argument("--python", default="python3")
    show.add_argument("--has-venv", action="store_true")
    show.add_argument("--installed", default=CPU)
    arguments = parser.parse_args()
    if arguments.action == "device":
        device, reason = choose_device(arguments.device, arguments.cuda, devices.list_gpus())
        sys.stdout.write(f"{device}\n")
        sys.stderr.write(f"==> {device}: {reason}\n")
    else:
        settings = {"python": arguments.python, "has_venv": arguments.has_venv, "installed": arguments.installed}
        sys.stdout.write("".join(f"{line}\n" for line in plan(arguments.device, arguments.venv, **settings)))


if __name__ == "__main__":
    with exit_on_error():
        main()

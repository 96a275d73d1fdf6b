"""The commands that make an environment for ppldm: the lock, with the build of Paddle that the machine's device needs.

    python -m ppldm.utils.machine.setup_plan device [--device cpu|gpu|npu|…] [--cuda 12.6]
    python -m ppldm.utils.machine.setup_plan commands DEVICE --venv .venv [--has-venv] [--installed DEVICE] [--pip]

The first prints `cpu`, `cu126` or `npu` (and why, on stderr), the second one command a line, as one would paste it into
a shell. run_scripts/lib.sh prints and runs them. Nothing is installed yet when this runs: it needs only Python.
"""

import argparse
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import ConfigError, exit_on_error
from ..variables import all_variables
from . import devices, nvidia_smi, uv
from .builds import BUILDS, INDEX, check_build, choose_build, find_build

ROOT = Path(__file__).resolve().parents[3]
CPU, GPU = devices.CPU.name, devices.GPU.name
PIP_FLAGS = ("--no-input", "--no-warn-script-location")


def choose_device(
    device: str | None, cuda: str | None, gpus: list[nvidia_smi.Gpu], python: str, seen: Sequence[devices.Kind] = ()
) -> tuple[str, str]:
    """The name of a kind of device, or of a GPU build (`cu126`), and the reason in words.

    `device` and `cuda` are what was asked for, None where the machine decides, by its NVIDIA GPUs and by what other
    drivers show; `python`: the interpreter's version, as 3.10. Raises ConfigError for what cannot run.
    """
    if device not in (None, *devices.KINDS):
        raise ConfigError(f"--device {device}: choose {', '.join(devices.KINDS)}, or omit it")
    if cuda and device not in (None, GPU):
        raise ConfigError(f"--cuda goes with --device gpu, not with --device {device}; omit one of them")
    others = [kind for kind in seen if kind.name != GPU]
    chosen = device or (GPU if gpus or cuda else others[0].name if others else CPU)
    kind = devices.KINDS[chosen]
    why = f"--device {device} was given" if device else f"the driver of {kind.words} is here"
    if chosen == CPU:
        return CPU, why if device else f"{nvidia_smi.NO_GPU}, and no other driver is here (--device installs for one)"
    if python not in kind.pythons:
        raise ConfigError(
            f"Paddle for {kind.words} is built for Python {', '.join(kind.pythons)} only, and this is {python}; name "
            f"one: PYTHON=/path/to/python{kind.pythons[-1]} bash run_scripts/setup.sh"
        )
    if chosen != GPU:
        return chosen, why
    build = find_build(cuda) if cuda else choose_build(gpus)
    check_build(build, gpus)
    shown = "; ".join(dict.fromkeys(map(str, gpus))) or "no GPU to be seen here; the driver is not checked"
    return build.name, f"CUDA {build.cuda} for {shown}"


def plan(
    device: str,
    venv: Path,
    *,
    python: str = "python3",
    has_venv: bool = False,
    installed: str = CPU,
    root: Path = ROOT,
    installer: str = "pip",
) -> list[str]:
    """Shell commands that make `venv` hold exactly the lock, Paddle for `device`, and ppldm itself.

    `has_venv`: the folder is a virtual environment already. `installed`: the device of the Paddle in it, whose files
    another one must not be unpacked over. `installer`: `pip`, `uv` from PyPI, or the path of a uv.
    """
    lock = root / f"requirements/{'lock' if device == CPU else 'lock-gpu'}.txt"
    own_python = str(venv / "bin/python")
    by_pip = [own_python, "-m", "pip", "install", *PIP_FLAGS]
    own_uv = [own_python, "-m", "uv"] if installer == "uv" else [installer]
    install = by_pip if installer == "pip" else [*own_uv, "pip", "install", "--python", own_python]
    exactly = [*install, "--no-deps", "--no-build-isolation"]
    commands = [] if has_venv else [[python, "-m", "venv", "--clear", str(venv)]]
    if has_venv and installed != device:
        commands.append([own_python, "-m", "pip", "uninstall", "--yes", *(k.package for k in devices.KINDS.values())])
    if installer == "uv":
        commands.append([*by_pip, "--requirement", str(root / "requirements/uv.txt")])
    # The few packages without a wheel are built with the lock's own setuptools, not with the newest.
    commands.append([*install, "--constraint", str(lock), "pip", "setuptools", "setuptools-scm"])
    # pip compiles what it unpacks; uv must be told.
    commands.append([*exactly, *([] if installer == "pip" else ["--compile-bytecode"]), "--requirement", str(lock)])
    if device != CPU:
        package, index_url, version = find_package(device)
        version = version or paddle_version((root / "requirements/lock.txt").read_text())
        if device in devices.KINDS and devices.KINDS[device].plugin:
            commands.append([*exactly, f"{devices.KINDS[CPU].package}=={version}"])
        # With what it requires: the libraries that the same index has. By pip, which all of Paddle's are tried with.
        wanted = [f"{package}=={version}", "--index-url", index_url]
        commands.append([*by_pip, "--constraint", str(lock), *wanted])
    return [shlex.join(command) for command in [*commands, [*exactly, "--editable", str(root)]]]


def find_package(device: str) -> tuple[str, str, str]:
    """Package, index and version ("": the lock's) of Paddle for a build for GPUs or another kind of device."""
    if device not in devices.KINDS:
        (build,) = (build for build in BUILDS if build.name == device)
        return devices.KINDS[GPU].package, build.index_url, ""
    kind = devices.KINDS[device]
    return kind.package, f"{INDEX}{kind.index}/", kind.version


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
    show.add_argument("--pip", action="store_true", help="without uv")
    arguments = parser.parse_args()
    if arguments.action == "device":
        python = "{}.{}".format(*sys.version_info)
        gpus, seen = nvidia_smi.list_gpus(), devices.seen_kinds()
        device, reason = choose_device(arguments.device, arguments.cuda, gpus, python, seen)
        sys.stdout.write(f"{device}\n")
        sys.stderr.write(f"==> {device}: {reason}\n")
    else:
        chosen, variables, why_pip = uv.choose_installer(all_variables(), arguments.venv)
        if arguments.pip:
            chosen, variables, why_pip = "pip", {}, ""
        settings = {"python": arguments.python, "has_venv": arguments.has_venv, "installed": arguments.installed}
        lines = plan(arguments.device, arguments.venv, **settings, installer=chosen)
        exports = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
        lines[not arguments.has_venv : 0] = [f"# by pip: {why_pip}"] if why_pip else exports
        sys.stdout.write("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    with exit_on_error():
        main()

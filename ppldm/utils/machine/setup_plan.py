"""The commands that make an environment for ppldm: the lock, with the build of Paddle that the machine's device needs.

    python -m ppldm.utils.machine.setup_plan device [--device cpu|gpu|npu|…] [--cuda 12.6]
    python -m ppldm.utils.machine.setup_plan commands DEVICE --venv .venv [--has-venv] [--installed DEVICE] [--pip]

The first prints `cpu`, `cu126` or `npu` (and why, on stderr), the second one command a line, as one would paste it into
a shell. run_scripts/lib.sh prints and runs them. Nothing is installed yet when this runs: it needs only Python.
"""

import argparse
import configparser
import os
import re
import shlex
import shutil
import ssl
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..errors import ConfigError, exit_on_error
from ..variables import all_variables
from . import devices, nvidia_smi
from .nvidia_smi import BUILDS, INDEX, choose_build

ROOT = Path(__file__).resolve().parents[3]
CPU, GPU = devices.CPU.name, devices.GPU.name
PIP_FLAGS = ("--no-input", "--no-warn-script-location")
# uv installs in place of pip where it can. It reads neither pip.conf nor variables such as PIP_INDEX_URL: each setting
# of pip is translated, or has no effect on what is installed, or pip installs.
NEEDED_GIB = 5  # for uv's cache, of which the environment has hard links
# Setting of pip to the variables of uv that its value makes.
COUNTERPARTS: dict[str, Callable[[str], dict[str, str]]] = {
    "index-url": lambda value: {"UV_DEFAULT_INDEX": " ".join(value.split())},
    "extra-index-url": lambda value: {"UV_EXTRA_INDEX_URL": " ".join(value.split())},
    "find-links": lambda value: {"UV_FIND_LINKS": ",".join(value.split())},
    "trusted-host": lambda value: {"UV_INSECURE_HOST": " ".join(value.split())},
    "retries": lambda value: {"UV_HTTP_RETRIES": value},
    **dict.fromkeys(("timeout", "default-timeout"), lambda value: {"UV_HTTP_TIMEOUT": value.partition(".")[0]}),
    "cert": lambda value: {"SSL_CERT_DIR" if os.path.isdir(value) else "SSL_CERT_FILE": value},
    "client-cert": lambda value: {"SSL_CLIENT_CERT": value},
    "proxy": lambda value: dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY"), value),
    "constraint": lambda value: {"UV_CONSTRAINT": " ".join(value.split())},
    "cache-dir": lambda value: {"UV_CACHE_DIR": os.path.join(value, "uv")},
    "no-cache-dir": lambda value: {"UV_NO_CACHE": "1"},  # any value means yes
}
NO_EFFECT = {
    *("config-file", "disable-pip-version-check", "user", "no-input", "progress-bar", "quiet", "verbose", "no-color"),
    *("require-virtualenv", "require-venv", "break-system-packages", "root-user-action", "prefer-binary", "log"),
    *("no-warn-script-location", "no-python-version-warning", "upgrade-strategy", "use-feature", "use-deprecated"),
}
UNSET = ("", "0", "f", "false", "n", "no", "off")  # what pip reads as no


def choose_device(
    device: str | None, cuda: str | None, gpus: list[nvidia_smi.Gpu], python: str, seen: Sequence[devices.Kind] = ()
) -> tuple[str, str]:
    """The name of a kind of device, or of a GPU build (`cu126`), and why. `device`, `cuda`: what was asked for, None
    where the machine's GPUs and drivers decide; `python`: the interpreter's version, as 3.10. Raises ConfigError."""
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
    build = choose_build(gpus, cuda)
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
    """Shell commands that make `venv` hold exactly the lock, Paddle for `device`, and ppldm itself. `has_venv`: it is
    there already. `installed`: the device of the Paddle in it, whose files another one must not be unpacked over.
    `installer`: `pip`, `uv` from PyPI, or the path of a uv."""
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
        urls = {build.name: build.index_url for build in BUILDS}
        kind = devices.KINDS[GPU if device in urls else device]
        pins = (root / "requirements/lock.txt").read_text()  # for every device the same, unless the kind says another
        version = kind.version or re.search(r"^paddlepaddle==(\S+)$", pins, re.MULTILINE).group(1)
        if kind.plugin:
            commands.append([*exactly, f"{devices.KINDS[CPU].package}=={version}"])
        # With what it requires: the libraries that the same index has. By pip, which all of Paddle's are tried with.
        wanted = [f"{kind.package}=={version}", "--index-url", urls.get(device, f"{INDEX}{kind.index}/")]
        commands.append([*by_pip, "--constraint", str(lock), *wanted])
    return [shlex.join(command) for command in [*commands, [*exactly, "--editable", str(root)]]]


def read_pip_settings(environ: Mapping[str, str], prefix: Path) -> dict[str, str]:
    """What pip would find in its files and in the environment, by the long names of its flags."""
    home = Path(environ.get("HOME") or os.path.expanduser("~"))
    own = [home / ".pip", Path(environ.get("XDG_CONFIG_HOME") or home / ".config", "pip")]
    folders = [Path(one, "pip") for one in (environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":")]
    files = [folder / "pip.conf" for folder in (*folders, Path("/etc"), *own, prefix)]
    if named := environ.get("PIP_CONFIG_FILE"):  # in place of the user's own
        own_files = [folder / "pip.conf" for folder in own if os.path.exists(named)]
        files = [] if named == os.devnull else [*(one for one in files if one not in own_files), Path(named)]
    parser = configparser.RawConfigParser()
    parser.read(files, "utf-8")
    read = [parser[section] for section in ("global", "install") if parser.has_section(section)]
    names = {name: value for name, value in environ.items() if name.startswith("PIP_")}
    read.append({name.removeprefix("PIP_"): value for name, value in names.items()})
    return {name.lower().replace("_", "-").removeprefix("--"): value for one in read for name, value in one.items()}


def translate(settings: Mapping[str, str], environ: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Variables for uv, and the settings that it has no counterpart of. What is set for uv itself stays as it is."""
    variables, unknown = {}, []
    if bundle := environ.get("REQUESTS_CA_BUNDLE") or environ.get("CURL_CA_BUNDLE"):
        settings = {"cert": bundle, **settings}
    for name, value in settings.items():
        if name in COUNTERPARTS:
            variables |= COUNTERPARTS[name](value)
        elif name not in NO_EFFECT and value.lower() not in UNSET:
            unknown.append(name)
    if "UV_EXTRA_INDEX_URL" in variables:
        variables["UV_INDEX_STRATEGY"] = "unsafe-best-match"  # pip looks for a version in all of them
    paths = ssl.get_default_verify_paths()
    if paths.cafile or (paths.capath and os.listdir(paths.capath)):
        variables |= dict.fromkeys(("UV_SYSTEM_CERTS", "UV_NATIVE_TLS"), "1")  # the second is the older name
    own = {name for name in environ if name.startswith("UV_")}
    return {k: v for k, v in variables.items() if k not in own and environ.get(k) != v}, unknown


def choose_installer(environ: Mapping[str, str], venv: Path) -> tuple[str, dict[str, str], str]:
    """`pip`, `uv` (from PyPI) or the path of a uv that is there; variables for uv; why it is pip, if it is."""
    variables, unknown = translate(read_pip_settings(environ, venv), environ)
    if unknown:
        return "pip", {}, f"uv has no counterpart of pip's setting {', '.join(unknown)}"
    merged = {**environ, **variables}
    cache = Path(merged.get("XDG_CACHE_HOME") or Path(merged.get("HOME") or os.path.expanduser("~"), ".cache"), "uv")
    cache = Path(tempfile.gettempdir() if merged.get("UV_NO_CACHE") else merged.get("UV_CACHE_DIR") or cache).absolute()
    place = next(folder for folder in (cache, *cache.parents) if folder.exists())
    if not os.access(place, os.W_OK):
        return "pip", {}, f"uv's cache {cache} cannot be written"
    if (free := shutil.disk_usage(place).free) < NEEDED_GIB << 30:
        return "pip", {}, f"{place} has {free >> 30} GiB free for uv's cache, which takes {NEEDED_GIB}"
    return shutil.which("uv", path=environ.get("PATH")) or "uv", variables, ""


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
        chosen, variables, why_pip = choose_installer(all_variables(), arguments.venv)
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

"""`ppldm env`: is everything here that training needs, in versions that work together? No package is imported: a
broken one is reported by its name and remedy, and not by a traceback from deep inside another one."""

import platform
import shlex
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.specifiers import SpecifierSet

from ..errors import EnvironmentProblem
from ..text import print_report
from . import devices
from . import resources as machine

if TYPE_CHECKING:
    from .nvidia_smi import Gpu

# This very environment: a bare `python` may be another one.
PYTHON = shlex.quote(sys.executable)
PIP = f"{PYTHON} -m pip"

# The version to install where a package is missing or known to be broken. setup.py's bounds admit each of these.
PINS = {
    "setuptools": ">=70.1,<80",
    "numpy": ">=1.26,<2.3",
    "protobuf": ">=6.33.5,<7",
    "pillow": ">=10,<13",
    "pandas": ">=2.2,<3",
    "pyarrow": ">=21,<22",
    "paddlepaddle": "==3.3.1",
    "aistudio-sdk": ">=0.2.6,<0.4",
    "huggingface-hub": ">=0.25,<3",
    "datasets": "==3.1.0",
    "tokenizers": ">=0.21,<0.22",
    "visualdl": "==2.5.3",
    "paddlenlp": "==3.0.0b4",
    "ppdiffusers": "==0.29.0",
    "fastcore": ">=2.2,<3",
}


# Versions (a PEP 440 specifier) of a package that do not work with the rest, and why.
KNOWN_BAD = (
    ("protobuf", ">=7", "visualdl cannot log a run's flags: it writes a bool where protobuf 7 wants an int"),
    ("protobuf", "<3.20.2", "paddlepaddle 3 needs 3.20.2 or newer"),
    ("pandas", ">=3", "it needs numpy 2, which paddlenlp does not admit"),
    ("pyarrow", ">=26", "it needs numpy 2, which paddlenlp does not admit"),
    ("paddlepaddle", "<3", "paddlenlp 3.0.0b4 needs Paddle 3"),
    ("paddlepaddle-gpu", "<3", "paddlenlp 3.0.0b4 needs Paddle 3, and PyPI's newest GPU build is 2.6.2"),
    ("datasets", "<3", "it does not work with pyarrow 21"),
    ("datasets", ">=5", "it imports names that huggingface_hub 0.25 does not have"),
    ("paddlenlp", "<3.0.0b4", "older ones are made for Paddle 2"),
    ("fastcore", "<2.2", "ppldm's command line needs 2.2 or newer"),
)

BUILDS_OF_OTHERS = tuple(
    kind.package for kind in devices.KINDS.values() if kind.package != "paddlepaddle" and not kind.plugin
)

# In place of opencv-python, which needs libGL.so.1; docs/installation.md and docs/faq.md name it too.
HEADLESS_OPENCV = "opencv-python-headless==4.11.0.86"
# Shown too, without a claim about them.
SHOWN = ("opencv-python", "opencv-python-headless", "pip", "pyspark", "img2dataset")


MISSING = "missing"  # in place of a version


@dataclass(frozen=True)
class Row:
    """One line of the table. `status` is ok, note (works, with a limit) or problem (keeps training from working)."""

    name: str
    value: str
    status: str = "ok"
    reason: str = ""
    fix: str = ""

    @property
    def found(self) -> str:
        """What a problem is."""
        return f"{self.name} {'is missing' if self.value == MISSING else self.value}: {self.reason}"

    def __str__(self):
        return f"{self.found}; fix: {self.fix}"


def check(versions: dict[str, str]) -> list[Row]:
    """What is wrong with a set of installed packages, versions by normalised names (`huggingface-hub`), in a fixed
    order. One build of Paddle is enough, two are a problem: they overwrite each other's files."""
    problems = []
    if "pip" not in versions:
        problems.append(Row("pip", MISSING, "problem", "paddlenlp imports it", f"{PYTHON} -m ensurepip"))
    cpu, build = versions.get("paddlepaddle"), next((name for name in BUILDS_OF_OTHERS if name in versions), None)
    if cpu and build:
        fix = f"{PIP} uninstall -y paddlepaddle && {PIP} install --force-reinstall --no-deps {build}=={versions[build]}"
        problems.append(Row("paddlepaddle", cpu, "problem", f"{build} is installed over it", fix))
    for name in PINS:
        if name not in versions and not (name == "paddlepaddle" and build):
            problems.append(Row(name, MISSING, "problem", "ppldm needs it", fix_command(name)))
    for package, bad, reason in KNOWN_BAD:
        version = versions.get(package)
        if version and SpecifierSet(bad).contains(version, prereleases=True):
            problems.append(Row(package, version, "problem", reason, fix_command(package)))
    return problems


def fix_command(package: str) -> str:
    """The command that installs a version of `package` that works."""
    if package == "paddlepaddle-gpu":
        from . import nvidia_smi

        gpus = nvidia_smi.list_gpus()
        fitting = [build for build in nvidia_smi.BUILDS if all(build.fits(gpu) for gpu in gpus)]
        if not fitting:
            return f"{nvidia_smi.why_none_fits(gpus)}, or train on the CPU (--device cpu)"
        return f"{PIP} install 'paddlepaddle-gpu{PINS['paddlepaddle']}' --index-url {fitting[0].index_url}"
    return f"{PIP} install '{package}{PINS[package]}'"


def check_python(version: tuple[int, int]) -> Row | None:
    """Paddle and the rest have builds for Python 3.10 to 3.13."""
    if (3, 10) <= version <= (3, 13):
        return None
    fix = "PYTHON=/path/to/python3.11 bash run_scripts/quickstart.sh"
    return Row("Python", f"{version[0]}.{version[1]}", "problem", "the stack needs 3.10 to 3.13", fix)


def check_libgomp() -> Row | None:
    """Paddle for Linux loads libgomp.so.1 and does not carry it; slim images of Debian and Ubuntu lack it."""
    if sys.platform != "linux" or machine.has_library("libgomp.so.1"):
        return None
    carried = Path(sys.prefix, "lib/native")  # run_scripts/lib.sh puts one there
    has_carried = (carried / "libgomp.so.1").exists()
    fix = f"export LD_LIBRARY_PATH={carried}" if has_carried else "sudo apt install libgomp1"
    return Row("libgomp.so.1", MISSING, "problem", "paddle needs it", fix)


def installed_versions() -> dict[str, str]:
    """Versions of the packages that matter here, by normalised name; those that are not installed are left out."""
    return machine.versions_of((*PINS, *(kind.package for kind in devices.KINDS.values()), *SHOWN))


def find_problems(versions: dict[str, str]) -> list[Row]:
    """Everything that keeps training from working on this machine, given the installed `versions`."""
    return [one for one in (check_python(sys.version_info[:2]), check_libgomp()) if one] + check(versions)


def require_working_environment() -> None:
    """In milliseconds, without paddle. Raises EnvironmentProblem for the first thing that is broken, with its fix."""
    problems = find_problems(installed_versions())
    if problems:
        raise EnvironmentProblem(f"{problems[0]} (`ppldm env` shows everything)")


def env(
    json: bool = False,  # print JSON instead of a table
):
    """Show what this machine and its packages are, and how to fix what is broken."""
    versions = installed_versions()
    problems = find_problems(versions)
    broken = {problem.name for problem in problems}
    rows = [*machine_rows(versions), *problems, *(Row(*one) for one in versions.items() if one[0] not in broken)]
    width, lines = max(len(row.name) for row in rows) + 2, []
    for row in rows:
        lines.append(f"{row.status:<9}{row.name:<{width}}{row.value}")
        if row.status != "ok":
            lines += [f"{'':<{9 + width}}{row.reason}", f"{'':<{9 + width}}fix: {row.fix}"]
    print_report({"ok": not problems, "rows": [asdict(row) for row in rows]}, lambda _: "\n".join(lines), json)
    if problems:
        raise EnvironmentProblem(f"{len(problems)} of the rows above are a problem; the first: {problems[0]}")


def machine_rows(versions: dict[str, str]) -> list[Row]:
    """The machine: nothing here is a problem, but some of it limits what works."""
    from .nvidia_smi import list_gpus

    memory, gpus = machine.usable_memory_bytes(), list_gpus()
    return [
        Row("Python", f"{platform.python_version()} ({sys.executable})"),
        Row("platform", platform.platform()),
        Row("cores", str(machine.count_usable_cores())),
        Row("memory", f"{memory / 2**30:.1f} GiB" if memory else "unknown"),
        shared_memory_row(shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else None),
        gpu_row(gpus, "paddlepaddle-gpu" in versions),
        *accelerator_rows(devices.seen_kinds(), devices.installed_kind(list(versions))),
        java_row(machine.read_java_version(), "pyspark" in versions),
        libgl_row(machine.has_library("libGL.so.1"), "opencv-python" in versions),
    ]


def shared_memory_row(size: int | None) -> Row:
    """/dev/shm of `size` bytes, None where there is none. Docker gives 64 MiB unless told otherwise."""
    value = "none" if size is None else f"{size / 2**30:.2f} GiB"
    note = ("note", "several GPUs of one machine talk through it (NCCL)", "docker run --shm-size=2g ...")
    return Row("/dev/shm", value, *(note if (size or 0) < 2**29 else ()))


def gpu_row(gpus: "list[Gpu]", has_gpu_build: bool) -> Row:
    """The GPUs, and whether the installed Paddle uses them."""
    names = "; ".join(map(str, gpus))
    if gpus and not has_gpu_build:
        fix = f"{PIP} uninstall -y paddlepaddle && {fix_command('paddlepaddle-gpu')}"
        return Row("GPUs", names, "note", "the installed Paddle is a CPU build and leaves them idle", fix)
    if has_gpu_build and not gpus:
        from .nvidia_smi import NO_GPU

        return Row("GPUs", "none", "note", f"{NO_GPU}; Paddle's GPU build will run on the CPU", "--device cpu")
    return Row("GPUs", names or "none (training runs on the CPU)")


def accelerator_rows(seen: list[devices.Kind], installed: devices.Kind) -> list[Row]:
    """The devices of other makers, and whether the installed Paddle is made for them."""
    rows = []
    for kind in {kind.name: kind for kind in (*seen, installed)}.values():
        if kind in (devices.CPU, devices.GPU):
            continue
        if kind == installed and kind in seen:
            rows.append(Row(kind.name, kind.words))
        elif kind == installed:
            note = "no file of its driver is here; Paddle will run on the CPU"
            rows.append(Row(kind.name, "none", "note", note, "install the driver, or use --device cpu"))
        else:
            fix = f"bash run_scripts/setup.sh --device {kind.name}"
            note = f"the installed Paddle is made for {installed.words} and leaves it idle"
            rows.append(Row(kind.name, kind.words, "note", note, fix))
    return rows


def java_row(version: str | None, has_spark: bool) -> Row:
    """Java, which only the filter of LAION metadata needs, through Spark 4."""
    if not has_spark:
        return Row("Java", version or "none (needed for the extra `data` only)")
    if version and machine.parse_java_major(version) >= 17:
        return Row("Java", version)
    return Row("Java", version or "none", "note", "Spark 4 needs Java 17", "sudo apt install openjdk-17-jre-headless")


def libgl_row(has_libgl: bool, has_opencv_python: bool) -> Row:
    """libGL.so.1, without which opencv-python cannot be imported. Training does without both."""
    if has_libgl or not has_opencv_python:
        return Row("libGL.so.1", "found" if has_libgl else "none (not needed)")
    # Both packages have the same files; the newest wants another numpy.
    fix = f"{PIP} uninstall -y opencv-python && {PIP} install --force-reinstall --no-deps {HEADLESS_OPENCV}"
    return Row(
        "libGL.so.1", "none", "note", "opencv-python cannot be imported without it; training does not need it", fix
    )

"""Figures with what they are figures of: machine, date, commit and command, in one JSON file a benchmark.

The files of benchmarks/results are committed: the figures in the docs are theirs, and a later run shows the drift.
"""

import argparse
import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from ppldm.utils.machine import nvidia_smi
from ppldm.utils.machine import resources as machine

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results"
BUSY = 0.5  # of a core: a machine with more load than that before the start is called busy


def add_result_flags(parser: argparse.ArgumentParser, name: str) -> None:
    """--json and --note. `name` is that of the benchmark, and of its file in benchmarks/results."""
    parser.add_argument(
        "--json",
        nargs="?",
        const=str(RESULTS / f"{name}.json"),
        metavar="OUT",
        help=f"also write the results to OUT, without OUT to benchmarks/results/{name}.json, which is committed",
    )
    parser.add_argument("--note", default="", help="a remark to keep with the results, such as what else was running")
    parser.set_defaults(load_before=os.getloadavg()[0])


def save_results(arguments: argparse.Namespace, results) -> None:
    """Write `results` (what JSON holds) where --json says, with what they are of; nothing without --json."""
    if not arguments.json:
        return
    path = Path(arguments.json)
    path.parent.mkdir(parents=True, exist_ok=True)
    load = {"before": arguments.load_before, "after": os.getloadavg()[0]}
    path.write_text(json.dumps({**describe(arguments.note, load), "results": results}, indent=2) + "\n")


def describe(note: str, load: dict[str, float]) -> dict:
    """Everything but the figures. `load` is the system's load average before and after; the note says if it is high."""
    busy = load["before"] > BUSY
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "command": shlex.join(["python", os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]]),
        "note": note or (f"measured beside other work: load {load['before']:.1f} before the start" if busy else ""),
        "machine": {
            "processor": processor(),
            "avx512": machine.has_vectors("avx512f"),  # others compute by other operators
            "cores": machine.count_usable_cores(),
            "memory_gb": round((machine.usable_memory_bytes() or 0) / 1e9, 1),
            "gpus": [str(gpu) for gpu in nvidia_smi.list_gpus()],
            "system": platform.platform(),
            "load": load,
            "busy": busy,
        },
        "versions": {"python": platform.python_version(), **_versions("paddlepaddle", "paddlepaddle-gpu", "numpy")},
    }


def commit() -> str | None:
    """The commit of the working tree, with `+changes` where files that git knows differ from it; None without git."""
    changes = ["status", "--porcelain", "--untracked-files=no", "--", ":!benchmarks/results"]
    head, status = (
        subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
        for words in (["rev-parse", "HEAD"], changes)
    )
    if head.returncode:
        return None
    return head.stdout.strip() + ("+changes" if status.stdout.strip() else "")


def export_commit(name: str, folder: Path) -> Path:
    """The files of a commit, in `folder`, which is made."""
    folder.mkdir()
    archive = subprocess.run(["git", "archive", name], cwd=ROOT, check=True, capture_output=True)
    subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
    return folder


def processor() -> str:
    """The processor's name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _versions(*names: str) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found

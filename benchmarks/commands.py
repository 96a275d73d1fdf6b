"""A command of ppldm run as a user runs it, and what it cost, with all the processes that it started."""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_POLL_SECONDS = 0.1
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Cost:
    """`seconds` of the clock, Python's start included; `cpu_seconds` that cores worked, which other load on the machine
    changes less; `peak_gb` of the largest process; `printed` is what came out."""

    seconds: float
    cpu_seconds: float
    peak_gb: float
    printed: str


def measure_command(module: str, words: Sequence, **environment: str) -> Cost:
    """Run `python -m module words`. Exits where that fails."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", module, *map(str, words)]
    started, cpu_seconds, peak_kib = time.monotonic(), {}, 0
    with tempfile.TemporaryFile("w+") as printed:
        process = subprocess.Popen(
            command, stdout=printed, stderr=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": path, **environment}
        )
        while process.poll() is None:
            for pid in _descendants(process.pid):
                cpu_seconds[pid] = max(_read_cpu_seconds(pid), cpu_seconds.get(pid, 0))
                peak_kib = max(peak_kib, _read_peak_kib(pid))
            time.sleep(_POLL_SECONDS)
        seconds = time.monotonic() - started
        printed.seek(0)
        text = printed.read()
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed; run it to see why")
    return Cost(seconds, sum(cpu_seconds.values()), peak_kib * 1024 / 1e9, text)


def _descendants(pid: int) -> list[int]:
    """A process and all that it started, directly or not."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        threads = [path / "children" for path in Path(f"/proc/{pid}/task").iterdir() if path.name != str(pid)]
        children += [child for path in threads for child in path.read_text().split()]
    except OSError:
        return [pid]
    return [pid, *(below for child in children for below in _descendants(int(child)))]


def _read_cpu_seconds(pid: int) -> float:
    """Of a process itself; 0 where it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:13])) / _TICKS_PER_SECOND


def _read_peak_kib(pid: int) -> int:
    """The most memory that a process has had; 0 where it is gone."""
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0
    return int(found.group(1)) if found else 0

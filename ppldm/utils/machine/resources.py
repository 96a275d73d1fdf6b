"""What this machine gives to this process: cores, memory, libraries. Read from the system; no package is imported.

A container or a batch job sees the whole machine in /proc, but may use only part of it; affinity and control groups
say how much."""

import ctypes
import os
import re
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from .. import variables

_CGROUP = Path("/sys/fs/cgroup")


def count_usable_cores() -> int:
    """Cores that this process may use: its affinity mask, cut to the quota of its control group. At least 1."""
    affinity = len(os.sched_getaffinity(0))
    quota = parse_cpu_quota(_read(_CGROUP / "cpu.max")) or parse_cpu_quota(
        f"{_read(_CGROUP / 'cpu/cpu.cfs_quota_us')} {_read(_CGROUP / 'cpu/cpu.cfs_period_us')}"
    )
    return min(affinity, max(1, int(quota))) if quota else affinity


def parse_cpu_quota(text: str) -> float | None:
    """Cores granted by "quota period" in microseconds (cgroup v2's cpu.max, or v1's two files); None: no limit."""
    words = text.split()
    if len(words) != 2 or not words[0].isdigit() or not words[1].isdigit():
        return None
    quota, period = int(words[0]), int(words[1])
    return quota / period if quota and period else None


def usable_memory_bytes() -> int | None:
    """Memory that this process may use: the machine's, or the limit of its control group. None where unknown."""
    total = _bytes_of("/proc/meminfo", "MemTotal")
    limits = [_read(_CGROUP / name).strip() for name in ("memory.max", "memory/memory.limit_in_bytes")]
    known = [int(limit) for limit in limits if limit.isdigit()] + ([total] if total else [])
    return min(known, default=None)


def available_memory_bytes() -> int | None:
    """Memory of the machine that a process could take now; None where unknown."""
    return _bytes_of("/proc/meminfo", "MemAvailable")


def process_memory_bytes(key: str) -> int:
    """Of this process' memory what Linux counts as VmRSS (resident now), VmHWM (the most that was) or RssAnon (what it
    has written, and no file holds); 0 where the system does not say."""
    return _bytes_of("/proc/self/status", key) or 0


def _bytes_of(path: str, key: str) -> int | None:
    words = parse_value(_read(path), key).split()
    return int(words[0]) * 1024 if words else None


def read_cpu(key: str) -> str:
    """What Linux says of the first processor: vendor_id (`AuthenticAMD`), model name, flags; else "", as not of x86."""
    return parse_value(_read("/proc/cpuinfo"), key)


def has_vectors(kind: str) -> bool:
    """Whether the processor computes by vectors of this kind: "avx2", "avx512f"."""
    return kind in read_cpu("flags").split()


def parse_value(text: str, key: str) -> str:
    """The value in the first line "key: value" of a file of /proc, or an empty string."""
    found = re.search(rf"^{key}[ \t]*:(.*)$", text, re.MULTILINE)
    return found.group(1).strip() if found else ""


def _read(path) -> str:
    """The text of a system file; empty where the system has no such file."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """Versions of those packages that are installed, by their metadata: none is imported."""
    found = {}
    for name in packages:
        with suppress(metadata.PackageNotFoundError):
            if version := metadata.version(name):  # None where an interrupted installation left a folder without any
                found[name] = version
    return found


def has_library(name: str) -> bool:
    """True if the loader finds the shared library `name`, such as libGL.so.1."""
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def read_java_version() -> str | None:
    """Version of the Java that Spark would start (JAVA_HOME's, else the one on PATH). None where there is none."""
    home = variables.read("JAVA_HOME")
    said = re.search(r'version "([^"]+)"', run_program(f"{home}/bin/java" if home else "java", "-version"))
    return said.group(1) if said else None


def parse_java_major(version: str) -> int:
    """The number by which releases of Java are known: 17 of "17.0.15", 1 of "1.8.0_292", 0 of no number."""
    match = re.match(r"\d+", version)
    return int(match.group()) if match else 0


def run_program(*command: str) -> str:
    """What a program prints, stderr included; empty where it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout + done.stderr

"""What this machine gives to this process: cores, memory, libraries. Read from the system; no package is imported.

A container or a batch job sees the whole machine in /proc, but may use only part of it; affinity and control groups
say how much. Functions named `parse_*` are pure and take the text of such files.
"""

import ctypes
import os
import re
import subprocess
from pathlib import Path

from .. import variables

_CGROUP = Path("/sys/fs/cgroup")


def count_usable_cores() -> int:
    """Cores that this process may use: its affinity mask, cut to the quota of its control group. At least 1."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = parse_cpu_quota(_read(_CGROUP / "cpu.max")) or parse_cpu_quota(
        f"{_read(_CGROUP / 'cpu/cpu.cfs_quota_us')} {_read(_CGROUP / 'cpu/cpu.cfs_period_us')}"
    )
    return min(affinity, max(1, int(quota))) if quota else affinity


def parse_cpu_quota(text: str) -> float | None:
    """Cores granted by "quota period", both in microseconds (cgroup v2's cpu.max, or v1's two files joined).

    None where there is no limit: `max`, a negative quota or an empty text.
    """
    words = text.split()
    if len(words) != 2 or not words[0].isdigit() or not words[1].isdigit():
        return None
    quota, period = int(words[0]), int(words[1])
    return quota / period if quota and period else None


def usable_memory_bytes() -> int | None:
    """Memory that this process may use: the machine's, or the limit of its control group. None where unknown."""
    total = parse_meminfo(_read("/proc/meminfo"))
    limits = [_read(_CGROUP / name).strip() for name in ("memory.max", "memory/memory.limit_in_bytes")]
    known = [int(limit) for limit in limits if limit.isdigit()] + ([total] if total else [])
    return min(known, default=None)


def available_memory_bytes() -> int | None:
    """Memory of the machine that a process could take now; None where unknown."""
    return parse_meminfo(_read("/proc/meminfo"), "MemAvailable")


def parse_meminfo(text: str, key: str = "MemTotal") -> int | None:
    """A value of /proc/meminfo in bytes, None where it is not there."""
    for line in text.splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return None


def peak_memory_bytes() -> int:
    """The most memory that this process has had resident (VmHWM); 0 where the system does not say."""
    return _own_memory("VmHWM")


def resident_memory_bytes() -> int:
    """What this process has resident now (VmRSS); 0 where the system does not say."""
    return _own_memory("VmRSS")


def anonymous_memory_bytes() -> int:
    """What of it this process has written, and no file holds (RssAnon); 0 where the system does not say."""
    return _own_memory("RssAnon")


def _own_memory(key: str) -> int:
    match = re.search(rf"{key}:\s+(\d+) kB", _read("/proc/self/status"))
    return int(match.group(1)) * 1024 if match else 0


def read_cpu_vendor() -> str:
    """`AuthenticAMD`, `GenuineIntel`, …; empty where unknown (not x86, not Linux)."""
    return parse_cpu(_read("/proc/cpuinfo"), "vendor_id")


def read_cpu_model() -> str:
    """The processor as its maker calls it, such as `AMD EPYC 7763 64-Core Processor`; empty where unknown."""
    return parse_cpu(_read("/proc/cpuinfo"), "model name")


def parse_cpu(text: str, key: str) -> str:
    """The value of a key of the first processor of /proc/cpuinfo, or an empty string."""
    for line in text.splitlines():
        if line.startswith(key):
            return line.partition(":")[2].strip()
    return ""


def _read(path) -> str:
    """The text of a system file; empty where the system has no such file."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def shared_memory_bytes() -> int | None:
    """Size of /dev/shm, through which the GPUs of one machine may talk (NCCL). None where there is none."""
    try:
        stat = os.statvfs("/dev/shm")
    except OSError:
        return None
    return stat.f_frsize * stat.f_blocks


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
    return parse_java_version(run_program(f"{home}/bin/java" if home else "java", "-version"))


def parse_java_version(text: str) -> str | None:
    """The version inside the quotes of `java -version`, None where it has none."""
    match = re.search(r'version "([^"]+)"', text)
    return match.group(1) if match else None


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

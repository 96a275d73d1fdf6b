"""Runs that are stopped and killed at any moment. `warm_start.forking` starts them."""

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path


def stop(pid: int) -> None:
    """SIGSTOP, and return when the process stands still or has ended."""
    with suppress(ProcessLookupError):  # it has just ended
        os.kill(pid, signal.SIGSTOP)
    while state_of(pid) not in "TZ":
        pass


def stop_when(pid: int, reached, steps=lambda: 0.001) -> None:
    """Stop the process when `reached()`, which is asked while it stands still, so that however fast it runs no more
    than `steps()` seconds of its work lie between two questions; or return when it has ended."""
    while state_of(pid) != "Z":
        stop(pid)
        if reached():
            return
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        time.sleep(steps())


def kill_group_when(process: subprocess.Popen, reached) -> bool:
    """Kill a process and its group, of which it is the first, as soon as `reached()`, which is asked while they stand
    still; False where it ended before."""
    while process.poll() is None:
        os.killpg(process.pid, signal.SIGSTOP)
        if reached():
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return True
        os.killpg(process.pid, signal.SIGCONT)
        time.sleep(0.003)
    return False


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def state_of(pid: int) -> str:
    """One letter, as in proc(5): T for stopped, Z for ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"

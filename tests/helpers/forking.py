"""Runs that can be killed at any moment, without the seconds of a start: a process imports once and forks each."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

_FORK = """
import os, sys
{imports}
for line in sys.stdin:
    pid = os.fork()
    if not pid:
        try:
            go(line.rstrip("\\n"))
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    print(pid, flush=True)
    print(os.waitpid(pid, 0)[1], flush=True)
"""


@contextmanager
def forking(imports: str, log: Path, *arguments):
    """start(line) -> (pid, a function that waits for the end and returns the status of waitpid).

    imports: code that defines `go(line)`; it runs with `arguments` in sys.argv. No run may print a traceback.
    """
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", _FORK.format(imports=imports), *map(str, arguments)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with open(log, "w") as stderr, subprocess.Popen(command, env=environ, stderr=stderr, **pipes) as process:

        def start(line):
            process.stdin.write(f"{line}\n")
            process.stdin.flush()
            return int(process.stdout.readline()), lambda: int(process.stdout.readline())

        yield start
        process.stdin.close()
    assert "Traceback" not in log.read_text(), log.read_text()


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

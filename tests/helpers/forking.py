"""Runs that can be killed at any moment, without the seconds of a start: a process imports once and forks each."""

import os
import subprocess
import sys
from contextlib import contextmanager
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

"""Programs for shells: what a script starts by `python` or `ppldm` is there without the seconds of its imports.

    with serving(folder):             # folder/python and folder/ppldm, to be put on PATH, or in PYTHON
        subprocess.run(["bash", "run_scripts/quickstart.sh"], …)

Such a program asks the process of the tests for a warm child (warm_start), whose children are warm, too. It hands its
streams, folder and environment on, passes each signal on, and ends as the child does; where it is killed, so is the
child. What cannot be imitated it becomes itself: a cold Python.
"""

import os
import select
import signal
import socket
import sys
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

import warm_start

CLIENT = """#!{python} -IS
import json, os, signal, socket, sys
words, pid, early = [*{words!r}, *sys.argv[1:]], 0, []

def pass_on(number, _frame):
    if not pid:
        early.append(number)
        return
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass

for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    if signal.getsignal(number) != signal.SIG_IGN:
        signal.signal(number, pass_on)
with socket.socket(socket.AF_UNIX) as line:
    line.connect({address!r})
    text = json.dumps([words, os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(line, [len(text).to_bytes(8, "big")], [0, 1, 2])
    line.sendall(text)
    answers = line.makefile("r")
    pid = int(answers.readline() or 0)
    if not pid:
        os.execv({python!r}, [{python!r}, *words])
    for number in early:
        pass_on(number, None)
    status = int(answers.readline() or 1)
if status < 0:
    if status != -signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
sys.exit(status)
"""


_OF_READLINE = {"COLUMNS", "LINES"}  # the library tells the system of them, of which Python's os.environ knows nothing


@contextmanager
def serving(folder: Path, **programs: tuple[str, ...]):
    """Write `python` and `ppldm` into a folder, and further programs by their names: the words behind `python`."""
    address = str(folder / "python.socket")
    for name, words in {"python": (), "ppldm": ("-m", "ppldm"), **programs}.items():
        (folder / name).write_text(CLIENT.format(python=sys.executable, address=address, words=words))
        (folder / name).chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        threading.Thread(target=_accept, args=(listener,), daemon=True).start()
        try:
            yield folder
        finally:
            listener.shutdown(socket.SHUT_RDWR)


def _accept(listener: socket.socket) -> None:
    with suppress(OSError):  # closed
        while True:
            line, _ = listener.accept()
            threading.Thread(target=_answer, args=(line,), daemon=True).start()


def _answer(line: socket.socket) -> None:
    with line, suppress(EOFError, BrokenPipeError, ConnectionResetError):
        (words, folder, environ), files = warm_start.receive(line)
        for name in _OF_READLINE - os.environ.keys():
            environ.pop(name, None)
        pid = _start(words, folder, environ, files)
        for number in files:
            os.close(number)
        with suppress(BrokenPipeError, ConnectionResetError):  # who asked has been killed, and the child is not yet
            line.sendall(f"{pid}\n".encode())
        if pid:
            line.sendall(f"{_wait(pid, line)}\n".encode())


def _start(words: list[str], folder: str, environ: dict, files: list[int]) -> int:
    """The pid of a warm child, in a session of its own; 0 where it must start cold."""
    if warm_start.parse(words) is None:
        return 0
    own = {"umask": -1, "first": None, "session": True, "group": -1, "targets": [0, 1, 2], "nested": True}
    return warm_start.server().start({"words": words, "cwd": folder, "environ": environ, **own}, files)


def _wait(pid: int, line: socket.socket) -> int:
    """The child's exit status; the child is killed where nobody waits for it any more."""
    ended = os.pidfd_open(pid)
    try:
        ready, _, _ = select.select([ended, line], [], [])
    finally:
        os.close(ended)
    if line in ready:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

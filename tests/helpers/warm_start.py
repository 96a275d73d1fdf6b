"""Children of tests without the seconds of their imports: a server imports once, and forks for each command.

    with warm_children():             # as tests/conftest.py does it for every test that is not marked `cold`
        subprocess.run([sys.executable, "-m", "ppldm", "train", ...])

Inside the block, `subprocess.Popen` starts `python -m MODULE`, `python -c CODE` and `python SCRIPT` by a fork of the
server. The child is this process' own, as any other: its pid, signals, exit status, process group and standard streams
are real. It begins as a new interpreter does, and `import paddle` still prepares the CPU first. What the server cannot
imitate starts as ever: another program, options of Python, a variable that its imports read and that is different now.

What must start cold to show anything: laws about imports, about a process' first moments, and about packaging.
`nested`: children of such a child are warm, too; it keeps a pristine copy of itself for them.
"""

import atexit
import ctypes
import importlib
import inspect
import json
import marshal
import multiprocessing.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from contextlib import contextmanager
from functools import partial
from pathlib import Path

# Their children are warm, too: ranks, stages of a pipeline, workers of a download.
PARENTS = ("paddle.distributed.launch", "ppldm.training.distributed.launch", "ppldm")
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)  # by the server
MOST_FILES = 400  # a child may get those of lower numbers: the lines to the server lie above them
_PATIENCE = 300  # seconds for an answer: the server has crashed, or its child has before it was one
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of <linux/prctl.h>
_ENVIRON = {**os.environ, "USE_TORCH": "0"}  # of the session, not of the test that happens to be the first

_USUAL = {"executable": None, "shell": False, "gid": None, "gids": None, "uid": None, "restore_signals": True}

_FLAGS = subprocess._args_from_interpreter_flags()  # with which workers start, as the server does

Cold, _spawn_cold = subprocess.Popen, multiprocessing.util.spawnv_passfds


class Popen(Cold):
    """`subprocess.Popen`; only the start differs."""

    def _execute_child(self, *arguments):
        given = inspect.signature(Cold._execute_child).bind(self, *arguments).arguments
        if (request := _request(given)) is None or not (pid := server().start(*request)):
            super()._execute_child(*arguments)
            return
        self.pid, self._child_created = pid, True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in pipes))


@contextmanager
def warm_children(nested: bool = False):
    """Inside the block, commands of Python are started warm, and worker processes that are spawned."""
    before = subprocess.Popen, multiprocessing.util.spawnv_passfds
    _warm(nested)
    try:
        yield
    finally:
        subprocess.Popen, multiprocessing.util.spawnv_passfds = before


def _warm(nested: bool) -> None:
    subprocess.Popen = type("Popen", (Popen,), {"nested": nested})
    multiprocessing.util.spawnv_passfds = spawn


def spawn(path, words, files) -> int:
    """The pid of a new worker process of `multiprocessing`."""
    streams = {name: -1 for name in ("p2cread", "c2pwrite", "errwrite")}
    given = {
        **_USUAL,
        **streams,
        "args": [path, *words[1 + len(_FLAGS) :]],
        "cwd": None,
        "env": None,
        "preexec_fn": None,
        "umask": -1,
    }
    request = _request({**given, "pass_fds": files, "start_new_session": False})
    return (request and server().start(*request)) or _spawn_cold(path, words, files)


def _request(given: dict) -> tuple[dict, list[int]] | None:
    """What the server is told, with the open files that the child gets; None for what only a cold start can do."""
    words, cwd, dies = given["args"], given["cwd"] or ".", given["preexec_fn"]
    if isinstance(words, (str, bytes, os.PathLike)) or any(given[name] != value for name, value in _USUAL.items()):
        return None
    words = [os.fsdecode(word) for word in words]
    is_new_session = given["start_new_session"] or dies is os.setsid
    first = None if dies in (None, os.setsid) else _packed(dies)
    if words[0] != sys.executable or parse(words[1:]) is None or first == "" or not os.path.isdir(cwd):
        return None
    environ = os.environ if given["env"] is None else given["env"]
    kept = sorted({*given["pass_fds"]} - {0, 1, 2})
    if kept and kept[-1] >= MOST_FILES:
        return None
    streams = [given[name] if given[name] != -1 else number
               for number, name in enumerate(("p2cread", "c2pwrite", "errwrite"))]  # fmt: skip
    return {
        "words": words[1:], "cwd": os.path.abspath(os.fsdecode(cwd)), "umask": given["umask"], "first": first,
        "environ": {os.fsdecode(name): os.fsdecode(value) for name, value in environ.items()},
        "session": is_new_session, "group": given.get("process_group", -1), "targets": [0, 1, 2, *kept],
        "nested": getattr(given.get("self"), "nested", False) or any(word in PARENTS for word in words),
    }, [*streams, *kept]  # fmt: skip


def _packed(function) -> str:
    """A function of the package, to be called in another process, as text; empty if it is none."""
    arguments = []
    if isinstance(function, partial):
        function, arguments = function.func, list(function.args)
    try:
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        if not function.__module__.startswith("ppldm."):
            return ""
        return marshal.dumps((function.__module__, function.__code__, cells, arguments)).hex()
    except (AttributeError, ValueError):
        return ""


def unpacked(text: str):
    module, code, cells, arguments = marshal.loads(bytes.fromhex(text))
    names = vars(importlib.import_module(module))
    return partial(types.FunctionType(code, names, closure=tuple(map(types.CellType, cells))), *arguments)


def parse(words: list[str]) -> tuple[bool, str, str, list[str]] | None:
    """(is it unbuffered, "-m" or "-c" or "", what to run, its arguments); None for what is not understood."""
    unbuffered = words[:1] == ["-u"]
    words = words[unbuffered:]
    if words[:1] in (["-m"], ["-c"]):
        return (unbuffered, words[0], words[1], words[2:]) if len(words) > 1 else None
    if words and not words[0].startswith("-") and words[0].endswith(".py"):
        return unbuffered, "", words[0], words[1:]
    return None


class Server:
    """The end of the line to a process that forks on request. One process may ask, from any of its threads."""

    def __init__(self, line: socket.socket, process: subprocess.Popen | None = None):
        self.line, self.process, self.owner, self.lock = line, process, os.getpid(), threading.Lock()

    def start(self, request: dict, files: list[int]) -> int:
        """The pid of a new child of this process; 0 if it must start cold."""
        if os.getpid() != self.owner:  # a fork of the one that asks
            return 0
        with self.lock:
            prctl = ctypes.CDLL(None).prctl
            prctl(_SUBREAPER, 1)  # the child of a child that has ended becomes this process' own
            try:
                send(self.line, request, files)
                return receive(self.line)[0]["pid"]
            except (EOFError, OSError) as error:
                if self.line.fileno() >= 0:
                    text = f"the server of warm children is gone, and children start cold: {error!r}"
                    warnings.warn(text, stacklevel=2)
                self.line.close()
                return 0
            finally:
                prctl(_SUBREAPER, 0)

    def close(self) -> None:
        self.line.close()
        if self.process:
            self.process.kill()
            self.process.wait()


_server: Server | None = None


def server() -> Server:
    """This process' own, started when it is first asked for."""
    global _server
    if _server is None:
        _server = _new_server()
        atexit.register(_server.close)
    return _server


def use(nested: Server) -> None:
    """From here on, this process starts its children warm."""
    global _server
    _server = nested
    _warm(nested=True)


def _new_server() -> Server:
    ours, theirs = socket.socketpair()
    ours.settimeout(_PATIENCE)
    environ = _ENVIRON | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    with theirs, tempfile.TemporaryFile("w+") as said:
        process = Cold(
            [sys.executable, *_FLAGS, Path(__file__).with_name("warm_server.py"), str(theirs.fileno())], env=environ,
            pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=said, stderr=said,
        )  # fmt: skip
        theirs.close()
        try:
            receive(ours)
        except (EOFError, OSError) as error:
            process.kill()
            process.wait()
            ours.close()
            said.seek(0)
            text = f"the server of warm children did not start, and children start cold: {error!r}\n{said.read()}"
            warnings.warn(text, stacklevel=2)
    return Server(ours, process)


def send(line: socket.socket, message: dict, files=()) -> None:
    text = json.dumps(message).encode()
    socket.send_fds(line, [len(text).to_bytes(8, "big")], files)
    line.sendall(text)


def receive(line: socket.socket) -> tuple[dict, list[int]]:
    """A message, and the open files that came with it. Raises EOFError where the other side has ended."""
    head, files, _, _ = socket.recv_fds(line, 8, 64)
    if len(head) < 8:
        raise EOFError
    left, text = int.from_bytes(head, "big"), b""
    while len(text) < left:
        if not (more := line.recv(left - len(text))):
            raise EOFError
        text += more
    return json.loads(text), files

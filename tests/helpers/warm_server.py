"""The process that `warm_start` asks for children: it imports what most of them need, and forks for each one."""

import atexit
import builtins
import ctypes
import fcntl
import gc
import importlib
import importlib.machinery
import io
import json
import multiprocessing.process
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import types
from contextlib import suppress
from functools import partial
from pathlib import Path

import warm_start
from warm_start import IGNORED, Server, parse, receive, send, unpacked

IMPORTED = (
    *("ppldm.training.prepare", "ppldm.training.train", "ppldm.inference.pipeline", "ppldm.evaluation.job"),
    "ppldm.data.kernels",  # and with them numba's compiler
)
# What native libraries and Python itself read, beside the names that are seen to be read by the imports.
READ_AT_START = (
    *("FLAGS_", "GLOG_", "OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "CUDA_", "PYTHON", "LD_", "LC_", "LANG", "TZ"),
    "PPLDM_DEBUG",
)
OF_RANKS = ("PADDLE_", "FLAGS_selected_")  # the launcher's: what imports keep of them is asked anew, see _Waiting
OF_OTHERS = ("KMP_INIT_AT_FORK", "KMP_DUPLICATE_LIB_OK")  # scikit-learn sets them where it is imported: in the asker
SITE = {"sitecustomize.py", "__pycache__"}  # in a folder of PYTHONPATH: Python runs it, and so does a warm child
_exec_cold = os.execv
_SET_MM, _SET_MM_MAP = 35, 14  # PR_SET_MM and PR_SET_MM_MAP of <linux/prctl.h>


class _Waiting(importlib.machinery.ModuleSpec):
    """Gives `paddle`, which is there, at the moment somebody imports it: until then a command believes it is not."""

    def __init__(self, module, environ: dict):
        super().__init__(module.__name__, self)
        self.module, self.own, self.environ = module, module.__spec__, environ
        del sys.modules[module.__name__]
        sys.meta_path.insert(0, self)

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        return self

    def create_module(self, spec):
        return self.module

    def exec_module(self, module):
        module.__spec__ = self.own
        for name, value in self.environ.items():
            os.environ.setdefault(name, value)
        module.distributed.parallel._global_parallel_env = None


class Base:
    """What the server has imported, and the environment in which it did."""

    def __init__(self):
        self.environ, self.read = dict(os.environ), set()
        given = self.environ["PYTHONPATH"].split(os.pathsep)
        self.given, self.path = {*given, ""}, _own_path()
        self._load()
        self.is_shown = show([sys.executable, *sys.argv], self.environ)
        self.set = {name: value for name, value in os.environ.items() if self.environ.get(name) != value}

    def _load(self) -> None:
        from ppldm.utils.machine.cpu import load_paddle, prepare_cpu

        prepare_cpu()
        own, names = os._Environ.__getitem__, os._Environ.__iter__
        copied = set()

        def iterate(environ):  # a copy of all is no question
            for name in names(environ):
                copied.add(name)
                yield name

        def note(environ, name):
            copied.discard(name) if name in copied else self.read.add(os.fsdecode(name))
            return own(environ, name)

        os._Environ.__getitem__, os._Environ.__iter__ = note, iterate
        load_paddle()
        for module in IMPORTED:
            importlib.import_module(module)
        os._Environ.__getitem__, os._Environ.__iter__ = own, names

    def fits(self, request: dict) -> bool:
        """Whether a new process with these variables would have come to the same."""
        environ = request["environ"]
        if not self.is_shown:
            return False
        for name in environ.keys() | self.environ.keys():
            matters = (name in self.read or name.startswith(READ_AT_START)) and not name.startswith(
                OF_RANKS + OF_OTHERS
            )
            same = (self.environ.get(name), self.set.get(name))  # where the asker has imported the same
            # Folders before the others of PATH hold programs that a test put there, not for the imports.
            fits = environ.get(name) in same or (
                name == "PATH" and environ.get(name, "").endswith(f":{self.environ[name]}")
            )
            if matters and name not in ("PYTHON", "PYTHONPATH") and not fits:  # PYTHON is for ppldm's scripts alone
                return False
        return all(
            entry in self.given or SITE.issuperset(_names(entry))
            for entry in environ.get("PYTHONPATH", "").split(os.pathsep)
        )


def _own_path() -> list[str]:
    """Where the interpreter itself finds modules, without PYTHONPATH: the session's names site-packages, too."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [sys.executable, "-c", "import json, sys; print(json.dumps(sys.path[1:]))"]
    return json.loads(subprocess.check_output(words, env=environ))


def _names(folder: str) -> list[str]:
    return os.listdir(folder) if os.path.isdir(folder) else []


def serve(line: socket.socket, fits) -> tuple[dict, list[int]]:
    """A request and its open files, in each child; the server itself never returns."""
    while True:
        try:
            request, files = receive(line)
        except (EOFError, OSError):  # nobody is left to ask
            os._exit(0)
        if not fits(request):
            send(line, {"pid": 0})
        elif _fork():
            return request, files
        for number in files:
            os.close(number)


def _fork() -> bool:
    """Fork twice, and let the middle process end, so that the child becomes the asker's own. True in the child."""
    gate, key = os.pipe()
    if middle := os.fork():
        os.waitpid(middle, 0)
        os.close(gate)
        os.close(key)
        return False
    if os.fork():
        os._exit(0)
    os.close(key)
    os.read(gate, 1)  # until the middle process has ended, and the server knows
    os.close(gate)
    return True


def _become(request: dict, files: list[int], base: Base) -> None:
    """What a new process of the system has of its own."""
    beyond = max(request["targets"]) + 1  # no copy lies where another file is to be
    copies = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, beyond) for number in files]
    for number in files:
        os.close(number)
    for copy, target in zip(copies, request["targets"], strict=True):
        os.dup2(copy, target)
        os.close(copy)
    show([sys.executable, *request["words"]], request["environ"])
    os.chdir(request["cwd"])
    multiprocessing.process.ORIGINAL_DIR = request["cwd"]
    if request["umask"] >= 0:
        os.umask(request["umask"])
    os.environ.clear()
    os.environ.update(request["environ"])
    for number in IGNORED:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    _Waiting(sys.modules["paddle"], base.set)
    if request["first"]:
        unpacked(request["first"])()


class _Map(ctypes.Structure):
    """prctl_mm_map of <linux/prctl.h>."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in (
            "start_code", "end_code", "start_data", "end_data", "start_brk", "brk", "start_stack",
            "arg_start", "arg_end", "env_start", "env_end", "auxv",
        )),
        *((name, ctypes.c_uint32) for name in ("auxv_size", "exe_fd")),
    ]  # fmt: skip


_shown = []  # what /proc reads, as long as the process lives


def show(words: list[str], environ: dict) -> bool:
    """Have /proc and ps say that this is the process' command line and environment. Whether they do."""
    for texts in (words, [f"{name}={value}" for name, value in environ.items()]):
        _shown.append(ctypes.create_string_buffer(b"".join(os.fsencode(text) + b"\0" for text in texts)))
    # Without the pid, the name and the state: proc(5) counts from 1.
    field = [0, 0, 0, *Path("/proc/self/stat").read_text().rpartition(")")[2].split()]
    libc = ctypes.CDLL(None)
    libc.sbrk.restype = ctypes.c_void_p
    ends = [edge for text in _shown[-2:] for edge in (ctypes.addressof(text), ctypes.addressof(text) + len(text) - 1)]
    code, data = (int(field[26]), int(field[27])), (int(field[45]), int(field[46]))
    layout = _Map(*code, *data, int(field[47]), libc.sbrk(0), int(field[28]), *ends, 0, 0, 0xFFFFFFFF)
    return not libc.prctl(_SET_MM, _SET_MM_MAP, ctypes.byref(layout), ctypes.sizeof(layout), 0)


def _run(words: list[str], base: Base) -> None:
    """What a new interpreter has of its own, and then the program."""
    unbuffered, kind, what, arguments = parse(words)
    first = {"-m": os.getcwd(), "-c": ""}.get(kind, os.path.dirname(os.path.realpath(what)))
    own = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = dict.fromkeys([first, *own, *base.path])  # each once, as site does it
    sys.argv = [kind or what, *arguments]
    out, read = sys.stdout, sys.stdin
    if unbuffered:
        raw = io.FileIO(1, "w", closefd=False)
        sys.stdout = sys.__stdout__ = io.TextIOWrapper(raw, out.encoding, out.errors, write_through=True)
    else:
        out.reconfigure(line_buffering=os.isatty(1))
    raw = io.BufferedReader(io.FileIO(0, closefd=False))
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(raw, read.encoding, read.errors)
    sys.modules["numpy"].random.seed()  # not as its brothers; `random` has done so itself
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if any("sitecustomize.py" in _names(entry) for entry in given if entry not in base.given):
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__builtins__ = builtins
    if kind == "-m":
        for name in (what, f"{what}.__main__"):
            if not hasattr(sys.modules.get(name), "__path__"):
                sys.modules.pop(name, None)
        runpy._run_module_as_main(what)
    elif kind == "-c":
        exec(compile(what, "<string>", "exec", dont_inherit=True), vars(main))
    else:
        main.__file__, main.__loader__ = what, importlib.machinery.SourceFileLoader("__main__", what)
        exec(compile(Path(what).read_bytes(), what, "exec", dont_inherit=True), vars(main))


def _aside(number: int) -> socket.socket:
    """The socket of a number, under one that no child is given a file under."""
    aside = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 500)
    os.close(number)
    return socket.socket(fileno=aside)


def _main(number: str) -> None:
    sys.modules["warm_server"] = sys.modules["__main__"]
    line = _aside(int(number))
    os.fsync = lambda handle: None  # as in the process of the tests
    base = Base()
    if len(os.listdir("/proc/self/task")) > 1:
        sys.exit("an import started threads, which a fork would lose")
    gc.freeze()  # so that no child copies what it never uses
    for ignored in IGNORED:
        signal.signal(ignored, signal.SIG_IGN)  # it ends when nobody is left to ask
    # multiprocessing holds signals back while it starts its tracker, which may be the first child of all.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    send(line, {})
    while True:
        request, files = serve(line, base.fits)
        if request["session"]:
            os.setsid()
        elif request["group"] >= 0:
            os.setpgid(0, request["group"])
        if not request["nested"]:
            break
        ours, theirs = (_aside(end.detach()) for end in socket.socketpair())
        if os.fork():
            theirs.close()
            warm_start.use(Server(ours))
            os.execv = partial(_exec, base)
            break
        for number in files:
            os.close(number)
        ours.close()
        line.close()
        line = theirs
    try:
        _become(request, files, base)
    except BaseException:  # a cold start shows what is wrong
        send(line, {"pid": 0})
        os._exit(1)
    send(line, {"pid": os.getpid()})
    line.close()
    _end(partial(_run, request["words"], base))


def _exec(base: Base, path: str, words: list[str]) -> None:
    """`os.execv` of a command that may go on in this process as a warm one."""
    words = [os.fsdecode(word) for word in words]
    is_python = path == sys.executable and parse(words[1:]) is not None
    if not is_python or threading.active_count() > 1 or not base.fits({"environ": dict(os.environ)}):
        _exec_cold(path, words)
    for number in {int(name) for name in os.listdir("/proc/self/fd")} - {warm_start.server().line.fileno()}:
        with suppress(OSError):  # the one that listed them
            if fcntl.fcntl(number, fcntl.F_GETFD) & fcntl.FD_CLOEXEC:
                os.close(number)
    for number in IGNORED:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    show(words, os.environ)
    atexit._clear()
    sys.excepthook = sys.__excepthook__
    if "paddle" in sys.modules:
        _Waiting(sys.modules["paddle"], base.set)
    _end(partial(_run, words[1:], base))


def _end(program) -> None:
    """Run a program, and end as an interpreter does, but for the memory that it tidies up: that takes 0.15 s."""
    status = 0
    try:
        program()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if not isinstance(error.code, int | None):
            sys.stderr.write(f"{error.code}\n")
    except BaseException as error:
        trace = error.__traceback__
        while trace and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream and not stream.closed:
                stream.flush()
        except (OSError, ValueError) as error:
            sys.stderr.write(f"Exception ignored in: {stream}\n{type(error).__name__}: {error}\n")
            status = 120
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status & 0xFF)


if __name__ == "__main__":
    _main(sys.argv[1])

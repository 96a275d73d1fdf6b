"""What must be set before paddle is imported: threads (it takes one where OMP_NUM_THREADS is unset), the fast path of
its MKL on AMD processors, how memory is kept, and silence where nothing is wrong. Whatever the user has set stays.
`PPLDM_NO_CPU_TUNING=1` turns the tuning off. And where kernels that are compiled are kept."""

import contextlib
import ctypes
import gc
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import io
import platform
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Mapping

from .. import variables
from ..errors import debugging
from ..log import get_logger
from .devices import installed_kind
from .resources import count_usable_cores, read_cpu, usable_memory_bytes

# What every user of paddle sees and none can act on: warnings, and lines that `import paddle` prints on stderr.
_HARMLESS_WARNINGS = ("No ccache found", "Setuptools is replacing distutils")
_HARMLESS_LINES = (
    *("WARNING: OMP_NUM_THREADS set to", "PLEASE USE OMP_NUM_THREADS WISELY"),
    *("======================= Modified FLAGS", "FLAGS(name=", "=" * 71),
)

LEAST_MEMORY_BYTES = 8 * 10**9  # with less, freed memory goes back to the system
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of glibc's malloc.h


def prepare_cpu(threads: int | None = None) -> None:
    """Set this process's thread variables and filters, before paddle is imported. `threads`: whatever the user set."""
    if "paddlenlp" not in sys.modules and not any(isinstance(one, _LightPaddleNLP) for one in sys.meta_path):
        sys.meta_path.insert(0, _LightPaddleNLP())
    if not debugging():
        _ignore_harmless_warnings()
        # Without the INFO and WARNING lines of paddle's C++ side, which are about its own code.
        variables.set_for_libraries({"GLOG_minloglevel": "2"})
    variables.set_for_libraries(installed_kind().settings)
    if threads:
        variables.set_for_libraries({"OMP_NUM_THREADS": str(threads)}, replace=True)
    if variables.is_on("PPLDM_NO_CPU_TUNING"):
        return
    num_cores = count_usable_cores()
    num_local_ranks = int(variables.read("PADDLE_LOCAL_SIZE", "1"))
    keeps = installed_kind().is_cpu and keep_freed_memory()
    chosen = choose_variables(variables.all_variables(), num_cores, num_local_ranks, read_cpu("vendor_id"))
    variables.set_for_libraries(chosen)
    if int(variables.read("PADDLE_TRAINER_ID", "0")) == 0:
        settings = " ".join(f"{name}={value}" for name, value in chosen.items()) or "nothing to set"
        settings += ", freed memory is kept" if keeps else ""
        get_logger().info("on the CPU: cores %d, processes %d (%s)", num_cores, num_local_ranks, settings)


def keep_freed_memory() -> bool:
    """Let this process keep freed memory for the next tensors, where glibc manages it: a training step on a CPU takes a
    fifth less time, the process some 20 % more memory. False where it cannot, or has under LEAST_MEMORY_BYTES."""
    if (usable_memory_bytes() or 0) < LEAST_MEMORY_BYTES or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, -1))


def load_paddle(threads: int | None = None) -> None:
    """`prepare_cpu`, then `import paddle` without its complaint that OMP_NUM_THREADS is set. Nothing where it is there
    already, since preparing would come too late; but `threads` are set for all that still asks."""
    if "paddle" in sys.modules and threads is None:
        return
    prepare_cpu(threads)
    with importing_paddle():
        import paddle  # noqa: F401


@contextlib.contextmanager
def importing_paddle():
    """Around the first import of paddle: as `quiet_paddle`, and SIGTERM waits for its end, when Paddle's own handler,
    which prints a trace of native code, has gone."""
    before, is_first = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}), "paddle" not in sys.modules
    try:
        with quiet_paddle():
            yield
        if is_first:
            gc.freeze()  # looking for garbage in what imports have made took a seventh of the CPU time of a start
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def quiet_paddle():
    """Around what imports paddle or starts its communication: without the lines and warnings that nobody can act on.
    All else that is printed on stderr is passed on when the block ends, however it ends."""
    if debugging():
        yield
        return
    _ignore_harmless_warnings()
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            yield
    finally:
        sys.stderr.writelines(line for line in said.getvalue().splitlines(True) if not line.startswith(_HARMLESS_LINES))


def _ignore_harmless_warnings() -> None:
    for message in _HARMLESS_WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=UserWarning)


def choose_variables(environ: Mapping[str, str], num_cores: int, num_local_ranks: int, vendor: str) -> dict[str, str]:
    """The variables to add to `environ`, never one that is there: each of `num_local_ranks` processes gets an equal
    share of `num_cores` as OMP_NUM_THREADS, at least 1; `vendor` AuthenticAMD the AVX2 path of old MKL."""
    wanted = {"OMP_NUM_THREADS": str(max(1, num_cores // max(1, num_local_ranks)))}
    if vendor == "AuthenticAMD":
        wanted["MKL_DEBUG_CPU_TYPE"] = "5"
    return {name: value for name, value in wanted.items() if name not in environ}


def keep_compiled(compiler: Callable, function):
    """`function` by a compiler of numba, or loaded from where numba keeps it: __pycache__, NUMBA_CACHE_DIR."""
    try:
        return compiler(cache=True)(function)
    except (RuntimeError, OSError):  # nothing may be written, neither there nor in the user's cache; a disk is full
        return compiler()(function)


VERSION = "3.0.0b4"  # whose folders these are; another version is imported as it is
# Versions that have all that paddlenlp and ppdiffusers import of them.
_HUBS, _COMPLETE = ("huggingface_hub", "aistudio-sdk"), ("0.25.2", "0.2.6")
_LIGHT = {"data", "generation", "layers", "ops", "quantization", "transformers", "utils", "version"}


class _LightPaddleNLP(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """`import paddlenlp` of 3.0.0b4 imports all of its folders, and with them FastAPI, scikit-learn and `datasets`: 1.4
    s of CPU time in every process. Here its models and tokenizers come first, by themselves (0.5 s). Whoever asks for
    anything else, such as its Trainer, runs the package's `__init__`, once: the rest imports only in its order."""

    def find_spec(self, name, path, target=None):
        package, _, rest = name.partition(".")
        if name in ("paddlenlp", "ppdiffusers") and tuple(map(importlib.metadata.version, _HUBS)) != _COMPLETE:
            from . import hub_names

            hub_names.provide()
        if name == "ppdiffusers.utils.load_utils":
            spec = importlib.machinery.PathFinder.find_spec(name, path)
            spec.loader.exec_module = _keeping_numpys_bool()(spec.loader.exec_module)
            return spec
        if name == "paddlenlp":
            spec = importlib.machinery.PathFinder.find_spec(name, path)
            if spec and importlib.metadata.version(name) == VERSION:
                self.own, spec.loader = spec.loader, self
            return spec
        is_light = package != "paddlenlp" or rest.partition(".")[0] in _LIGHT
        if is_light or sys.modules[package].__spec__.loader is not self or not self.run() or name not in sys.modules:
            return None
        module = sys.modules[name]
        spec = importlib.machinery.ModuleSpec(name, self, origin=module.__spec__.origin)
        spec.submodule_search_locations = module.__spec__.submodule_search_locations
        module.__spec__ = spec  # which is what Python takes of a module that came while it was looked for
        return spec

    def create_module(self, spec):
        return sys.modules.get(spec.name)  # what `run` has imported

    def exec_module(self, module) -> None:
        if module.__name__ != "paddlenlp":
            return
        import paddle

        self.module, module.__version__, module.__getattr__ = module, VERSION, self.find
        importlib.import_module("paddlenlp.data")  # and with it transformers: they import one another
        gc.freeze()
        paddle.disable_signal_handler()  # as the package's own __init__ ends

    def find(self, name: str):
        """An attribute that the package has not got yet."""
        if name.startswith("__") or not self.run():
            raise AttributeError(f"module 'paddlenlp' has no attribute {name!r}")
        return getattr(self.module, name)

    def run(self) -> bool:
        """Whether it was this call that ran the package's own `__init__`."""
        if "__getattr__" not in vars(self.module):
            return False
        del self.module.__getattr__
        self.own.exec_module(self.module)
        return True


@contextlib.contextmanager
def _keeping_numpys_bool():
    """Inside, `numpy.bool`, which numpy 1.26 lacks, may become Python's type; numpy 2 needs the one that it has."""
    import numpy

    kept = vars(numpy).get("bool")
    yield
    if kept:
        numpy.bool = kept

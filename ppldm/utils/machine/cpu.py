"""What must be set before paddle is imported: threads, the fast path of its MKL, and silence where nothing is wrong.

Paddle takes one thread where OMP_NUM_THREADS is unset, and its MKL takes a slow path on AMD processors. Whatever the
user has set stays. `PPLDM_NO_CPU_TUNING=1` turns the tuning off.
"""

import contextlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import io
import sys
import warnings
from collections.abc import Mapping

from .. import variables
from ..errors import debugging
from ..log import get_logger
from ..processes.world import World
from .devices import installed_kind
from .resources import count_usable_cores, read_cpu_vendor

# What every user of paddle sees and none can act on: warnings, and lines that `import paddle` prints on stderr.
_HARMLESS_WARNINGS = ("No ccache found", "Setuptools is replacing distutils")
_HARMLESS_LINES = (
    *("WARNING: OMP_NUM_THREADS set to", "PLEASE USE OMP_NUM_THREADS WISELY"),
    *("======================= Modified FLAGS", "FLAGS(name=", "=" * 71),
)


def prepare_cpu(threads: int | None = None) -> None:
    """Set this process's thread variables and filters; call it before paddle is imported. Logs one line.

    `threads`: so many and no other number, whatever the user has set.
    """
    wait_with_paddlenlp()
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
    chosen = choose_variables(variables.all_variables(), num_cores, num_local_ranks, read_cpu_vendor())
    variables.set_for_libraries(chosen)
    if World.detect().is_main:
        settings = " ".join(f"{name}={value}" for name, value in chosen.items()) or "nothing to set"
        get_logger().info("%d cores, local processes: %d; %s", num_cores, num_local_ranks, settings)


def load_paddle(threads: int | None = None) -> None:
    """`prepare_cpu`, then `import paddle` without its complaint that OMP_NUM_THREADS is set; all else that it prints is
    passed on. Nothing where it is there already, since preparing would come too late; but `threads` are set for all
    that still asks."""
    if "paddle" in sys.modules and threads is None:
        return
    prepare_cpu(threads)
    with quiet_paddle():
        import paddle  # noqa: F401


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
    """The variables to add to `environ`: never one that is already there.

    Each of `num_local_ranks` processes gets an equal share of `num_cores` as OMP_NUM_THREADS, at least 1;
    `vendor` AuthenticAMD (/proc/cpuinfo) gets MKL_DEBUG_CPU_TYPE=5, the AVX2 path of old MKL.
    """
    wanted = {"OMP_NUM_THREADS": str(max(1, num_cores // max(1, num_local_ranks)))}
    if vendor == "AuthenticAMD":
        wanted["MKL_DEBUG_CPU_TYPE"] = "5"
    return {name: value for name, value in wanted.items() if name not in environ}


VERSION = "3.0.0b4"  # whose folders these are; another version is imported as it is
_LIGHT = {"data", "generation", "layers", "ops", "quantization", "transformers", "utils", "version"}


# `import paddlenlp` of 3.0.0b4 imports all of its folders, and with them FastAPI, scikit-learn and `datasets`: 1.4 s of
# CPU time in every process. Here its models and tokenizers are imported first and by themselves (0.5 s). Whoever asks
# for anything else, such as its Trainer, runs the `__init__` of the package: the rest imports only in the order of it.


class _Initializer(importlib.abc.Loader):
    """Makes the package, and runs its own `__init__` when `run` is called, once."""

    def __init__(self, own: importlib.abc.Loader) -> None:
        self.own, self.module = own, None

    def create_module(self, spec):
        return None

    def exec_module(self, module) -> None:
        import paddle

        self.module, module.__version__, module.__getattr__ = module, VERSION, self._find
        importlib.import_module(f"{module.__name__}.data")  # and with it transformers: they import one another
        paddle.disable_signal_handler()  # as the package's own __init__ ends

    def _find(self, name: str):
        """An attribute that the package has not got yet."""
        if name.startswith("__") or not self.run():
            raise AttributeError(f"module {self.module.__name__!r} has no attribute {name!r}")
        return getattr(self.module, name)

    def run(self) -> bool:
        """Whether it was this call that ran it."""
        if "__getattr__" not in vars(self.module):
            return False
        del self.module.__getattr__
        self.own.exec_module(self.module)
        return True


class _Imported(importlib.abc.Loader):
    """Gives the module that another import has made."""

    def __init__(self, module) -> None:
        self.module = module

    def create_module(self, spec):
        return self.module

    def exec_module(self, module) -> None:
        pass


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        package, _, rest = name.partition(".")
        if package != "paddlenlp":
            return None
        if not rest:
            spec = importlib.machinery.PathFinder.find_spec(name, path)
            if spec and importlib.metadata.version(name) == VERSION:
                spec.loader = _Initializer(spec.loader)
            return spec
        loader = sys.modules[package].__spec__.loader
        if rest.partition(".")[0] in _LIGHT or not isinstance(loader, _Initializer) or not loader.run():
            return None
        if (module := sys.modules.get(name)) is None:
            return None
        spec = importlib.machinery.ModuleSpec(name, _Imported(module), origin=module.__spec__.origin)
        spec.submodule_search_locations = module.__spec__.submodule_search_locations
        module.__spec__ = spec  # which is what Python takes of a module that came while it was looked for
        return spec


def wait_with_paddlenlp() -> None:
    """From now on in this process, unless PaddleNLP is there already."""
    if "paddlenlp" not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())

"""What must be set before paddle is imported: threads, the fast path of its MKL, and silence where nothing is wrong.

Paddle takes one thread where OMP_NUM_THREADS is unset, and its MKL takes a slow path on AMD processors. Whatever the
user has set stays. `PPLDM_NO_CPU_TUNING=1` turns the tuning off.
"""

import contextlib
import io
import sys
import warnings
from collections.abc import Mapping

from .. import variables
from ..errors import debugging
from ..log import get_logger
from ..processes.world import World
from .devices import installed_kind
from .light_paddlenlp import wait_with_paddlenlp
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

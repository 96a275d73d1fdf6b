"""Test runs that need not load the heavy packages each time: a process that has them forks one for every run.

    python warm.py        reads lines of JSON, {"tree": folder, "arguments": of pytest, "limit_s": seconds}, and writes
                          for each of them the exit status of pytest, or -1 where the limit passed, and the seconds
                          of CPU. With "watched", lines of files, and "target", a file, it notes there what each test
                          reaches (reach.py)

Nothing of ppldm is kept: a run imports all of it from its own tree. Packages are loaded as tests/conftest.py does it,
after the CPU is prepared, so that a run computes the bits of any other run.
"""

import gc
import importlib
import json
import logging
import os
import signal
import sys
from pathlib import Path

from reach import Reach

HEAVY = [
    *("paddle", "paddlenlp.trainer", "ppdiffusers", "scipy.stats", "pandas", "pyarrow.parquet", "duckdb"),
    *("matplotlib.pyplot", "numba", "hypothesis", "flask", "PIL.Image", "datasets", "tokenizers", "safetensors.numpy"),
    *("omegaconf", "pytest"),
]


def load_heavy() -> None:
    """Import what tests import, and forget what of ppldm was needed for that."""
    from ppldm.utils.machine.cpu import load_paddle

    load_paddle()
    for name in HEAVY:
        importlib.import_module(name)
    for name in [name for name in sys.modules if name.partition(".")[0] == "ppldm"]:
        del sys.modules[name]
    logging.getLogger("ppldm").handlers.clear()


def run(tree: str, arguments: list[str], limit_s: float, watched=None, target="") -> tuple[int, float]:
    """The exit status of pytest in a process group of its own; -1 where it was ended after `limit_s`."""
    child = os.fork()
    if not child:
        os.setpgid(0, 0)
        silence = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(silence, stream)
        os.chdir(tree)
        os.environ["PYTHONPATH"] = tree
        sys.path.insert(0, tree)
        status = 3
        try:
            import pytest

            plugins = []
            if watched is not None:
                plugins.append(Reach(watched, Path(target)))
                plugins[0].start()
            status = int(pytest.main(arguments, plugins))
        finally:
            os._exit(status)
    late = []

    def end(*_):
        late.append(True)
        os.killpg(child, signal.SIGKILL)

    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    _, status, used = os.wait4(child, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return -1 if late else os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what packages print while they load is no answer
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    load_heavy()
    gc.freeze()  # so that no child copies what it never uses
    for line in sys.stdin:
        answers.write("{} {:.2f}\n".format(*run(**json.loads(line))))
        answers.flush()


if __name__ == "__main__":
    main()

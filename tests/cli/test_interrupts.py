"""Ctrl-C while a command starts is one line and exit status 130, whatever is being imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cold

ROOT = Path(__file__).resolve().parents[2]
STOPPED = "stopped by Ctrl-C; the same command again goes on from what is finished"
# What Python imports before all else.
INTERRUPTING = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, *_):
        if name == os.environ["INTERRUPT_AT"]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be inherited as ignored
"""


def interrupt_at(module: str, folder: Path, words: list) -> subprocess.CompletedProcess:
    """A command's end that gets SIGINT when it imports a module."""
    (folder / "sitecustomize.py").write_text(INTERRUPTING)
    path = os.pathsep.join([str(folder), str(ROOT), *sys.path])
    environ = os.environ | {"PYTHONPATH": path, "INTERRUPT_AT": module, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, timeout=100, env=environ)


def check(done: subprocess.CompletedProcess) -> None:
    lines = done.stderr.splitlines()
    assert done.returncode == 130 and lines[-1:] == [STOPPED], done.stderr
    assert all(" INFO " in line for line in lines[:-1]), done.stderr


EARLY = ("ppldm.cli", "ppldm.cli.main", "argparse", "ppldm.utils.errors", "ppldm.config",
         "ppldm.training.commands.train", "ppldm.utils.entry", "dataclasses", "numpy")  # fmt: skip


@pytest.mark.parametrize("module", [*EARLY, "fastcore.script", "ppldm.prepare.convert.convert"])
def test_during_the_imports_of_a_command(tmp_path, module):
    command = ["train", "--no_such_flag"] if "train" in module or "entry" in module else ["convert", tmp_path]
    check(interrupt_at(module, tmp_path, ["-m", "ppldm", *command]))


@pytest.mark.parametrize("module", ["ppldm.families", "ppldm.utils.entry", "ppldm.config"])
@pytest.mark.parametrize("script", ["train_txt2img_laion400m_no_trainer", "train_txt2img_laion400m_trainer",
                                    "train_autoencoder"])  # fmt: skip
def test_during_the_imports_of_a_script(tmp_path, module, script):
    check(interrupt_at(module, tmp_path, [ROOT / f"examples/{script}.py"]))


@pytest.mark.parametrize("module", [
    "paddle", "paddle.base", "paddle.base.core", "ppldm.training.train",
    *(pytest.param(f"ppldm.training.{name}", marks=pytest.mark.slow) for name in ("prepare", "doctor.machine")),
])  # fmt: skip
def test_between_the_flags_and_the_first_update(tiny, tmp_path, module):
    check(interrupt_at(module, tmp_path, ["-m", "ppldm", "train", *tiny.flags(tmp_path / "out", max_steps=10**6)]))


def test_while_the_launcher_of_ranks_starts(tmp_path):
    check(interrupt_at("paddle.distributed.launch", tmp_path, ["-m", "ppldm.training.distributed.launch"]))


LOST = """
import os, signal, time, weakref
from ppldm.utils.errors import exit_on_error
from ppldm.utils.processes.signals import answer_interrupts

class Thing:
    def __del__(self):
        {deleted}

signal.signal(signal.SIGINT, signal.default_int_handler)
answer_interrupts()
with exit_on_error():
    thing = Thing()
    kept = weakref.ref(thing, lambda _: {called})
    del thing
    time.sleep(80)
"""


# The second comes while the first is sent again, as on a busy machine.
TWICE = """
import _thread
start, started = _thread.start_new_thread, []

def at_once(*words):
    started.append(words)
    return os.kill(os.getpid(), signal.SIGINT) if len(started) == 1 else start(*words)

_thread.start_new_thread = at_once
"""


@pytest.mark.parametrize("before", ["", TWICE], ids=["once", "twice"])
@pytest.mark.parametrize("place", ["called", "deleted"])
def test_where_python_drops_exceptions_it_comes_again(place, before):
    here = dict.fromkeys(["called", "deleted"], "None") | {place: "os.kill(os.getpid(), signal.SIGINT)"}
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    code = LOST.format(**here).replace("with exit_on_error", f"{before}\nwith exit_on_error")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environ)
    check(done)


NATIVE = """
import os, signal

try:  # as native libraries do it that import something
    os.kill(os.getpid(), signal.SIGINT)
    sum(range(10))
except BaseException as error:
    raise ImportError("it cannot be loaded") from error
"""


def test_a_library_makes_no_error_of_its_own_of_it(tmp_path):
    (tmp_path / "native.py").write_text(NATIVE)
    code = "from ppldm.utils.processes.signals import answer_interrupts\nanswer_interrupts()\nimport native"
    check(interrupt_at("no module", tmp_path, ["-c", code]))

"""A process ends with the status that it means and with all that it said, also where a thread of it still computes."""

import signal
import subprocess
import sys

import pytest

SCRIPT = """
import atexit, threading
from ppldm.utils.entry import entry
from ppldm.utils.errors import ConfigError

def compute(started):
    import paddle
    one = paddle.ones([64, 64])
    while True:
        one = paddle.tanh(one @ one)
        started.set()

atexit.register(print, "last rites")
with entry(is_computing=lambda: {computes}):
    if {computes}:
        started = threading.Event()
        threading.Thread(target=compute, args=[started], daemon=True).start()
        started.wait()
    print("said")
    {end}
"""


@pytest.mark.parametrize(
    "end, status, error",
    [
        ("pass", 0, ""),
        ("raise ConfigError('not this; that')", 2, "error: not this; that"),
        ("raise KeyboardInterrupt", 130, "stopped by Ctrl-C; the same command again goes on from what is finished"),
    ],
)
@pytest.mark.parametrize("computes", [True, False])
def test_last_rites_are_for_those_whose_threads_have_ended(computes, end, status, error):
    script = SCRIPT.format(computes=computes, end=end)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    said = ["said"] if computes else ["said", "last rites"]
    assert (done.returncode, done.stdout.splitlines()) == (status, said), done.stderr
    assert done.stderr.splitlines()[1:] == error.splitlines()  # the first line is the machine's


IMPORTING = """
import os, signal, weakref
from ppldm.utils import entry as module

class Thing:
    pass

def load(threads):
    thing = Thing()
    kept = weakref.ref(thing, lambda _: os.kill(os.getpid(), signal.SIGINT))  # an exception in here would be lost
    del thing
    print("went on", flush=True)

module.load_paddle, module.require_working_environment = load, lambda: None
with module.entry():
    print("trained", flush=True)
"""


def test_ctrl_c_in_the_middle_of_imports_is_one_line_and_is_never_lost():
    done = subprocess.run([sys.executable, "-c", IMPORTING], capture_output=True, text=True, timeout=60)
    assert done.returncode == 130 and done.stdout == "", done.stderr
    assert done.stderr == "stopped by Ctrl-C; the same command again goes on from what is finished\n"


MEETING = """
import ctypes, os, signal
from ppldm.utils.processes.signals import ending_at_once

signal.signal(signal.{name}, lambda *_: None)
with ending_at_once():
    if {inside}:
        os.kill(os.getpid(), signal.{name})
        ctypes.PyDLL(None).sleep(60)  # native code that holds the interpreter's lock
os.kill(os.getpid(), signal.{name})  # the handler is back
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1"])
@pytest.mark.parametrize("inside", [True, False])
def test_a_signal_ends_a_rank_that_waits_in_native_code(name, inside):
    code = MEETING.format(name=name, inside=inside)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.returncode == (-getattr(signal, name) if inside else 0), done.stderr

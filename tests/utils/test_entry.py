"""A process ends with the status that it means and with all that it said, also where a thread of it still computes."""

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

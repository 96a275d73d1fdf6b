"""A process whose threads still compute ends with the status that it means, and with all that it said."""

import subprocess
import sys

import pytest

SCRIPT = """
import threading
from ppldm.utils.entry import entry
from ppldm.utils.errors import ConfigError

def compute(started):
    import paddle
    one = paddle.ones([64, 64])
    while True:
        one = paddle.tanh(one @ one)
        started.set()

with entry(leave_threads=True):
    started = threading.Event()
    threading.Thread(target=compute, args=[started], daemon=True).start()
    started.wait()
    print("said", end="")
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
def test_threads_that_compute_are_left(end, status, error):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(end=end)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (status, "said"), done.stderr
    assert done.stderr.splitlines()[1:] == error.splitlines()  # the first line is the machine's

"""A batch that does not come ends the process; one that comes does not."""

import subprocess
import sys
import time

from ppldm.training.report import IntervalMetrics
from ppldm.training.train import timed_batches
from ppldm.utils.processes.ranks import World

HANG = """
import sys, threading
sys.path[:0] = {path!r}
from ppldm.training.report import IntervalMetrics
from ppldm.training.train import timed_batches
from ppldm.utils.processes.ranks import World

def batches():
    yield 1
    threading.Event().wait()

for batch in timed_batches(batches(), IntervalMetrics(World()), 0.2, 3):
    print(batch, flush=True)
"""


def test_the_process_ends_with_one_last_line():
    result = subprocess.run(
        [sys.executable, "-c", HANG.format(path=sys.path)], capture_output=True, text=True, timeout=60
    )
    assert (result.returncode, result.stdout) == (1, "1\n")
    lines = result.stderr.splitlines()
    assert lines[-1] == (
        "error: rank 3 has waited 0.2 s for a batch; see to its storage, or allow more with --data_timeout"
    )
    assert any("in batches" in line for line in lines)


def test_slow_use_of_a_batch_is_no_wait():
    closed = []

    class Source:
        def __iter__(self):
            try:
                yield from range(3)
            finally:
                closed.append(True)

    batches = timed_batches(Source(), IntervalMetrics(World()), 0.1, 0)
    for _ in batches:
        time.sleep(0.2)
    assert closed == [True]
    assert list(timed_batches(Source(), IntervalMetrics(World()), 0, 0)) == [0, 1, 2]

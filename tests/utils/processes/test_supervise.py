"""A command is started again where that can help, waits longer each time, and never outlives who started it."""

import os
import signal
import subprocess
import sys
import time

import pytest
from running import running

from ppldm.utils.processes import workers
from ppldm.utils.processes.workers import LONGEST_WAIT_SECONDS, wait_before

# Each start takes the next exit status of the file `plan`, which negative ones end by that signal, and counts itself.
COMMAND = """
import os, pathlib, sys
plan, starts = map(pathlib.Path, sys.argv[1:])
number = len(starts.read_text()) if starts.exists() else 0
starts.write_text("x" * (number + 1))
status = [int(word) for word in plan.read_text().split()][number]
os.kill(os.getpid(), -status) if status < 0 else sys.exit(status)
"""


@pytest.fixture
def supervised(tmp_path, monkeypatch):
    """supervised(statuses, most, progress) -> (exit status, number of starts)."""
    monkeypatch.setattr(workers, "FIRST_WAIT_SECONDS", 0.01)

    def run(statuses, most, progress=lambda: 0):
        (tmp_path / "plan").write_text(" ".join(map(str, statuses)))
        command = [sys.executable, "-c", COMMAND, tmp_path / "plan", tmp_path / "starts"]
        status = workers.supervise(command, most, lambda: progress())
        return status, len((tmp_path / "starts").read_text())

    return run


@pytest.mark.parametrize(
    "statuses, most, ends",
    [
        ([0], 3, (0, 1)),
        ([1, 1, 0], 3, (0, 3)),
        ([-signal.SIGKILL, 0], 1, (0, 2)),
        ([1, 1, 1], 2, (1, 3)),
        ([1, -signal.SIGSEGV], 1, (128 + signal.SIGSEGV, 2)),
        ([2], 3, (2, 1)),  # wrong settings stay wrong
        ([1, 130], 3, (130, 2)),  # Ctrl-C
        ([os.EX_TEMPFAIL], 3, (os.EX_TEMPFAIL, 1)),  # whoever stopped it will start it again
    ],
)
def test_started_again_where_that_can_help(supervised, statuses, most, ends):
    assert supervised(statuses, most) == ends


def test_progress_gives_all_restarts_back(supervised, tmp_path):
    assert supervised([1] * 5 + [0], 1, progress=lambda: (tmp_path / "starts").exists() and os.path.getsize(
        tmp_path / "starts")) == (0, 6)  # fmt: skip


def test_waits_double_up_to_a_limit():
    waits = [wait_before(start) for start in range(1, 12)]
    assert waits[:3] == [1, 2, 4] and waits == sorted(waits) and waits[-1] == LONGEST_WAIT_SECONDS


SUPERVISE = """
import sys
from ppldm.utils.processes.workers import supervise
sys.exit(supervise([sys.executable, "-c", sys.argv[1], sys.argv[2]], 5, lambda: 0))
"""
STOPPABLE = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
print("up", flush=True)
for _ in range(1200):  # one long sleep might begin just after a signal, which would then wait for its end
    time.sleep(0.05)
"""


@pytest.mark.parametrize("number, status", [(signal.SIGTERM, os.EX_TEMPFAIL), (signal.SIGKILL, -signal.SIGKILL)])
def test_signals_reach_the_command_and_it_does_not_outlive_its_supervisor(tmp_path, number, status):
    mark = str(tmp_path / "mark")
    process = subprocess.Popen([sys.executable, "-c", SUPERVISE, STOPPABLE, mark], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "up\n"
    process.send_signal(number)
    assert process.wait(120) == status
    for _ in range(2400):
        if not running(mark):
            return
        time.sleep(0.05)
    raise AssertionError("the command goes on")

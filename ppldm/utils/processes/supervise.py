"""Commands in processes of their own, and one that is started again when it fails, unless it ended on request or for
its own settings: what a machine loses in a night need not cost the night."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial

from ..errors import ConfigError, Interrupted, Preempted
from ..log import get_logger
from ..text import count_of
from .signals import end_with_parent, handled

FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 1.0, 60.0
_FINAL = (0, ConfigError.exit_status, Interrupted.exit_status, Preempted.exit_status)
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def start_child(command: Sequence[str], **settings) -> subprocess.Popen:
    """Start a command that the terminal's Ctrl-C does not reach, and that ends with this process, however that ends."""
    dies = partial(end_with_parent, os.getpid())
    return subprocess.Popen(command, start_new_session=True, preexec_fn=dies, **settings)


def wait_for(process: subprocess.Popen) -> int:
    """The status of a process at its end. Meanwhile this thread handles its signals; `Popen.wait()` without a time
    would leave one that came a moment earlier unhandled until then."""
    while True:
        try:
            return process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            pass


def wait_before(start: int) -> float:
    """Seconds before the start number `start` since the last progress; the first again is 1."""
    return min(FIRST_WAIT_SECONDS * 2 ** (start - 1), LONGEST_WAIT_SECONDS)


def supervise(command: Sequence[str], max_restarts: int, progress: Callable[[], int], environ=None) -> int:
    """Run `command` until it ends well, at most `max_restarts` times again while the number `progress()` does not rise;
    the last exit status, 128 and the signal's number of one that was killed. A signal goes to it, and is the end."""
    restarts, reached = 0, progress()
    process: subprocess.Popen | None = None
    stopped_by = 0

    def forward(number: int, _frame) -> None:
        nonlocal stopped_by
        stopped_by = number
        if process and process.poll() is None:
            process.send_signal(number)

    with handled(_SIGNALS, forward):
        while True:
            process = start_child(command, env=environ)
            if stopped_by:  # just before
                process.send_signal(stopped_by)
            status = wait_for(process)
            status = status if status >= 0 else 128 - status
            if status in _FINAL or stopped_by:
                return status
            if (now := progress()) > reached:
                restarts, reached = 0, now
            restarts += 1
            if restarts > max_restarts:
                if max_restarts > 1:
                    get_logger().error("failed %d times without progress between", restarts)
                return status
            wait = wait_before(restarts)
            left = count_of(max_restarts - restarts, "restart")
            get_logger().warning("ended with exit status %d; starts again in %g s, with %s left", status, wait, left)
            until = time.monotonic() + wait
            while time.monotonic() < until and not stopped_by:
                time.sleep(min(0.1, wait))
            if stopped_by:
                return status

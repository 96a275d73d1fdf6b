"""A command that is started again when it fails, by itself: what a machine loses in a night need not cost the night.

It waits before each start, twice as long as before the last one, up to LONGEST_WAIT_SECONDS. What ended well, on
request or for its own settings is not started again.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence

from ..errors import ConfigError, Interrupted, Preempted
from ..log import get_logger
from ..text import count_of
from .signals import end_with_parent, wait_for

FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 1.0, 60.0
_FINAL = (0, ConfigError.exit_status, Interrupted.exit_status, Preempted.exit_status)
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def wait_before(start: int) -> float:
    """Seconds before the start number `start` since the last progress; the first again is 1."""
    return min(FIRST_WAIT_SECONDS * 2 ** (start - 1), LONGEST_WAIT_SECONDS)


class Supervisor:
    """Runs `command` until it ends well, and at most `max_restarts` times again without progress between.

    `progress` gives a number that rises with what is done. Signals go to the command; after one there is no start. The
    command ends with this process, also where this is killed.
    """

    def __init__(self, command: Sequence[str], max_restarts: int, progress: Callable[[], int], environ=None):
        self.command, self.max_restarts, self.progress = list(command), max_restarts, progress
        self.environ, self.process, self.stopped_by = environ, None, 0

    def run(self) -> int:
        """The exit status of the last start; 128 and the number of the signal that killed it."""
        before = {number: signal.signal(number, self._forward) for number in _SIGNALS}
        try:
            return self._run()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _run(self) -> int:
        restarts, reached = 0, self.progress()
        while True:
            status = self._start_once()
            if status in _FINAL or self.stopped_by:
                return status
            if (now := self.progress()) > reached:
                restarts, reached = 0, now
            restarts += 1
            if restarts > self.max_restarts:
                if self.max_restarts > 1:
                    get_logger().error("failed %d times without progress between", restarts)
                return status
            wait = wait_before(restarts)
            left = count_of(self.max_restarts - restarts, "restart")
            get_logger().warning("ended with exit status %d; starts again in %g s, with %s left", status, wait, left)
            self._sleep(wait)
            if self.stopped_by:
                return status

    def _start_once(self) -> int:
        parent = os.getpid()
        # In a group of its own: Ctrl-C at the terminal reaches it once, from here.
        self.process = subprocess.Popen(
            self.command, env=self.environ, start_new_session=True, preexec_fn=lambda: end_with_parent(parent)
        )
        if self.stopped_by:  # just before
            self.process.send_signal(self.stopped_by)
        status = wait_for(self.process)
        return status if status >= 0 else 128 - status

    def _sleep(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.stopped_by:
            time.sleep(min(0.1, seconds))

    def _forward(self, number: int, _frame) -> None:
        self.stopped_by = number
        if self.process and self.process.poll() is None:
            self.process.send_signal(number)

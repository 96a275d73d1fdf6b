"""Stopping politely: a signal asks, the loop answers at the next update boundary."""

import signal
from contextlib import contextmanager

from ...utils.processes.signals import handle


class StopRequest:
    """Set by SIGINT, SIGTERM or SIGUSR1; `number` is the signal's, 0 while there is none."""

    def __init__(self):
        self.number = 0

    def __bool__(self):
        return self.number != 0


@contextmanager
def stop_on_signals():
    """Yield a StopRequest that the signals set while the block runs. A second Ctrl-C interrupts at once."""
    request = StopRequest()

    def ask(number, _frame):
        if request and number == signal.SIGINT:
            raise KeyboardInterrupt
        request.number = number

    watched = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = {number: handle(number, ask) for number in watched}
    try:
        yield request
    finally:
        for number, handler in before.items():
            handle(number, handler)

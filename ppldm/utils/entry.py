"""What every script that trains or draws does first: a sound environment, a prepared CPU, one-line errors."""

import os
import signal
import sys
from collections.abc import Callable
from contextlib import contextmanager

from .errors import exit_on_error
from .machine.cpu import load_paddle
from .machine.environment import require_working_environment
from .processes.ranks import World, begin
from .processes.signals import answer_interrupts, before_stop, end_with_parent, interrupt, note_failure, stop
from .variables import read


@contextmanager
def entry(
    check_early: Callable[[], None] = lambda: None,
    threads: int | None = None,
    is_computing: Callable[[], bool] = lambda: False,
    meets: bool = False,
):
    """Around a script's main: check the environment, prepare the CPU before paddle is imported, print errors well.

    `check_early`: raises what is known to be wrong before anything heavy is imported. `threads`: of the CPU; by default
    what the user has set, or what the machine has. `meets`: ranks will `join`.

    One rank of several, and a process of which a thread `is_computing` at the end, end without the interpreter's and
    the libraries' last steps, in which they may abort or wait for ever for ranks that are gone."""
    answer_interrupts()
    is_rank = World.detect().size > 1
    if is_rank:
        sys.excepthook = _show_and_leave
        if read("PADDLE_LOCAL_RANK"):  # a launcher started it, and without it, it would train on and save
            end_with_parent(os.getppid())
        if meets:
            begin(World.detect())
        _stop_on_signals(stop)
    try:
        with exit_on_error():
            check_early()
            _stop_on_signals(stop)
            require_working_environment()
            load_paddle(threads)  # unless `check_early` needed it
            _stop_on_signals(interrupt)  # paddle has set handlers of its own
            yield
    except SystemExit as error:
        if (is_rank or is_computing()) and isinstance(error.code, int):
            _leave(error.code)
        raise
    if is_rank or is_computing():
        _leave(0)


def _leave(status: int) -> None:
    if status:
        note_failure(World.detect().rank)
        for tell in before_stop:
            tell(status)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _show_and_leave(*error) -> None:
    sys.__excepthook__(*error)
    _leave(1)


def _stop_on_signals(on_interrupt: Callable) -> None:
    """`on_interrupt`: the handler of Ctrl-C, where it is not ignored or somebody's own."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, stop)
    now = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, on_interrupt if now in (signal.default_int_handler, interrupt, stop) else now)

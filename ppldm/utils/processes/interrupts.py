"""Ctrl-C from a process' first moments on: one line and exit status 130, whatever it meets.

An exception is not enough. A native library that is being imported makes an error of its own of it, and in the callback
of a weak reference Python drops it. Imports nothing that takes time: it is there before all else.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable

_AGAIN_SECONDS = 0.01
before_stop: list[Callable[[int], None]] = []  # called with the exit status; from a signal's handler


def answer_interrupts() -> None:
    """From here on, where Ctrl-C is not ignored or somebody's own. Main thread only."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = _send_again
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _end_in_one_line


def interrupt(number: int, frame) -> None:
    """The handler of Ctrl-C: as Python's own, but for the time of an import."""
    while frame:
        if frame.f_code.co_name == "_find_and_load" and frame.f_code.co_filename.startswith("<frozen importlib"):
            stop(number, frame)
        frame = frame.f_back
    raise KeyboardInterrupt


def stop(number: int, _frame) -> None:
    """End the process in a signal's handler: there is nothing to save, and what is half written goes at the next
    start."""
    is_interrupt = number == signal.SIGINT
    name = "Ctrl-C" if is_interrupt else signal.Signals(number).name
    # Unbuffered: the signal may have come in the middle of a write.
    os.write(2, f"stopped by {name}; the same command again goes on from what is finished\n".encode())
    status = 130 if is_interrupt else os.EX_TEMPFAIL
    for tell in before_stop:
        tell(status)
    os._exit(status)


def _send_again(lost) -> None:
    """Of a KeyboardInterrupt that could not be raised where it came; a moment later it can."""
    if lost.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(lost)
        return
    main = threading.main_thread().ident
    timer = threading.Timer(_AGAIN_SECONDS, signal.pthread_kill, [main, signal.SIGINT])
    timer.daemon = True
    timer.start()


def _end_in_one_line(kind, error, trace) -> None:
    if issubclass(kind, KeyboardInterrupt):
        stop(signal.SIGINT, None)
    sys.__excepthook__(kind, error, trace)

"""What a signal does to this process, and what becomes of it without its parent."""

import ctypes
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from typing import ClassVar

from .world import World


class _Stack(ctypes.Structure):
    """stack_t of sigaltstack(2), as Linux has it."""

    _fields_: ClassVar = [("start", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]


_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>: the signal that a process gets when the one that started it has died


def handle(number: int, handler):
    """`signal.signal`; in a rank of several, a system call that the signal meets then goes on.

    Else it fails with EINTR. Python repeats its own calls, the libraries do not: Paddle's key-value store, by which
    ranks find and wait for one another, takes EINTR for a lost connection. The price is that Python's handler runs when
    the call is done, so that a process that is not a rank keeps EINTR. Returns the handler before. Main thread only.
    """
    before = signal.signal(number, handler)
    if World.detect().size > 1:
        signal.siginterrupt(number, False)
    return before


@contextmanager
def ending_at_once():
    """Inside the block, a signal to stop ends the process itself: native code that holds the interpreter's lock, as the
    wait in which ranks find one another, never lets Python's handlers run."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = {
        number: handle(number, signal.SIG_DFL) for number in numbers if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            handle(number, signal.SIG_DFL if handler is None else handler)


def wait_for(process: subprocess.Popen) -> int:
    """The status of a process at its end. Meanwhile this thread handles its signals, also one that came just before.

    `Popen.wait()` without a time handles only those that come in its system call: one that came a moment earlier would
    stay unhandled until the process ends by itself.
    """
    while True:
        try:
            return process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            pass


def end_with_parent(parent: int) -> None:
    """From here on, this process is killed as soon as process `parent`, which started it, has ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before
        os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def same_signal_stack():
    """This thread has the same stack for signals afterwards. A library that gives it a small one of its own lets
    Python's handlers, which run on it, end the process in a segmentation fault."""
    if not sys.platform.startswith("linux"):
        yield
        return
    libc, before = ctypes.CDLL(None), _Stack()
    libc.sigaltstack(None, ctypes.byref(before))
    try:
        yield
    finally:
        libc.sigaltstack(ctypes.byref(before), None)

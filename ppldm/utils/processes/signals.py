"""What a signal does to this process, what becomes of it without its parent, and how a rank says that it fails.

Ctrl-C is one line and exit status 130 from a process' first moments on, whatever it meets: of an exception a native
library that is being imported makes an error of its own, and in the callback of a weak reference Python drops it. So
this module is there before all else, and imports nothing that takes time.

The launcher blames the rank that failed first. Those that wait for it lose their connection and may be gone before it,
so each notes the moment before it lets go of its connections; one that is killed can note nothing.
"""

import _thread
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import contextmanager, suppress

from ..variables import read

FOLDER_VARIABLE = "PPLDM_FAILURES"  # the folder that the launcher made for notes of failures
_AGAIN_SECONDS = 0.01
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>: the signal that a process gets when the one that started it has died
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
    """The handler of Ctrl-C: as Python's own, but for the time of an import, and while another is sent again."""
    while frame:
        if frame.f_code is _send_again.__code__:  # what is raised there is dropped too
            return _send_again(None)
        if frame.f_code.co_name == "_find_and_load" and frame.f_code.co_filename.startswith("<frozen importlib"):
            stop(number, frame)
        frame = frame.f_back
    raise KeyboardInterrupt


def stop(number: int, _frame) -> None:
    """End the process in a signal's handler: nothing is to be saved; what is half written goes at the next start."""
    is_interrupt = number == signal.SIGINT
    name = "Ctrl-C" if is_interrupt else signal.Signals(number).name
    # Unbuffered: the signal may have come in the middle of a write.
    os.write(2, f"stopped by {name}; the same command again goes on from what is finished\n".encode())
    status = 130 if is_interrupt else os.EX_TEMPFAIL
    for tell in before_stop:
        tell(status)
    os._exit(status)


def _send_again(lost) -> None:
    """Of a KeyboardInterrupt that could not be raised where it came; a moment later it can. By a bare thread: a
    `threading.Timer` takes locks, in which the signal may have come. lost: None of one that came in here."""
    if lost and lost.exc_type is not KeyboardInterrupt:
        return sys.__unraisablehook__(lost)

    def send(main: int) -> None:
        time.sleep(_AGAIN_SECONDS)
        signal.pthread_kill(main, signal.SIGINT)

    _thread.start_new_thread(send, (threading.main_thread().ident,))


def _end_in_one_line(kind, error, trace) -> None:
    if issubclass(kind, KeyboardInterrupt):
        stop(signal.SIGINT, None)
    sys.__excepthook__(kind, error, trace)


def handle(number: int, handler):
    """`signal.signal`; in a rank of several, a system call that the signal meets then goes on. Python repeats its own
    calls after EINTR, but Paddle's key-value store takes it for a lost connection. Python's handler then runs when the
    call is done, so that other processes keep EINTR. Returns the handler before. Main thread only."""
    before = signal.signal(number, handler)
    if int(read("PADDLE_TRAINERS_NUM", "1")) > 1:
        signal.siginterrupt(number, False)
    return before


@contextmanager
def handled(numbers: Iterable[int], handler):
    """Inside the block, `handler` answers these signals. Main thread only."""
    before = {number: handle(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            handle(number, signal.SIG_DFL if earlier is None else earlier)


def ending_at_once():
    """Inside the block, a signal to stop ends the process itself: native code that holds the interpreter's lock, as the
    wait in which ranks find one another, never lets Python's handlers run."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    return handled([one for one in numbers if signal.getsignal(one) != signal.SIG_IGN], signal.SIG_DFL)


def end_with_parent(parent: int) -> None:
    """From here on, this process is killed as soon as process `parent`, which started it, has ended."""
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before
        os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def same_signal_stack():
    """This thread has the same stack for signals afterwards. A library that gives it a small one of its own lets
    Python's handlers, which run on it, end the process in a segmentation fault."""
    import ctypes

    libc, before = ctypes.CDLL(None), (ctypes.c_size_t * 3)()  # as large as stack_t of sigaltstack(2)
    libc.sigaltstack(None, ctypes.byref(before))
    try:
        yield
    finally:
        libc.sigaltstack(ctypes.byref(before), None)


def note_failure(rank: int) -> None:
    """Note that this rank fails now. Without a launcher of ours, or where nothing can be written, nothing happens."""
    folder, now = read(FOLDER_VARIABLE), repr(time.monotonic())  # before others can see the note and fail in turn
    if folder:
        with suppress(OSError), open(os.path.join(folder, str(rank)), "w") as file:
            file.write(now)


def end_process(rank: int, text: str):
    """End this process at once, from any of its threads: one line on stderr, exit status 1."""
    note_failure(rank)
    sys.stderr.write(f"error: {text}\n")
    sys.stderr.flush()
    os._exit(1)

"""One logger for the package, which escapes messages and cuts over-long ones (`text`), and its progress bar."""

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from tqdm import tqdm

from .errors import debugging
from .text import escape, one_line, shorten

_FOLLOW_SECONDS = 0.5
_MAX_LINE_LENGTH, _MAX_NAME_LENGTH = 2000, 60  # characters
_BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}, about {remaining} left, {rate_fmt}{postfix}]"
_SMOOTHING = 0.05  # of the rate by which a terminal's bar tells what is left: that of some dozens of the last updates


class _Handler(logging.StreamHandler):
    """Writes above a running progress bar instead of through it."""

    def emit(self, record):
        if sys.stderr.isatty():
            tqdm.write(self.format(record), file=sys.stderr)
        else:
            sys.stderr.write(self.format(record) + "\n")


class _Formatter(logging.Formatter):
    def format(self, record) -> str:
        return "\n".join(shorten(line, _MAX_LINE_LENGTH) for line in escape(super().format(record)).split("\n"))


class _Lines:
    """A file for tqdm that makes a line of each state of the bar, for logs and pipes."""

    def write(self, text: str) -> None:
        if stripped := text.strip("\r\n "):
            sys.stderr.write(stripped + "\n")

    def flush(self) -> None:
        sys.stderr.flush()


def get_logger() -> logging.Logger:
    """The logger `ppldm`: INFO and above to stderr, nothing passed on to the root logger."""
    logger = logging.getLogger("ppldm")
    if not logger.handlers:
        handler = _Handler()
        handler.setFormatter(_Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    return logger


@contextmanager
def logging_to(path, rank: int) -> Iterator[None]:
    """In the block, lines go to the end of a file too, with date and rank; one that cannot be written there is lost."""
    try:
        handler: logging.Handler = logging.FileHandler(path, encoding="utf-8", errors="replace")
    except OSError:
        handler = logging.NullHandler()
    handler.handleError = lambda record: None  # type: ignore[method-assign]  # a full disk, of which the save tells
    handler.setFormatter(_Formatter(f"%(asctime)s [{rank}] %(levelname)s %(message)s"))
    get_logger().addHandler(handler)
    try:
        yield
    finally:
        get_logger().removeHandler(handler)
        with suppress(OSError):
            handler.close()


_quiet = False


def be_quiet() -> None:
    """Only warnings, and no progress bars from here on: in a worker process, whose parent shows both."""
    global _quiet
    _quiet = True
    get_logger().setLevel(logging.WARNING)


def progress(iterable=None, **kwargs) -> tqdm:
    """A progress bar on stderr, for use in a `with`; a line every 30 s where stderr is not a terminal."""
    kwargs = {"disable": _quiet, **kwargs, "desc": one_line(kwargs.get("desc") or "", _MAX_NAME_LENGTH) or None}
    if hasattr(iterable, "__len__") or kwargs.get("total") is not None:
        kwargs.setdefault("bar_format", _BAR)
    if sys.stderr.isatty():
        return tqdm(iterable, file=sys.stderr, dynamic_ncols=True, smoothing=_SMOOTHING, **kwargs)
    return tqdm(iterable, file=_Lines(), ncols=100, **{"mininterval": 30, "delay": 10, "position": 0, **kwargs})


def leave_out_next_step(bar: tqdm) -> None:
    """Let the time since the bar began, and the step that it took, tell nothing of the time left."""
    if not bar.disable:
        bar.unpause()
        bar.initial, bar.last_print_n = bar.initial + 1, bar.last_print_n + 1


@contextmanager
def following(measure: Callable[[], tuple[float, float]], **kwargs) -> Iterator[None]:
    """A progress bar that follows `measure()`, (done, total), which a thread asks for as long as the block runs."""
    ended = threading.Event()

    def follow() -> None:
        while not ended.wait(_FOLLOW_SECONDS):
            done, bar.total = measure()
            bar.update(max(0, min(done, bar.total) - bar.n))

    with progress(total=0, **kwargs) as bar:
        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def quiet_libraries() -> None:
    """PaddleNLP and ppdiffusers, both imported, log from WARNING on: a line for each saved file would drown ours."""
    from paddlenlp.utils.log import logger as paddlenlp_logger
    from ppdiffusers.utils import logging as ppdiffusers_logging

    if not debugging():
        paddlenlp_logger.set_level("WARNING")
        ppdiffusers_logging.set_verbosity_error()

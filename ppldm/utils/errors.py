"""The errors a user can cause, and the one place that prints them.

Every error of ours is a `PpldmError` whose text is one line: what is wrong, where, and the remedy. `exit_on_error` is
around an entry point: the user sees that line and an exit status other than 0; with `PPLDM_DEBUG=1` the traceback too.
"""

import errno
import logging
import os
import re
import select
import shutil
import signal
import sys
import traceback
import warnings
from collections.abc import Collection
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar

from .text import EscapingStream, escape, one_line
from .variables import is_on

_SHARED_MEMORY = "/dev/shm"
_MAX_LENGTH = 2000  # of a message, in characters
_LONGEST_QUOTE = 200  # letters of another library's message
_hyphens: ContextVar[Collection[str]] = ContextVar("hyphens", default=())


class PpldmError(Exception):
    """Base of all errors that a user's input, files or machine can cause. `str(error)` is one line that a terminal can
    show, also where it quotes another library, a damaged file or a server; its middle is cut out where that is long."""

    exit_status = 1

    def __init__(self, message: str):
        super().__init__(one_line(message, _MAX_LENGTH))


class ConfigError(PpldmError):
    """A flag, a config file or a combination of them that cannot work."""

    exit_status = 2


class EnvironmentProblem(PpldmError):
    """A library, a program or a version that is missing or broken on this machine."""


class DataError(PpldmError):
    """Training data that cannot be used. The base of the four below."""


class FilelistError(DataError):
    """A filelist, or a list of filelists, that is missing, empty or malformed."""


class PartError(DataError):
    """A part file, or its index, that is missing, damaged or not what its name says."""


class RowError(DataError):
    """One row that cannot be used. `reason` is a short stable word, the key under which such rows are counted."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


class StoreError(DataError):
    """A file of a store (`utils.store`) that cannot be had. `missing`: the store answered, and has no such file."""

    def __init__(self, message: str, missing: bool = False):
        super().__init__(message)
        self.missing = missing


class ModelError(PpldmError):
    """Weights or a model config that are missing, damaged or do not fit together."""


class CheckpointError(PpldmError):
    """A checkpoint that is missing, damaged or belongs to another run."""


class TrainingError(PpldmError):
    """Training that cannot go on: a loss that is not finite, ranks that disagree."""


class OutputError(PpldmError):
    """A place that results should go to and cannot."""


class DiskFullError(OutputError):
    """Too little space for what is to be written; what was there before is untouched."""


class Interrupted(PpldmError):
    """Work that Ctrl-C stopped after its state was saved."""

    exit_status = 130


class Preempted(Interrupted):
    """Work that SIGTERM or SIGUSR1 stopped after its state was saved; whoever sent it should start it again."""

    exit_status = os.EX_TEMPFAIL  # 75


FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # no space, no quota, a file above the allowed size


def debugging() -> bool:
    """True where `PPLDM_DEBUG` asks for tracebacks."""
    return is_on("PPLDM_DEBUG")


def quiet_others() -> None:
    """In a command: without Python's warnings of other packages, and what they log below WARNING."""
    if not debugging() and not sys.warnoptions:
        warnings.filterwarnings("ignore", module=r"(?!ppldm\b|__main__\b)")
        rest = logging.StreamHandler()
        rest.addFilter(lambda record: not logging.getLogger(record.name.partition(".")[0]).handlers)  # said already
        logging.basicConfig(level=logging.WARNING, handlers=[rest])  # which makes theirs do nothing


def describe(error: Exception) -> str:
    """An exception of another library in a few words: its kind, and what it says."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


@contextmanager
def showing_hyphens(flags: Collection[str]):
    """In the block, and in errors that leave it, these flags are shown as `--num-workers`, and not `--num_workers`."""
    token = _hyphens.set(flags)
    try:
        yield
    except PpldmError as error:
        error.args = (as_shown(str(error)),)
        raise
    finally:
        _hyphens.reset(token)


def as_shown(text: str) -> str:
    """A text for the terminal, with the flags of `showing_hyphens` in it as these are shown."""
    return re.sub(r"--(\w+)", lambda one: one[0].replace("_", "-") if one[1] in _hyphens.get() else one[0], text)


@contextmanager
def exit_on_error():
    """Turn a `PpldmError`, a full disk, too little memory or Ctrl-C into a line and an exit status; escape stdout."""
    try:
        with redirect_stdout(EscapingStream(sys.stdout)):
            yield
            if sys.__stdout__:  # None where it was closed
                sys.__stdout__.flush()
    except (PpldmError, OSError, UnicodeEncodeError, MemoryError, KeyboardInterrupt) as error:
        if isinstance(error, BrokenPipeError) and sys.__stdout__ and _is_unread(sys.__stdout__):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno())
            sys.exit(128 + signal.SIGPIPE)
        line, status = _tell(error)
        if not line:
            raise
        if debugging():
            sys.stderr.write(escape(traceback.format_exc()))
        sys.stderr.write(f"{line}\n")
        sys.exit(status)


def _is_unread(stream) -> bool:
    """Whether it is a pipe that nobody reads any more, as before `| head`."""
    poll = select.poll()
    poll.register(stream, 0)
    return bool(poll.poll(0))  # of what goes wrong


def _tell(error: BaseException) -> tuple[str, int]:
    """(the line for the user, the exit status); no line of what is to keep its traceback."""
    if isinstance(error, PpldmError):
        return f"{'' if isinstance(error, Interrupted) else 'error: '}{as_shown(str(error))}", error.exit_status
    if isinstance(error, KeyboardInterrupt):
        return "stopped by Ctrl-C; the same command again goes on from what is finished", 130
    if isinstance(error, MemoryError) and not debugging():
        what = one_line(str(error), _LONGEST_QUOTE).strip()
        quoted = f" ({what})" if what else ""
        return f"error: out of memory{quoted}; use smaller batches or pictures, or a machine with more", 1
    if isinstance(error, OSError) and error.errno in FULL_DISK and not debugging():
        return f"error: {one_line(_describe_full_disk(error))}", OutputError.exit_status
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG and not debugging():
        return f"error: too long for the name of a file: {one_line(str(error.filename), _LONGEST_QUOTE)}", 2
    # Names of files are bytes; some libraries take only those that are UTF-8.
    named = str(error.object) if isinstance(error, UnicodeEncodeError) and not debugging() else ""
    if any("\udc80" <= one <= "\udcff" for one in named):
        what = f"rename that file or folder: {one_line(named, _LONGEST_QUOTE)}"
        return f"error: a name that is not UTF-8 cannot be used here; {what}", ConfigError.exit_status
    return "", 0


def _describe_full_disk(error: OSError) -> str:
    # Locks between processes lie in shared memory, and their error names no file.
    if not error.filename and os.path.isdir(_SHARED_MEMORY) and shutil.disk_usage(_SHARED_MEMORY).free < 1 << 16:
        return (
            f"{_SHARED_MEMORY}, the memory that processes share, is full ({error.strerror}); free some, give the "
            "container more (docker run --shm-size 64m), or use no further processes (--dataloader_num_workers 0, "
            "--num-workers 1)"
        )
    place = f" for {error.filename}" if error.filename else ""
    return f"the disk is full{place} ({error.strerror}); free some and give the same command again"

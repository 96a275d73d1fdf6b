"""A file of rows that is open for reading at random.

Its state is looked at once with every read, so that a change is noticed at the next row: a file that was only touched
or copied back is opened again and read on; one of another content is an error, never a wrong row.
"""

import os
import weakref
from pathlib import Path

from ...utils.checksums import measure_file
from ...utils.errors import PartError


class OpenFile:
    """content: (bytes, CRC-32) that the file must have; None where it must not change at all. state: `file_state` of
    the file before that was measured, by default its state now. `number`: the file descriptor, which stays the same.

    Closed by `close()` or with the last reference. Raises PartError.
    """

    def __init__(self, path: Path, content: tuple[int, int] | None = None, state: tuple[int, ...] | None = None):
        self.path, self._content = Path(path), content
        try:
            self.number = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise unreadable(self.path, error) from error
        self._state = state or file_state(os.fstat(self.number))
        self.close = weakref.finalize(self, os.close, self.number)

    def read(self, offset: int, length: int, where: str) -> bytes:
        """Bytes [offset, offset + length); fewer at the end. `where` goes into errors. Raises PartError."""
        try:
            while True:
                data = os.pread(self.number, length, offset)
                if file_state(os.stat(self.path)) == self._state:
                    return data
                self._open_again(where)
        except FileNotFoundError as error:
            raise gone(self.path) from error
        except OSError as error:
            raise unreadable(where, error) from error

    def _open_again(self, where: str) -> None:
        number = os.open(self.path, os.O_RDONLY)
        try:
            state = file_state(os.fstat(number))
            if measure_file(self.path) != self._content:
                raise changed(self.path, where)
            os.dup2(number, self.number, inheritable=False)
        finally:
            os.close(number)
        self._state = state


def changed(path: Path, where: str = "") -> PartError:
    """The error of a file that is not what it was."""
    return PartError(
        f"{where}{': ' if where else ''}{path} has changed since it was opened or the run began; put it back as it was "
        "and start the same command, or go on with the new one (training: --accept_changes data)"
    )


def gone(path: Path) -> PartError:
    """The error of a file that is no longer there."""
    return PartError(f"{path} is gone; put it back and start the same command")


def unreadable(where, error: OSError) -> PartError:
    """The error of a file, or of a row in it, that cannot be read."""
    return PartError(f"cannot read {where} ({error.strerror or error}); check the file and its disk")


def file_state(status: os.stat_result) -> tuple[int, ...]:
    """What changes where another file takes a file's name, or its content is written anew."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns

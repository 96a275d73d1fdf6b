"""A file of rows that is open for reading at random, and whose change while it is used is an error and no wrong row."""

import os
import weakref
from pathlib import Path

from ...utils.errors import PartError


class OpenFile:
    """`number`: the file descriptor. Closed by `close()` or with the last reference. Raises PartError."""

    def __init__(self, path: Path):
        self.path = Path(path)
        try:
            self.number = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise unreadable(self.path, error) from error
        self._state = file_state(os.fstat(self.number))
        self.close = weakref.finalize(self, os.close, self.number)

    def read(self, offset: int, length: int, where: str) -> bytes:
        """Bytes [offset, offset + length); fewer at the end. `where` goes into errors. Raises PartError."""
        try:
            data = os.pread(self.number, length, offset)
            state = file_state(os.stat(self.path))
        except OSError as error:
            raise unreadable(where, error) from error
        if state != self._state:
            raise PartError(f"{where}: {self.path} has changed since it was opened; start again to index it anew")
        return data


def unreadable(where, error: OSError) -> PartError:
    """The error of a file, or of a row in it, that cannot be read."""
    return PartError(f"cannot read {where} ({error.strerror or error}); check the file and its disk")


def file_state(status: os.stat_result) -> tuple[int, ...]:
    """What changes where another file takes a file's name, or its content is written anew."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns

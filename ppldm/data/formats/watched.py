"""A part that is replaced while a run reads it must not go unnoticed: its rows would be others than the run began with.

What is open is what was indexed, as long as the file, its size and its time of change stay what they were. Where they
change, the content decides: a file that was only touched or copied back is opened again and read on.
"""

import stat
from pathlib import Path

from ...utils.errors import PartError
from ..filelist import Source
from .index_cache import measure_file
from .open import Rows, open_part
from .open_file import file_state
from .row import Row


class WatchedPart:
    """An open part. `content`: (bytes, CRC-32) that it had when the run began; None where that is not known.

    Raises PartError, also from `read`, where the file is another one or gone.
    """

    def __init__(self, path: Path, source: Source, content: tuple[int, int] | None):
        self.path, self._source = path, source
        # Before it is opened, so that a change between is seen at the first row.
        self._status = self._look()
        self._rows: Rows = open_part(path, source)
        if content is not None and self._rows.identity[:2] != content:
            raise self._changed()

    def read(self, row: int) -> Row:
        """Row `row`. Raises RowError."""
        status = self._look()
        if status != self._status:
            if measure_file(self.path) != self._rows.identity[:2]:
                raise self._changed()
            self._rows.close()
            self._status, self._rows = status, open_part(self.path, self._source)
        return self._rows.read(row)

    def _look(self) -> tuple[int, ...] | None:
        """The state of the file; None of a folder, to which files may be added."""
        try:
            status = self.path.stat()
        except OSError as error:
            raise PartError(
                f"{self.path} is gone ({error.strerror}); put it back and start the same command"
            ) from error
        return None if stat.S_ISDIR(status.st_mode) else file_state(status)

    def _changed(self) -> PartError:
        return PartError(
            f"{self.path} has changed since the run began; put the file back as it was and start the same command, "
            "or go on with the new one and --accept_changes data"
        )

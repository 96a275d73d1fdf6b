"""What a running shard has of its rows so far, so that a kill loses only what was on its way.

Laws. Each row is one record: its number in the shard, what img2dataset knows of it, and its picture as kept. A record
is written whole or, at the moment of a kill, is the torn last one, which is cut off. Rows whose failure may be mended
by another try (`failures.TEMPORARY`) are not recorded: the next run fetches them again, with the rows that are missing.
A journal of other rows or settings is not read.

    part_1/.download/journals/00000    a JSON line with the stamp, then records: length, CRC-32, JSON line, picture

`JournalingWriter` takes the place of img2dataset's writer of samples: it records what is fetched, and gives all rows to
the true writer at the end, in their order and not that of arrival, so that the same content makes the same shard. A
journal takes as much room as its shard, until the shard is finished.
"""

from __future__ import annotations

import errno
import json
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from .failures import TEMPORARY, classify

_HEADER = struct.Struct("<II")  # length and CRC-32 of what follows


@dataclass
class Journal:
    """The records of one shard in a file. `stamp` tells its rows and settings from any other. `rows`: where in the file
    each recorded row is, (place, bytes)."""

    path: Path
    stamp: str
    rows: dict[int, tuple[int, int]] = field(default_factory=dict)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Find what an earlier run has left, and be ready for more inside the block."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a+b", buffering=0) as self._file:
            self._end = 0
            for place, body in self._scan():
                self._end = place + len(body)
                self.rows[_split(body)[0]] = place, len(body)
            self._file.truncate(self._end)
            if not self._end:
                self._append(json.dumps(self.stamp).encode() + b"\n")
            yield

    def add(self, row: int, meta: dict, image: bytes | None) -> bool:
        """Record a row, unless another try may mend its failure; whether it was."""
        if classify(meta["status"], meta["error_message"]) in TEMPORARY:
            return False
        body = json.dumps([row, meta]).encode() + b"\n" + (image or b"")
        self._append(_HEADER.pack(len(body), zlib.crc32(body)) + body)
        self.rows[row] = self._end - len(body), len(body)
        return True

    def read(self, row: int) -> tuple[dict, bytes | None]:
        """(what is known of a recorded row, its picture or None)."""
        place, length = self.rows[row]
        return _split(os.pread(self._file.fileno(), length, place))[1:]

    def _append(self, data: bytes) -> None:
        """All of it or, where the disk is full, nothing: what came after a torn record would not be found."""
        try:
            if self._file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        except OSError:
            self._file.truncate(self._end)
            raise
        self._end += len(data)

    def _scan(self) -> Iterator[tuple[int, bytes]]:
        """(place in the file, content) of the records before the first that is torn."""
        total = self.path.stat().st_size
        with open(self.path, "rb") as file:
            if file.readline() != json.dumps(self.stamp).encode() + b"\n":
                return
            while len(header := file.read(_HEADER.size)) == _HEADER.size:
                length, checksum = _HEADER.unpack(header)
                if length > total - file.tell() or zlib.crc32(body := file.read(length)) != checksum:
                    return
                yield file.tell() - length, body


def _split(body: bytes) -> tuple[int, dict, bytes | None]:
    text, _, image = body.partition(b"\n")
    return *json.loads(text), image or None


class JournalingWriter:
    """A writer of samples for img2dataset, around one of its own.

    img2dataset makes keys of the numbers of the rows that it is given, which are those that the journal lacks:
    `row_of(key)` is a row's number in the shard, and `key_of(row)` its true key.
    """

    def __init__(self, writer, journal: Journal, row_of: Callable[[str], int], key_of: Callable[[int], str]):
        self._writer, self._journal, self._row_of, self._key_of = writer, journal, row_of, key_of
        self._unrecorded: dict[int, dict] = {}

    def write(self, image: bytes | None, key: str, caption: str | None, meta: dict) -> None:
        """As img2dataset's writers."""
        row = self._row_of(key)
        meta["key"] = self._key_of(row)
        if not self._journal.add(row, meta, image):
            self._unrecorded[row] = meta

    def close(self) -> None:
        """As img2dataset's writers."""
        for row in sorted({*self._journal.rows, *self._unrecorded}):
            meta, image = (self._unrecorded[row], None) if row in self._unrecorded else self._journal.read(row)
            self._writer.write(image, meta["key"], meta["caption"], meta)
        self._writer.close()

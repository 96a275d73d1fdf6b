"""Copies of files that have no way into their middle: ordinary gzip, parquet, compressed shards of MosaicML.

Such a file is rewritten once, when its rows are first wanted, as a file whose rows are read at random: a part of plain
text, or the shard without its compression. The copy lies in the cache folder, under the content of its source, so that
a source that was moved or touched finds it again. All processes of a machine share it.

Copies take at most `PPLDM_COPIES_GB` (32), and half of what the disk has for them; those used last stay. One that is
removed while it is open is still read: its space is free when it is closed. `ppldm repack` makes parts that need none.
"""

import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from glob import escape
from pathlib import Path
from typing import BinaryIO

from ...utils.checksums import measure_file
from ...utils.errors import ConfigError, OutputError, PartError
from ...utils.files import atomic_write, cache_dir, count_free_bytes, make_output_dir
from ...utils.log import get_logger
from ...utils.variables import read
from .index.cache import build_lock
from .open_file import changed, unreadable

_LIMIT, _FOLDER = "PPLDM_COPIES_GB", "copies"
_ATTEMPTS = 3
_ABANDONED_SECONDS = 600.0  # since anything was written
_REMEDY = f"free some space, set {_LIMIT} or PPLDM_CACHE_DIR, or run `ppldm repack` once"


class Copy:
    """The copy of a file, opened with the first read and made where it is not there.

    content: (bytes, CRC-32) of the source. kind: a suffix that tells apart what is made of one file. blocks: what the
    copy holds, read from the source. What `read` opened is closed by `close()` or with the last reference.
    """

    def __init__(self, path: Path, content: tuple[int, int], kind: str, blocks: Callable[[], Iterable[bytes]]):
        self._path, self._content, self._kind, self._blocks = path, content, kind, blocks
        self._file: BinaryIO | None = None

    def read(self, offset: int, length: int, where: str) -> bytes:
        """Bytes [offset, offset + length); fewer at the end. where: for errors. Raises PartError, OutputError."""
        try:
            return os.pread(self._kept_open().fileno(), length, offset)
        except OSError as error:
            raise unreadable(where, error) from error

    def count_bytes(self) -> int:
        """How long the copy is. Raises PartError, OutputError."""
        return os.fstat(self._kept_open().fileno()).st_size

    def close(self) -> None:
        """Give the file back."""
        if self._file:
            self._file.close()

    def _kept_open(self) -> BinaryIO:
        if self._file is None:
            self._file = self.open()
            weakref.finalize(self, self._file.close)
        return self._file

    def open(self) -> BinaryIO:
        """The copy as a binary file that is not buffered; the caller closes it. Raises PartError, OutputError."""
        place = _place(self._path, self._content, self._kind)
        for _ in range(_ATTEMPTS):
            try:
                file = open(place, "rb", buffering=0)  # noqa: SIM115 (the caller closes it)
                if os.access(place, os.W_OK):  # a cache of somebody else's may be read all the same
                    os.utime(file.fileno())
                return file
            except FileNotFoundError:  # not there yet, or just removed in favour of others
                self._make(place)
        raise OutputError(f"{place} is removed as soon as it is made; {_REMEDY}")

    def _make(self, place: Path) -> None:
        make_output_dir(place.parent)
        with build_lock(place):
            if place.exists():
                return
            if measure_file(self._path) != self._content:
                raise changed(self._path)
            with making_copy(self._path, self._content, self._kind) as write:
                for block in self._blocks():
                    write(block)


@contextmanager
def making_copy(path: Path, content: tuple[int, int], kind: str) -> Iterator[Callable[[bytes], None]]:
    """What writes the copy of a file, block by block. The copy is there when the block ends without an error.

    Raises OutputError, and PartError for a file whose copy would be larger than all copies may be.
    """
    place, limit = _place(path, content, kind), _limit_bytes()
    make_output_dir(place.parent)

    def write(block: bytes) -> None:
        if file.tell() + len(block) > limit:
            raise PartError(f"{path} holds more than the {limit / 1e9:g} GB that copies may take; {_REMEDY}")
        try:
            file.write(block)
        except OSError as error:
            raise _cannot_write(place, error) from error

    try:
        with atomic_write(place) as file:
            try:
                yield write
            except OSError as error:
                raise PartError(f"cannot read {path} ({error.strerror or error}); get it again") from error
    except OSError as error:
        raise _cannot_write(place, error) from error
    get_logger().info("%s is not read at random: its rows were copied into %s", path, place.parent)
    _remove_oldest(place)


def _cannot_write(place: Path, error: OSError) -> OutputError:
    return OutputError(f"cannot write {place} ({error.strerror or error}); {_REMEDY}")


def drop_copies(path: Path) -> None:
    """Remove the copies of a file that is about to go or to be replaced: they hold what stood in it."""
    if path.exists():
        for copy in (cache_dir() / _FOLDER).glob(f"*-{path.stat().st_size}-{escape(path.name)}.*"):
            copy.unlink(missing_ok=True)


def _place(path: Path, content: tuple[int, int], kind: str) -> Path:
    num_bytes, crc32 = content
    return cache_dir() / _FOLDER / f"{crc32:08x}-{num_bytes}-{path.name}{kind}"


def _limit_bytes() -> int:
    text = read(_LIMIT, "32")
    try:
        limit = float(text)
    except ValueError:
        limit = 0.0
    if not 0 < limit < float("inf"):
        raise ConfigError(f"{_LIMIT}={text} is not a number of gigabytes; write one such as 200")
    return int(limit * 1e9)


def _remove_oldest(newest: Path) -> None:
    """Keep copies, and what killed processes left of them, within bounds; the newest stays in any case."""
    found = []
    for path in newest.parent.iterdir():
        with suppress(FileNotFoundError):  # another process removes them too
            status = path.stat()
            found.append((status.st_mtime_ns, status.st_size, path))
    left = min(_limit_bytes(), (sum(size for _, size, _ in found) + count_free_bytes(newest.parent)) // 2)
    for changed_ns, size, path in sorted(found, reverse=True):
        left -= size
        is_being_made = path.suffix == ".tmp" and time.time() - changed_ns / 1e9 < _ABANDONED_SECONDS
        if left < 0 and path != newest and not is_being_made:
            _warn_of_room(newest.parent)
            path.unlink(missing_ok=True)


@cache
def _warn_of_room(folder: Path) -> None:
    get_logger().warning(
        "%s has no room for the copies of all files that are read: they are made again and again; raise %s, or run "
        "`ppldm repack` once",
        folder,
        _LIMIT,
    )

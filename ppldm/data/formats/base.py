"""What all formats share: rows that an index finds in one file, read one at a time; and copies of some files.

The state of an open file is looked at once with every read, so that a change is noticed at the next row: a file that
was only touched or copied back is opened again and read on; one of another content is an error, never a wrong row.

Ordinary gzip, parquet and compressed shards of MosaicML have no way into their middle. Such a file is rewritten once,
when its rows are first wanted, as a part of plain text, or as the shard without its compression. The copy lies in the
cache folder, under the content of its source. Copies take at most `PPLDM_COPIES_GB` (32), and half of what the disk has
for them; those used last stay. One that is removed while it is open is still read.
"""

import math
import os
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, cached_property
from glob import escape
from pathlib import Path
from typing import BinaryIO

from ...utils.checksums import measure_file
from ...utils.errors import ConfigError, OutputError, PartError, RowError
from ...utils.files import atomic_write, cache_dir, count_free_bytes, make_output_dir
from ...utils.log import get_logger, progress
from ...utils.store.cache import hold, in_store
from ...utils.variables import read
from ..images import image_size
from .index import (
    Index,
    IndexSpec,
    IndexSummary,
    build_lock,
    find_stored,
    make_index,
    open_index,
    stat_part,
    store_index,
)
from .layouts import CONTROL_LAYOUT, DEFAULT_LAYOUT, LAYOUTS
from .row import Row, Rows, decode_text_columns, find_name

GZIP_MAGIC = b"\x1f\x8b"
MAX_ROW_BYTES = 1 << 28
_HEAD_BYTES = 1 << 12  # of a line, compressed or not, within which its texts nearly always are
# Of a file of another kind no row can be read; this many are tried before saying so.
ROWS_TO_TRY = 100
_LIMIT, _FOLDER = "PPLDM_COPIES_GB", "copies"
_ATTEMPTS = 3
_ABANDONED_SECONDS = 600.0  # since anything was written
_REMEDY = f"free some space, set {_LIMIT} or PPLDM_CACHE_DIR, or run `ppldm repack` once"


class OpenFile:
    """content: (bytes, CRC-32) that the file must have; None where it must not change at all. state: `file_state` of
    the file before that was measured, by default its state now. `number`: the file descriptor, which stays the same.
    Closed by `close()` or with the last reference. Raises PartError."""

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


def open_copy(path: Path, content: tuple[int, int], kind: str, make: Callable[[], object]) -> BinaryIO:
    """The copy of a file as a binary file that is not buffered, which the caller closes. content: (bytes, CRC-32) of
    the source. kind: a suffix that tells apart what is made of one file. make: does it by `making_copy` where it is not
    there. Raises PartError, OutputError."""
    place = _place(path, content, kind)
    for _ in range(_ATTEMPTS):
        try:
            file = open(place, "rb", buffering=0)  # noqa: SIM115 (the caller closes it)
            if os.access(place, os.W_OK):  # a cache of somebody else's may be read all the same
                os.utime(file.fileno())
            return file
        except FileNotFoundError:  # not there yet, or just removed in favour of others
            make_output_dir(place.parent)
        with build_lock(place):
            if not place.exists():
                if measure_file(path) != content:
                    raise changed(path)
                make()
    raise OutputError(f"{place} is removed as soon as it is made; {_REMEDY}")


@contextmanager
def making_copy(path: Path, content: tuple[int, int], kind: str) -> Iterator[Callable[[bytes], None]]:
    """What writes the copy of a file, block by block. Raises OutputError, and PartError for what is too large."""
    place, limit = _place(path, content, kind), _limit_bytes()
    make_output_dir(place.parent)

    def write(block: bytes) -> None:
        if file.tell() + len(block) > limit:
            raise PartError(f"{path} holds more than the {limit / 1e9:g} GB that copies may take; {_REMEDY}")
        with writing(place, _REMEDY):
            file.write(block)

    with writing(place, _REMEDY), atomic_write(place) as file:
        try:
            yield write
        except OSError as error:
            raise PartError(f"cannot read {path} ({error.strerror or error}); get it again") from error
    get_logger().info("%s is not read at random: its rows were copied into %s", path, place.parent)
    _remove_oldest(place)


@contextmanager
def writing(path: Path, remedy: str) -> Iterator[None]:
    """Makes of an OSError an OutputError that names what cannot be written."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}; {remedy}") from error


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
    words = "%s has no room for the copies of all files that are read: they are made again and again; raise %s, or run "
    get_logger().warning(words + "`ppldm repack` once", folder, _LIMIT)


class IndexedRows(Rows, ABC):
    """Rows of a file or folder that an index finds. A format says how to find its rows (`_build`), what the bytes of
    one mean (`_decode`), and in which `spec` its index is kept, another one for each `layout`. With a `_copy_kind` rows
    are read from a copy of the file, in which offsets count. Raises PartError for what is missing, empty, truncated or
    of another format."""

    spec: IndexSpec
    _copy_kind = ""

    def __init__(self, path, layout: str = DEFAULT_LAYOUT):
        self.path, self.spec = Path(path), self.spec.of_layout(layout)
        self._has_control = layout == CONTROL_LAYOUT
        self._release = weakref.finalize(self, hold(self.path)) if in_store(self.path) else None
        # Before the file is indexed, so that a change between is seen at the first row.
        state = file_state(stat_part(self.path, self.spec))
        stored, self._index = open_index(self.path, self.spec, self._build)
        self.widths, self.heights = self._index.widths, self._index.heights
        self.identity: tuple[int, ...] = (self._index.part_bytes, self._index.part_crc32)
        self._file = OpenFile(stored, self.identity, state if stored == self.path else None)

    def close(self) -> None:
        self._file.close()
        if "_copy" in vars(self):
            self._copy.close()
        if self._release:
            self._release()

    @classmethod
    def summarize(cls, path, layout: str = DEFAULT_LAYOUT) -> IndexSummary | None:
        """What only the header of the index tells; None where there is no index. Raises PartError."""
        found = find_stored(Path(path), cls.spec.of_layout(layout), only_header=True)
        return found[1] if found else None

    def __len__(self) -> int:
        return len(self._index.offsets)

    def read(self, row: int) -> Row:
        where = self._where(row)
        return self._decode(self._read_bytes(row, where), where)

    def _read_bytes(self, row: int, where: str, limit: int | None = None) -> bytes:
        """What `_decode` takes; of at most `limit` stored bytes. Raises RowError."""
        offset, length = int(self._index.offsets[row]), int(self._index.lengths[row])
        return self._read_stored(offset, length if limit is None else min(length, limit), where)

    def _read_stored(self, offset: int, length: int, where: str) -> bytes:
        """Bytes of the file, or of its copy; fewer at the end. Raises PartError, OutputError."""
        if not self._copy_kind:
            return self._file.read(offset, length, where)
        self._file.read(0, 0, where)  # notices a change
        try:
            return os.pread(self._copy.fileno(), length, offset)
        except OSError as error:
            raise unreadable(where, error) from error

    @cached_property
    def _copy(self) -> BinaryIO:
        copy = open_copy(self.path, self.identity[:2], self._copy_kind, self._make_copy)
        weakref.finalize(self, copy.close)
        return copy

    def _make_copy(self) -> None:
        self._build()

    @abstractmethod
    def _build(self) -> tuple[Path, Index]:
        """(the file with the rows, its index), the latter stored for the next time; and the copy, if there is one."""

    @abstractmethod
    def _decode(self, data: bytes, where: str) -> Row:
        """The row of its bytes. Raises RowError."""


class LineRows(IndexedRows):
    """Rows that are lines of `_layout`, in which caption and metadata nearly always come before the image."""

    _layout = LAYOUTS[DEFAULT_LAYOUT]

    def read_fields(self, row: int) -> tuple[str, dict]:
        where = self._where(row)
        fields = decode_text_columns(self._read_bytes(row, where, _HEAD_BYTES), where, self._layout)
        return super().read_fields(row) if fields is None else fields


@contextmanager
def indexing(path: Path, total: int, unit: str):
    """A line in the log, a progress bar, and an error of ours where the file cannot be read."""
    get_logger().info("indexing %s, once", path)
    try:
        with progress(total=total, desc=path.name, unit=unit, unit_scale=unit == "B", delay=3) as bar:
            yield bar
    except OSError as error:
        raise PartError(f"cannot read {path}: {error.strerror or error}; get it again") from error


def is_gzip(path: Path) -> bool:
    """Whether a file begins as gzip does."""
    with open(path, "rb") as file:
        return file.read(2) == GZIP_MAGIC


def store_rows(
    path: Path,
    spec: IndexSpec,
    table: list[tuple[int, int, int, int]],
    content: tuple[int, int] | None = None,
    kind: int | None = None,
) -> tuple[Path, Index]:
    """(path, index of rows (offset, length, width, height) of that file), stored. content: the file's bytes and CRC-32,
    where they are known. kind: of several that the format has. Raises PartError without rows."""
    if not table:
        raise PartError(f"{path} holds no rows; get it again or delete its line in the filelist")
    index = make_index(spec.kinds[0] if kind is None else kind, *(content or measure_file(path)), table)
    store_index(path, spec, index)
    return path, index


def read_image_size(path: Path) -> tuple[int, int]:
    """(width, height) as shown of an image file; (0, 0) where it cannot be read."""
    try:
        return image_size(path.read_bytes())
    except (OSError, ValueError):  # ValueError: a NUL in the name
        return 0, 0


def read_file(folder: Path, name: str, where: str) -> bytes:
    """The content of a file that a row names. Raises RowError "unreadable"."""
    try:
        return (folder / name).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise RowError("unreadable", f"{where}: cannot read {name}: {getattr(error, 'strerror', error)}") from error


def find_column(columns: list[str], names: tuple[str, ...], path: Path) -> str:
    """The first of `names` that a table has, in whatever case. Raises PartError."""
    if name := find_name(columns, names):
        return name
    raise PartError(f"{path} has the columns {', '.join(columns)[:200]}; it needs one of {', '.join(names)}")


def is_plain(value) -> bool:
    """Whether a value of a table can be metadata: what JSON has, lists and objects too."""
    if isinstance(value, dict):
        return all(isinstance(name, str) for name in value) and is_plain([*value.values()])
    if isinstance(value, list):
        return all(item is None or is_plain(item) for item in value)
    return isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))

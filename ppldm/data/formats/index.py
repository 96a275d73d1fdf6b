"""The index of a file of rows: where each row is and how large its image, and where the index itself lies.

Little endian: a header (`_HEADER`), then for n rows offset u64[n], length u32[n], width u16[n], height u16[n]. An index
names the byte size of its part and carries checksums of its own two pieces: one that does not fit is never used. It
lies beside its file, `<file>.idx`, or in the cache folder where that folder cannot be written. The rows of a folder are
lines of a list of its names in the cache folder, another one for each time of change of the folder.

One process builds an index, and those that want the same one wait for it: its owner locks `<index>.lock`. The lock only
spares work: an index is the same whoever makes it and appears by one rename, so that two owners do no harm.
"""

import errno
import fcntl
import hashlib
import os
import stat
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np

from ...utils.checksums import measure_file
from ...utils.errors import OutputError, PartError
from ...utils.files import atomic_write, cache_dir, make_output_dir
from ...utils.log import get_logger
from ...utils.store.cache import bring_beside, in_store, size_of
from .layouts import DEFAULT_LAYOUT

GZIP_MEMBERS, PLAIN_LINES, TAR_SAMPLES, CSV_RECORDS, FILE_NAMES = range(5)
# 6 and 10: lines of a copy; another form takes another number. 5, 7 and 9: parquet files, as once read. Next: 11.
PACKED_LINES, MDS_SAMPLES, PARQUET_LINES = 6, 8, 10

_MAGIC, _VERSION = b"PPLDMIDX", 1
# magic, version, kind, rows, part's bytes, part's CRC-32, CRC-32 of the arrays, 1 + smallest side or 0 where it is not
# said, CRC-32 of this header
_HEADER = struct.Struct("<8sIIQQIIII")
_DTYPES = ("<u8", "<u4", "<u2", "<u2")
_BYTES_PER_ROW = 16
# Why a file cannot be written where others read it, while elsewhere it can.
READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)


@dataclass(frozen=True)
class Index:
    """Row i is bytes [offsets[i], offsets[i] + lengths[i]) of the part. `kind`: what those bytes are (docs/data.md).
    `widths`, `heights`: pixels as shown (after EXIF rotation), 0 where unknown, 65535 where more."""

    kind: int
    part_bytes: int
    part_crc32: int
    offsets: np.ndarray
    lengths: np.ndarray
    widths: np.ndarray
    heights: np.ndarray


@dataclass(frozen=True)
class IndexSummary:
    """What the header of an index tells. `smallest_side`: of all images whose size is known, 65535 where none is; None
    in the headers of early versions. `content`: bytes and CRC-32 of the file with the rows."""

    rows: int
    smallest_side: int | None
    content: tuple[int, int] | None = field(default=None, compare=False)


def find_smallest_side(widths: np.ndarray, heights: np.ndarray) -> int:
    """Of all images whose size is known, in pixels; 65535 where none is."""
    sides = np.minimum(widths, heights)
    return int(np.where(sides > 0, sides, 65535).min(initial=65535))


def make_index(kind: int, part_bytes: int, part_crc32: int, rows: list[tuple[int, int, int, int]]) -> Index:
    """The index of rows given as (offset, length, width, height)."""
    table = np.array(rows, dtype=np.uint64).reshape(-1, 4)
    table[:, 2:] = table[:, 2:].clip(max=65535)
    columns = [table[:, i].astype(dtype) for i, dtype in enumerate(_DTYPES)]
    return Index(kind, part_bytes, part_crc32, *columns)


def write_index(path, index: Index) -> None:
    """Write the index file, atomically. Raises OSError."""
    arrays = b"".join(a.tobytes() for a in (index.offsets, index.lengths, index.widths, index.heights))
    fields = (_MAGIC, _VERSION, index.kind, len(index.offsets), index.part_bytes, index.part_crc32, zlib.crc32(arrays))
    header = _HEADER.pack(*fields, 1 + find_smallest_side(index.widths, index.heights), 0)[:-4]
    with atomic_write(path) as file:
        file.write(header + struct.pack("<I", zlib.crc32(header)) + arrays)


class Misfit(Exception):
    """Why an index, or what else describes a part, cannot serve."""


@cache
def _say_unused(path, reason: str) -> None:
    """Once in a process: an index is asked for its summary, then for its rows, and each time by more than one."""
    get_logger().warning("index %s is not used: %s", path, reason)


def read_index(
    path, part_bytes: int, kinds: tuple[int, ...], only_header: bool = False
) -> "Index | IndexSummary | None":
    """The index file, read whole, so that what was checked is what is used; or what only its header tells. None where
    it is not there or, with a line in the log, does not fit a part of that many bytes."""
    try:
        with open(path, "rb") as file:
            index_bytes, header = os.fstat(file.fileno()).st_size, file.read(_HEADER.size)
            kind, rows, part_crc32, arrays_crc32, smallest_side = _check_header(header, index_bytes, part_bytes, kinds)
            if only_header:
                return IndexSummary(rows, smallest_side, (part_bytes, part_crc32))
            data = file.read()
        if zlib.crc32(data) != arrays_crc32:
            raise Misfit("it is damaged (checksum)")
    except FileNotFoundError:
        return None
    except (Misfit, OSError) as error:
        is_read = isinstance(error, Misfit)
        _say_unused(path, str(error) if is_read else f"it cannot be read ({error.strerror or error})")
        return None
    columns, start = [], 0
    for dtype in map(np.dtype, _DTYPES):
        columns.append(np.frombuffer(data, dtype, rows, start))
        start += rows * dtype.itemsize
    return Index(kind, part_bytes, part_crc32, *columns)


def _check_header(
    header: bytes, index_bytes: int, part_bytes: int, kinds: tuple[int, ...]
) -> tuple[int, int, int, int, int | None]:
    """(kind, rows, part's CRC-32, arrays' CRC-32, smallest side) of a header that fits."""
    if len(header) < _HEADER.size:
        raise Misfit("it is cut short")
    magic, version, kind, rows, stated_bytes, part_crc32, arrays_crc32, side, header_crc32 = _HEADER.unpack(header)
    if magic != _MAGIC or zlib.crc32(header[:-4]) != header_crc32:
        raise Misfit("it is damaged, or not an index")
    if version != _VERSION:
        raise Misfit(f"its format is version {version}, not {_VERSION}")
    if kind not in kinds:
        raise Misfit("it was made for another format")
    if stated_bytes != part_bytes:
        raise Misfit(f"it is stale (made for a part of {stated_bytes} bytes, not {part_bytes})")
    if index_bytes != _HEADER.size + rows * _BYTES_PER_ROW:
        raise Misfit("it is cut short or too long")
    return kind, rows, part_crc32, arrays_crc32, side - 1 if side else None


@dataclass(frozen=True)
class IndexSpec:
    """One way to read a file. `kinds`: of indexes that serve it. With a `copy_suffix` the rows lie in a list apart."""

    kinds: tuple[int, ...]
    index_suffix: str = ".idx"
    copy_suffix: str = ""

    def of_layout(self, layout: str) -> "IndexSpec":
        """The same for a layout: each but the default has its own."""
        if layout == DEFAULT_LAYOUT:
            return self
        copy_suffix = self.copy_suffix and f".{layout}{self.copy_suffix}"
        return replace(self, index_suffix=f".{layout}{self.index_suffix}", copy_suffix=copy_suffix)

    def index_path(self, path: Path) -> Path:
        """The index beside a file."""
        return path.with_name(path.name + self.index_suffix)

    def cached_index_path(self, path: Path) -> Path:
        """The index of a file whose folder cannot be written."""
        return cache_dir() / f"{_cache_key(path)}-{path.name}{self.index_suffix}"

    def copy_path(self, path: Path, status: os.stat_result) -> Path:
        """The list of a folder's rows; another one for each state of the folder."""
        return cache_dir() / f"{_cache_key(path)}-{status.st_size}-{status.st_mtime_ns}-{path.name}{self.copy_suffix}"


COLUMNS = IndexSpec((), ".columns")  # of captions and metadata (`select.columns`)


def _cache_key(path: Path) -> str:
    return hashlib.sha256(os.fsencode(os.path.abspath(path))).hexdigest()[:16]


def find_stored(path: Path, spec: IndexSpec, only_header: bool = False, older: bool = False):
    """(file that holds the rows, its index as `read_index` gives it) where a fitting index exists, else None. older: of
    those older than their file, one that its checksum confirms, which is stored anew. Copied files have times in any
    order; a file that was replaced has another checksum. Raises PartError for a file that is missing or empty."""
    for file, index, file_bytes, is_older in _candidates(path, spec):
        if is_older != older or (found := read_index(index, file_bytes, spec.kinds, only_header)) is None:
            continue
        if not older:
            return file, found
        if found.part_crc32 == measure_file(file)[1]:
            store_index(file, spec, found)
            return file, found
        get_logger().warning("index %s is not used: its part has changed since", index)
    return None


def open_index(path: Path, spec: IndexSpec, build: Callable):
    """(file of the rows, its index): found, or made by `build` in one process while others wait. Raises PartError."""
    if found := find_stored(path, spec):
        return found
    target = spec.index_path(path)  # which is built where nobody holds it
    if spec.copy_suffix or not os.access(path.parent, os.W_OK):
        target = spec.cached_index_path(path)
        make_output_dir(target.parent)
    with build_lock(target):
        return find_stored(path, spec) or find_stored(path, spec, older=True) or build()


def stat_part(path: Path, spec: IndexSpec) -> os.stat_result:
    """The state of a file of rows, or of a folder. Raises PartError for what cannot hold rows of that kind."""
    if in_store(path) and not path.exists():
        # Of no age: the first that opens it brings it, and then its index is older and its checksum compared.
        return os.stat_result((stat.S_IFREG, *(0,) * 5, size_of(path), *(0,) * 3), {"st_mtime_ns": 0})
    try:
        status = path.stat()
    except OSError as error:
        raise PartError(f"cannot read part file {path}: {error.strerror}; correct its line in the filelist") from error
    if stat.S_ISREG(status.st_mode) and status.st_size == 0:
        raise PartError(f"part file {path} is empty (0 bytes); get it again or delete its line in the filelist")
    if not spec.copy_suffix and not stat.S_ISREG(status.st_mode):
        raise PartError(
            f"{path} is not a part file but a folder or device; correct its line in the filelist, or say format=folder "
            "in a list of filelists"
        )
    return status


def store_index(path: Path, spec: IndexSpec, index: Index) -> None:
    """Write the index of `path` beside it or into the cache folder. Raises OutputError."""
    target = spec.index_path(path)
    try:
        write_index(target, index)
    except OSError as error:
        if error.errno not in READ_ONLY:
            raise OutputError(f"cannot write {target}: {error.strerror}; free some space") from error
        target = spec.cached_index_path(path)
        get_logger().info("%s cannot be written; the index of %s goes into %s", path.parent, path.name, target)
        make_output_dir(target.parent)
        write_index(target, index)
    changed = path.stat().st_mtime_ns
    if target.stat().st_mtime_ns < changed:  # by another machine's clock
        os.utime(target, ns=(changed, changed))


def _candidates(path: Path, spec: IndexSpec) -> Iterator[tuple[Path, Path, int, bool]]:
    """(file with the rows, its index, bytes of the former, whether the index is older) of all that there are. Of 60,000
    parts each costs what is done up to its first candidate, so that the others' names are made after it."""
    status, places = stat_part(path, spec), [spec.index_path, spec.cached_index_path]
    if spec.copy_suffix:
        path, places = spec.copy_path(path, status), [spec.index_path]
        if not path.exists():
            return
        status = os.stat(path)
    for place in places:
        index = place(path)
        try:
            index_status = os.stat(index)
        except FileNotFoundError:
            if not (in_store(index) and bring_beside(index)):
                continue
            os.utime(index, ns=(0, 0))
            index_status = os.stat(index)
        except OSError as error:
            _say_unused(index, f"it cannot be read ({error.strerror or error})")
            continue
        yield path, index, status.st_size, index_status.st_mtime_ns < status.st_mtime_ns


@contextmanager
def build_lock(target: Path):
    """Wait for the right to build `target`, and hold it. Without effect where no file can be made and locked there."""
    lock = target.with_name(target.name + ".lock")
    number = _acquire(lock)
    try:
        yield
    finally:
        if number is not None:
            lock.unlink(missing_ok=True)
            os.close(number)


def _acquire(lock: Path) -> int | None:
    """The open file of a lock that is held from now on; None where there cannot be one."""
    with suppress(OSError):
        while True:
            with ExitStack() as stack:
                number = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
                stack.callback(os.close, number)
                try:
                    fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    get_logger().info("waiting for another process, which is making %s", lock.with_suffix(""))
                    fcntl.flock(number, fcntl.LOCK_EX)
                with suppress(FileNotFoundError):  # its owner has removed it
                    if os.path.samestat(os.fstat(number), os.stat(lock)):
                        stack.pop_all()
                        return number
    return None

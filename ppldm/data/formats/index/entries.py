"""The index file of a part: where each row is and how large its image.

Little endian: a header (`_HEADER`), then for n rows offset u64[n], length u32[n], width u16[n], height u16[n]. An index
names the byte size of its part and carries checksums of its own two pieces: one that does not fit is never used.
"""

import os
import struct
import zlib
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from ....utils.files import atomic_write
from ....utils.log import get_logger

GZIP_MEMBERS, PLAIN_LINES, TAR_SAMPLES, CSV_RECORDS, FILE_NAMES = range(5)
# 6 and 10: lines of a copy; another form takes another number. 5, 7 and 9: parquet files, as they were read before.
PACKED_LINES, MDS_SAMPLES, PARQUET_LINES = 6, 8, 10

_MAGIC, _VERSION = b"PPLDMIDX", 1
# magic, version, kind, rows, part's bytes, part's CRC-32, CRC-32 of the arrays, 1 + smallest side or 0 where it is not
# said, CRC-32 of this header
_HEADER = struct.Struct("<8sIIQQIIII")
_DTYPES = ("<u8", "<u4", "<u2", "<u2")
_BYTES_PER_ROW = 16


@dataclass(frozen=True)
class Index:
    """Row i is bytes [offsets[i], offsets[i] + lengths[i]) of the part.

    `kind`: what those bytes are (docs/data.md). `widths`, `heights`: pixels as shown (after EXIF rotation),
    0 where unknown, 65535 where more. Arrays of shape [rows].
    """

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


def read_index(path, part_bytes: int, kinds: tuple[int, ...]) -> Index | None:
    """The index file, read whole, so that what was checked is what is used. None, with a line in the log, where it is
    of no such kind or does not fit a part of that many bytes."""
    return log_misfit(_read_index, path, part_bytes, kinds)


def read_summary(path, part_bytes: int, kinds: tuple[int, ...]) -> IndexSummary | None:
    """What only the header tells; None as `read_index`."""
    return log_misfit(_read_summary, path, part_bytes, kinds)


class Misfit(Exception):
    """Why an index, or what else describes a part, cannot serve."""


def log_misfit(read, path, part_bytes: int, kinds: tuple[int, ...]):
    """`read` of a file; None where it is not there or, with a line in the log, does not fit."""
    try:
        return read(path, part_bytes, kinds)
    except FileNotFoundError:
        return None
    except Misfit as error:
        say_unused(path, str(error))
        return None
    except OSError as error:
        say_unused(path, f"it cannot be read ({error.strerror or error})")
        return None


@cache
def say_unused(path, reason: str) -> None:
    """Once in a process: an index is asked for its summary, then for its rows, and each time by more than one."""
    get_logger().warning("index %s is not used: %s", path, reason)


def _read_index(path, part_bytes: int, kinds: tuple[int, ...]) -> Index:
    with open(path, "rb") as file:
        data = np.frombuffer(file.read(), dtype=np.uint8)
    kind, rows, part_crc32, arrays_crc32, _ = _check_header(bytes(data[: _HEADER.size]), len(data), part_bytes, kinds)
    if zlib.crc32(data[_HEADER.size :]) != arrays_crc32:
        raise Misfit("it is damaged (checksum)")
    columns, start = [], _HEADER.size
    for dtype in map(np.dtype, _DTYPES):
        stop = start + rows * dtype.itemsize
        columns.append(data[start:stop].view(dtype))
        start = stop
    return Index(kind, part_bytes, part_crc32, *columns)


def _read_summary(path, part_bytes: int, kinds: tuple[int, ...]) -> IndexSummary:
    with open(path, "rb") as file:
        index_bytes = os.fstat(file.fileno()).st_size
        _, rows, part_crc32, _, smallest_side = _check_header(file.read(_HEADER.size), index_bytes, part_bytes, kinds)
    return IndexSummary(rows, smallest_side, (part_bytes, part_crc32))


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

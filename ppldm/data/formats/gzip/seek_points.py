"""Places at which ordinary gzip can be entered, so that one row of many in a member costs about what one row costs.

A point stands at the symbol that begins a line. To decode from there takes the Huffman codes of the block, the bits
from there on, and those bytes of the 32 KiB before that are referred to: for base64 of pictures a few hundred. So a
line has a point of its own, as long as all points together stay under a tenth of the part; else it shares the one
before it.

The file `<part>.points`, little endian: a header (`_HEADER`); for n points text i64[n], byte i64[n], end i64[n],
crc32 u32[n]; for m rows crc32 u32[m]; then n records. Point i begins at byte text[i] of the text and byte[i] of the
part; record i ends at end[i] of the records. A record is `_RECORD`, a prefix, and for each byte that is needed of the
window before the point its place u16, then all their values; or the whole window, where that is shorter. Prefix and
bytes of the part make a raw deflate stream: the prefix holds the header of the block, after as many bits of empty
blocks as bring the bits that follow to their place in a byte. Rows are the same in all layouts.
"""

import os
import struct
import zlib
from dataclasses import dataclass

import numpy as np
from isal import isal_zlib

from ....utils.errors import PartError, RowError
from ....utils.files import atomic_write
from ..index.entries import Misfit
from ..open_file import OpenFile, unreadable
from .decoder_state import (
    DYNAMIC,
    FINAL,
    FIXED,
    HEADER_START,
    HEADER_STOP,
    MAX_SYMBOL_BYTES,
    REMAINING,
    STORED,
    WINDOW_BYTES,
    State,
)

MAX_SHARE = 0.1
# A point may stand at a symbol that begins before its line, by so many symbols at most, of 6 bytes each at most.
_SLACK_BYTES = 6 * MAX_SYMBOL_BYTES

_MAGIC, _VERSION = b"PPLDMPTS", 1
# magic, version, points, rows, bytes of the text, of the part, CRC-32 of the part, of the arrays, of this header
_HEADER = struct.Struct("<8sIQQQQIII")
_ARRAYS = ("<i8", "<i8", "<i8", "<u4")
_RECORD = struct.Struct("<HHI")  # bytes of the prefix, needed bytes or 0 for all, bytes of the window
_POINT_BYTES = 28 + _RECORD.size


@dataclass(frozen=True)
class SeekPoints:
    """The points of a part. `texts`, `starts`, `ends`: int64 [points]; `crc32s`: uint32 [points]; `row_crc32s`: uint32
    [rows]; `records`: where they begin in the file."""

    part_bytes: int
    part_crc32: int
    text_bytes: int
    texts: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    crc32s: np.ndarray
    row_crc32s: np.ndarray
    records: int

    def read(
        self, part: OpenFile, points: OpenFile, start: int, stop: int, where: str, limit: int | None = None
    ) -> bytes:
        """The text from byte `start` to `stop`, or its first `limit` bytes and maybe fewer, of the part and
        the file of its points. Raises RowError "gzip" for a damaged part, PartError for damaged points."""
        number = int(self.texts.searchsorted(start, side="right")) - 1
        after = max(number + 1, int(self.texts.searchsorted(stop - MAX_SYMBOL_BYTES)))
        first = int(self.starts[number])
        length = (int(self.starts[after]) + _SLACK_BYTES if after < len(self.starts) else self.part_bytes) - first
        skip = start - int(self.texts[number])
        if limit is not None:
            stop, length = min(stop, start + limit), min(length, skip + limit)
        prefix, window = self._read_record(points, number, where)
        stream = prefix + part.read(first, length, where)
        try:
            text = _inflate(stream, window, skip + stop - start)
        except (isal_zlib.error, zlib.error, EOFError) as error:
            if limit is not None and isinstance(error, EOFError):
                return error.args[0][skip:]
            raise RowError("gzip", f"{where}: damaged gzip data ({_say(error)}); get the part again") from error
        return text[skip:] if skip else text

    def _read_record(self, points: OpenFile, number: int, where: str) -> tuple[bytes, bytes]:
        begin, end = int(self.ends[number - 1]) if number else 0, int(self.ends[number])
        try:  # with a checksum of its own, and replaced by the same where a part is indexed twice
            record = os.pread(points.number, end - begin, self.records + begin)
        except OSError as error:
            raise unreadable(where, error) from error
        if zlib.crc32(record) != self.crc32s[number]:
            raise PartError(f"{where}: the seek points of the part were changed or damaged; run again")
        return unpack_record(record)


def _say(error: Exception) -> str:
    return "it ends too early" if isinstance(error, EOFError) else str(error)


def _inflate(stream: bytes, window: bytes, length: int) -> bytes:
    """The first `length` bytes of a raw stream and of the members that follow it. Raises EOFError with what there is
    where there are fewer, isal_zlib.error."""
    inflate = isal_zlib.decompressobj(-15, zdict=window)
    text = inflate.decompress(stream, length) if length else b""
    trailer = 8
    while len(text) < length:
        stream = inflate.unused_data[trailer:].lstrip(b"\0")
        if not inflate.eof or not stream:
            raise EOFError(text)
        inflate, trailer = isal_zlib.decompressobj(31), 0
        text += inflate.decompress(stream, length - len(text))
    return text


def read_points(path, part_bytes: int, kinds: tuple[int, ...] = ()) -> SeekPoints:
    """The points in a file, but for their records. Raises Misfit where they are not those of a part of so many bytes,
    OSError."""
    with open(path, "rb") as file:
        header = file.read(_HEADER.size)
        if len(header) < _HEADER.size or zlib.crc32(header[:-4]) != struct.unpack("<I", header[-4:])[0]:
            raise Misfit("it is damaged")
        magic, version, points, rows, text_bytes, stated, crc32, arrays_crc32, _ = _HEADER.unpack(header)
        if (magic, version, stated) != (_MAGIC, _VERSION, part_bytes):
            raise Misfit("it was made for another part or in another format")
        sizes = [*(points * np.dtype(dtype).itemsize for dtype in _ARRAYS), 4 * rows]
        data = file.read(sum(sizes))
        if len(data) != sum(sizes) or zlib.crc32(data) != arrays_crc32:
            raise Misfit("it is damaged (checksum)")
        bounds = np.cumsum([0, *sizes])
        arrays = [
            np.frombuffer(data[start:stop], dtype)
            for dtype, start, stop in zip((*_ARRAYS, "<u4"), bounds[:-1], bounds[1:], strict=True)
        ]
        records = _HEADER.size + len(data)
        if os.fstat(file.fileno()).st_size != records + (int(arrays[2][-1]) if points else 0):
            raise Misfit("it is cut short or too long")
    return SeekPoints(part_bytes, crc32, text_bytes, *arrays, records)  # type: ignore[call-arg]


class PointsBuilder:
    """Collects points while a part is decoded. `wants` says whether a line gets one; `begin` and `finish` each."""

    def __init__(self):
        self._points, self._records, self._row_crc32s = [], [], []
        self._spent = self._last_cost = 0
        self._open = None

    def add_row(self, line: bytes) -> None:
        """A line that is a row, as it is in the part."""
        self._row_crc32s.append(isal_zlib.crc32(line))

    def wants(self, part_bytes: int) -> bool:
        """Whether there is room for one more point after so many bytes of the part."""
        spent = self._spent + 4 * len(self._row_crc32s)
        return self._open is None or spent + self._last_cost + _POINT_BYTES <= MAX_SHARE * part_bytes

    def begin(self, text: int, start: int, prefix: bytes, window: bytes, needed: np.ndarray) -> None:
        """A point at byte `text` of the text, whose bits go on at byte `start` of the part. window: the text before it,
        up to 32 KiB. needed: of the point before it, as `State` has it; cleared."""
        self._finish(needed)
        self._open = text, start, prefix, np.frombuffer(window, np.uint8)

    def _finish(self, needed: np.ndarray) -> None:
        if self._open is None:
            return
        text, start, prefix, window = self._open
        record = pack_record(prefix, window, needed)
        needed[:] = 0
        self._points.append((text, start, zlib.crc32(record)))
        self._records.append(record)
        self._last_cost = len(record) + _POINT_BYTES - _RECORD.size
        self._spent += self._last_cost

    def write(self, path, needed: np.ndarray, text_bytes: int, part_bytes: int, part_crc32: int) -> None:
        """Write the file of all points, atomically. Raises OSError."""
        self._finish(needed)
        self._open = None
        texts, starts, crc32s = zip(*self._points, strict=True)
        ends = np.cumsum([len(record) for record in self._records])
        arrays = [np.array(a, dtype) for a, dtype in zip((texts, starts, ends, crc32s), _ARRAYS, strict=True)]
        arrays.append(np.array(self._row_crc32s, "<u4"))
        data = b"".join(array.tobytes() for array in arrays)
        counts = len(texts), len(self._row_crc32s)
        header = _HEADER.pack(_MAGIC, _VERSION, *counts, text_bytes, part_bytes, part_crc32, zlib.crc32(data), 0)[:-4]
        with atomic_write(path) as file:
            file.write(header + struct.pack("<I", zlib.crc32(header)) + data)
            file.writelines(self._records)


def pack_record(prefix: bytes, window: np.ndarray, needed: np.ndarray) -> bytes:
    """A record. needed: uint8 [32768], [d] set where the byte d + 1 before the point is needed."""
    distances = np.flatnonzero(needed)
    span = int(distances[-1]) + 1 if len(distances) else 0
    window = window[len(window) - span :]
    places = span - 1 - distances
    if 3 * len(places) >= span:  # then the whole window is shorter
        return _RECORD.pack(len(prefix), 0, span) + prefix + window.tobytes()
    head = _RECORD.pack(len(prefix), len(places), span)
    return b"".join((head, prefix, places.astype("<u2").tobytes(), window[places].tobytes()))


def unpack_record(record: bytes) -> tuple[bytes, bytes]:
    """(prefix, window of 32 KiB) of a record; what is not needed of the window is zero or the text."""
    prefix_bytes, count, span = _RECORD.unpack_from(record)
    start = _RECORD.size + prefix_bytes
    prefix = record[_RECORD.size : start]
    # Whole windows, since the library decodes ahead and refuses what refers to more than it was given.
    if not count:
        return prefix, bytes(WINDOW_BYTES - span) + record[start:]
    window = np.zeros(WINDOW_BYTES, np.uint8)
    places = np.frombuffer(record, "<u2", count, start)
    window[WINDOW_BYTES - span :][places] = np.frombuffer(record, np.uint8, count, start + 2 * count)
    return prefix, window.tobytes()


def make_prefix(state: State, kind: int, bit: int, byte: int) -> bytes:
    """What comes before the bits from `bit` on of the part, within a block of this kind. byte: the one with that bit.

    The header of the block, moved so that it ends where `bit` stands in its byte, and the rest of that byte.
    """
    if kind == STORED:
        length = int(state.numbers[REMAINING])
        return struct.pack("<BHH", int(state.numbers[FINAL]), length, length ^ 0xFFFF)
    bits = num_bits = 0
    if kind in (FIXED, DYNAMIC):
        start, stop = int(state.numbers[HEADER_START]), int(state.numbers[HEADER_STOP])
        num_bits = stop - start
        bits = int.from_bytes(state.header.tobytes(), "little") >> (start & 7) & (1 << num_bits) - 1
    filler, num_filler = _FILLERS[(bit - num_bits) % 8]
    bits, num_bits = filler | bits << num_filler, num_filler + num_bits
    if bit % 8:
        bits |= byte >> bit % 8 << num_bits
    return bits.to_bytes(-(-num_bits // 8), "little")


def _pack_bits(*fields: tuple[int, int]) -> tuple[int, int]:
    """(bits, how many) of fields (value, bits), each from its lowest bit on."""
    bits = num_bits = 0
    for value, count in fields:
        bits, num_bits = bits | value << num_bits, num_bits + count
    return bits, num_bits


def _make_fillers() -> list[tuple[int, int]]:
    """Empty blocks that are, modulo 8, 0 to 7 bits long, as (bits, how many)."""
    fixed = _pack_bits((0b010, 3), (0, 7))  # 10 bits, so that these make all even numbers
    # Codes of 1 bit for the bytes 0 and the end of the block; one for the distance 1. Of the code lengths 1 and 18 have
    # codes of 1 bit: 1, 138 zeros, 117 zeros, 1, 1.
    codes = [
        (1 if symbol in (18, 1) else 0, 3) for symbol in (16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1)
    ]
    lengths = [(0, 1), (1, 1), (127, 7), (1, 1), (106, 7), (0, 1), (0, 1)]
    odd = _pack_bits((0b100, 3), (0, 5), (0, 5), (14, 4), *codes, *lengths, (1, 1))
    fillers = {}
    for first in ((0, 0), odd):
        for count in range(4):
            filler = _pack_bits(first, *[fixed] * count)
            fillers[filler[1] % 8] = filler
    return [fillers[place] for place in range(8)]


_FILLERS = _make_fillers()

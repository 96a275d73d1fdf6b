"""The lines of ordinary gzip, many to a member, with the seek points that lead back to them."""

import zlib
from collections.abc import Iterator

import numpy as np

from .decoder_state import (
    BASE,
    BITS,
    BLOCK,
    INPUT,
    LAST_BIT,
    LAST_DISTANCE,
    LAST_LENGTH,
    LAST_OUT,
    LINE,
    MAX_SYMBOL_BYTES,
    MEMBER_END,
    MEMBER_START,
    NUM_BITS,
    OUT,
    POS,
    ROOM,
    SEGMENT,
    WINDOW_BYTES,
    State,
)
from .seek_points import PointsBuilder, make_prefix

_INPUT_BYTES = 1 << 20
_OUTPUT_BYTES = 1 << 19
_FLAG_CHECKSUM, _FLAG_EXTRA, _FLAG_NAME, _FLAG_COMMENT = 2, 4, 8, 16


class DamagedStream(Exception):
    """The file is not gzip from here on, or ends too early."""


class PackedLines:
    """Reads a file of gzip once, line by line, and gives its rows to a PointsBuilder.

    `text_bytes`: of all lines so far.
    """

    def __init__(self):
        self.points, self.text_bytes = PointsBuilder(), 0
        self._state = State()
        self._data, self._size, self._at_end = np.zeros(_INPUT_BYTES, np.uint8), 0, False
        self._make_output(_OUTPUT_BYTES)
        self._line = self._checked = 0  # in the output: where the line begins; what is part of the checksum
        self._crc32 = self._member_bytes = 0

    def read(self, file, max_line_bytes: int) -> Iterator[tuple[int, int, bytes]]:
        """(offset in the text, length, line with its newline or without) of a file from its beginning.

        After a longer line, which may be cut, nothing follows. Raises DamagedStream, OSError.
        """
        from .deflate import decode

        self._file, numbers = file, self._state.numbers
        self._begin_member()
        self._begin_point(in_match=False)
        while True:
            searched = int(numbers[OUT])
            outcome = decode(self._state, self._data, self._size, self._at_end, self._out)
            if outcome == LINE:
                yield from self._cut_lines(searched)
            elif outcome == INPUT and not self._at_end:
                self._fill()
            elif outcome == ROOM:
                self._check()
                self._make_room()
            elif outcome == MEMBER_END:
                self._end_member()
                if not self._begin_member():
                    break
            else:
                raise DamagedStream
            if numbers[OUT] - self._line > max_line_bytes:
                break
        if numbers[OUT] > self._line:
            yield from self._cut(int(numbers[OUT]))

    def write_points(self, path, part_bytes: int, part_crc32: int) -> None:
        """Write the seek points of the whole part. Raises OSError."""
        self.points.write(path, self._state.needed, self.text_bytes, part_bytes, part_crc32)

    def _cut_lines(self, searched: int) -> Iterator[tuple[int, int, bytes]]:
        end = int(self._state.numbers[OUT])
        while (newline := self._buffer.find(b"\n", searched, end)) >= 0:
            yield from self._cut(newline + 1)
            searched = newline + 1
        if self.points.wants(int(self._state.numbers[BASE] + self._state.numbers[POS])):
            self._begin_point(in_match=self._line < end)

    def _cut(self, end: int) -> Iterator[tuple[int, int, bytes]]:
        line = bytes(memoryview(self._buffer)[self._line : end])
        offset = self.text_bytes
        self._line, self.text_bytes = end, self.text_bytes + len(line)
        if line.strip():
            self.points.add_row(line)
        yield offset, len(line), line

    def _begin_point(self, in_match: bool) -> None:
        """A point at the line that begins now: at the next symbol, or at the last where that wrote its first bytes."""
        numbers, needed = self._state.numbers, self._state.needed
        place = int(numbers[LAST_OUT] if in_match else numbers[OUT])
        bit = int(numbers[LAST_BIT] if in_match else 8 * (numbers[BASE] + numbers[POS]) - numbers[NUM_BITS])
        byte = int(self._data[(bit >> 3) - numbers[BASE]]) if bit % 8 else 0
        kind = int(numbers[BLOCK])
        text = self.text_bytes - (self._line - place)
        window = bytes(memoryview(self._buffer)[max(0, place - WINDOW_BYTES) : place])
        self.points.begin(text, -(-bit // 8), make_prefix(self._state, kind, bit, byte), window, needed)
        numbers[SEGMENT] = place
        if in_match:
            distance, length = int(numbers[LAST_DISTANCE]), int(numbers[LAST_LENGTH])
            needed[max(0, distance - length) : distance] = 1

    def _make_output(self, size: int) -> None:
        self._buffer = bytearray(size)
        self._out = np.frombuffer(self._buffer, np.uint8)

    def _make_room(self) -> None:
        """Forget what neither the line nor a reference needs any more; double the room where the line is long."""
        numbers = self._state.numbers
        end = int(numbers[OUT])
        start = max(0, min(self._line, end - WINDOW_BYTES))
        kept = bytes(memoryview(self._buffer)[start:end])
        if 2 * len(kept) + MAX_SYMBOL_BYTES > len(self._buffer):
            self._make_output(2 * len(self._buffer))
        self._buffer[: len(kept)] = kept
        for place in (OUT, SEGMENT, MEMBER_START, LAST_OUT):
            numbers[place] -= start
        self._line -= start
        self._checked -= start

    def _fill(self, least: int = 0) -> bool:
        """Read on; whether there are at least `least` bytes then."""
        numbers = self._state.numbers
        used = int(numbers[POS]) - 8  # the last bytes may be wanted for a prefix
        if used > 0:
            self._data[: self._size - used] = self._data[used : self._size].copy()
            self._size -= used
            numbers[POS] -= used
            numbers[BASE] += used
        while not self._at_end and self._size < len(self._data):
            read = self._file.read(len(self._data) - self._size)
            self._at_end = not read
            self._data[self._size : self._size + len(read)] = np.frombuffer(read, np.uint8)
            self._size += len(read)
        return self._size - numbers[POS] >= least

    def _take(self, count: int) -> bytes:
        position = int(self._state.numbers[POS])
        if self._size - position < count and not self._fill(count):
            raise DamagedStream
        position = int(self._state.numbers[POS])
        self._state.numbers[POS] += count
        return self._data[position : position + count].tobytes()

    def _begin_member(self) -> bool:
        """Read the header of a member; False where the file ends, but for zeros."""
        numbers = self._state.numbers
        while self._size > numbers[POS] or self._fill(1):
            if self._data[numbers[POS]]:
                break
            numbers[POS] += 1
        else:
            return False
        magic, method, flags = self._take(2), *self._take(2)
        if magic != b"\x1f\x8b" or method != 8:
            raise DamagedStream
        self._take(6)
        if flags & _FLAG_EXTRA:
            self._take(int.from_bytes(self._take(2), "little"))
        for flag in (_FLAG_NAME, _FLAG_COMMENT):
            while flags & flag and self._take(1) != b"\0":
                pass
        if flags & _FLAG_CHECKSUM:
            self._take(2)
        numbers[MEMBER_START] = numbers[OUT]
        self._checked, self._crc32, self._member_bytes = int(numbers[OUT]), 0, 0
        return True

    def _check(self) -> None:
        end = int(self._state.numbers[OUT])
        self._crc32 = zlib.crc32(memoryview(self._buffer)[self._checked : end], self._crc32)
        self._member_bytes += end - self._checked
        self._checked = end

    def _end_member(self) -> None:
        numbers = self._state.numbers
        numbers[POS] -= numbers[NUM_BITS] >> 3
        numbers[NUM_BITS] = numbers[BITS] = 0
        self._check()
        stated = self._take(8)
        if stated != self._crc32.to_bytes(4, "little") + (self._member_bytes & 0xFFFFFFFF).to_bytes(4, "little"):
            raise DamagedStream

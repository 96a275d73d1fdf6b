"""Parts of snappy data, decoded without what comes before them.

Every compressor of snappy cuts its input into blocks of 64 KiB that do not refer to one another. The format does not
say so, so each is looked at. What begins with a block, after its length, is snappy data itself. Finding the blocks
takes a look at every element, of which data that hardly compress, such as pictures, have few.
Format: github.com/google/snappy, format_description.txt.
"""

from collections.abc import Callable
from dataclasses import dataclass

BLOCK_BYTES = 1 << 16
_MAX_ELEMENTS = 256  # of a block, on average: with more the search costs more than it saves


@dataclass(frozen=True)
class SnappyBlocks:
    """Block i begins at byte starts[i] of the data; the last number is where they end. num_bytes: of all, decoded."""

    starts: tuple[int, ...]
    num_bytes: int

    def read(self, start: int, stop: int, read: Callable[[int, int], bytes]) -> bytes:
        """Bytes [start, stop) of what the data hold. read: (offset, length) of them. Raises pyarrow's errors."""
        import pyarrow as pa

        if start == stop:
            return b""
        first, after = start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)
        begin = first * BLOCK_BYTES
        length = min(after * BLOCK_BYTES, self.num_bytes) - begin
        data = _varint(length) + read(self.starts[first], self.starts[after] - self.starts[first])
        text = pa.Codec("snappy").decompress(data, length)
        return text.slice(start - begin, stop - start).to_pybytes()


def find_blocks(data: bytes, num_bytes: int) -> SnappyBlocks | None:
    """The blocks of snappy data that hold `num_bytes`; None where they refer to one another or have many elements.
    Raises IndexError for damaged data."""
    at = 0
    while data[at] > 127:
        at += 1
    at += 1
    starts, place = [], 0
    for _ in range(_MAX_ELEMENTS * (1 + num_bytes // BLOCK_BYTES)):
        if place == num_bytes:
            return SnappyBlocks((*starts, len(data)), num_bytes) if at == len(data) else None
        if place == BLOCK_BYTES * len(starts):
            starts.append(at)
        tag = data[at]
        if tag & 3 == 0:  # a literal
            length, extra = (tag >> 2) + 1, 0
            if length > 60:
                extra = length - 60
                length = int.from_bytes(data[at + 1 : at + 1 + extra], "little") + 1
            at += 1 + extra + length
        else:  # a copy of what is `distance` bytes before
            length, distance, size = _read_copy(data, at, tag)
            if distance > place - BLOCK_BYTES * (len(starts) - 1):
                return None
            at += size
        place += length
        if place > BLOCK_BYTES * len(starts):
            return None
    return None


def _read_copy(data: bytes, at: int, tag: int) -> tuple[int, int, int]:
    """(its length, how far back it lies, bytes of the element)."""
    if tag & 3 == 1:
        return 4 + (tag >> 2 & 7), (tag >> 5) << 8 | data[at + 1], 2
    size = 2 if tag & 3 == 2 else 4
    return (tag >> 2) + 1, int.from_bytes(data[at + 1 : at + 1 + size], "little"), 1 + size


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes((*out, value))

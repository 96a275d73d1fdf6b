"""Where the values of one binary column lie in a parquet file, so that a value is read without its row group.

A column chunk is a run of pages, each with a header (Thrift's compact protocol) and a body. A body holds definition
levels, which say what is null, and values: PLAIN, each with its length before it, or numbers of the values of the
chunk's dictionary page. So two numbers say where a value lies in a body. They are found when a row of the page is first
asked for, and kept; then a value of an uncompressed page is one read of its own bytes, one of a snappy page the
decoding of the blocks of 64 KiB that hold it, and one of any other page the decoding of the page.

Formats: github.com/apache/parquet-format, parquet.thrift, Encodings.md. Whatever else a chunk is made of is
`UnknownPages`; so is what is damaged: pyarrow, which reads such chunks, says how.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from ..open_file import OpenFile
from .byte_cache import ByteCache
from .snappy_blocks import SnappyBlocks, find_blocks

_DATA_PAGE, _DICTIONARY_PAGE, _DATA_PAGE_V2 = 0, 2, 3
_PLAIN, _PLAIN_DICTIONARY, _RLE, _RLE_DICTIONARY = 0, 2, 3, 8
# parquet's name -> pyarrow's; LZ4 is two different formats
_CODECS = {"UNCOMPRESSED": None, "SNAPPY": "snappy", "GZIP": "gzip", "ZSTD": "zstd", "BROTLI": "brotli"}
_HEADER_BYTES, _MAX_HEADER_BYTES = 1 << 8, 1 << 22
_MAX_DEPTH = 4  # of structs in a header
_PAGE_BYTES = 200  # of what is kept of a page's header, roughly
_NULL = -1

_PLACES = ByteCache(64 << 20)

_Read = Callable[[int, int], bytes]  # (offset in the file, length) -> bytes


class UnknownPages(Exception):
    """A column chunk that is not read here."""


@dataclass(frozen=True)
class Chunk:
    """The column's part of a row group: bytes [start, stop) of the file, one value a row. codec: as pyarrow names it in
    metadata. max_level: the definition level of what is not null."""

    start: int
    stop: int
    rows: int
    codec: str
    max_level: int


@dataclass(frozen=True)
class _Body:
    """Bytes [offset, offset + stored_bytes) of the file, which make `num_bytes`. codec: None where they are those."""

    offset: int
    stored_bytes: int
    num_bytes: int
    codec: str | None


@dataclass(frozen=True)
class _Page:
    """levels: of version 2, which has them before the body; None where they are in it."""

    num_values: int
    encoding: int
    body: _Body
    levels: tuple[int, int] | None = None


@dataclass(frozen=True)
class _Places:
    """Value i is bytes [starts[i], starts[i] + lengths[i]) of a body, null where lengths[i] is -1. int64 [values]."""

    body: _Body
    blocks: SnappyBlocks | None
    starts: np.ndarray
    lengths: np.ndarray


@dataclass
class _Pages:
    """The pages of a chunk. firsts: int64, the row that each data page begins with."""

    dictionary: _Page | None = None
    data: list[_Page] = field(default_factory=list)
    firsts: np.ndarray | None = None


class BinaryColumn:
    """The values of a column of binary strings, none of them repeated, by row group and row.

    cache: for pages that have to be decoded whole.
    """

    def __init__(self, file: OpenFile, chunks: list[Chunk], cache: ByteCache):
        self._file, self._chunks, self._cache = file, chunks, cache

    def read(self, group: int, row: int, where: str) -> bytes | None:
        """The value of a row of a group; None where it is null. Raises UnknownPages, PartError."""
        import pyarrow as pa

        def read_file(offset: int, length: int) -> bytes:
            return self._file.read(offset, length, where)

        try:
            pages = _PLACES.get((self, group), lambda: self._read_pages(group, read_file))
            page = int(pages.firsts.searchsorted(row, side="right")) - 1
            key = self, group, page
            places = _PLACES.get(key, lambda: self._find_places(group, pages, page, read_file))
            place = row - int(pages.firsts[page])
            start, length = int(places.starts[place]), int(places.lengths[place])
            return None if length == _NULL else self._read_value(places, start, length, read_file)
        except (pa.ArrowException, OSError, struct.error, ValueError, LookupError) as error:
            raise UnknownPages(str(error)) from error

    def close(self) -> None:
        """Give memory back."""
        _PLACES.drop(self)
        self._cache.drop(self)

    def _read_pages(self, group: int, read: _Read) -> tuple[_Pages, int]:
        pages = read_pages(self._chunks[group], read)
        return pages, _PAGE_BYTES * (1 + len(pages.data))

    def _find_places(self, group: int, pages: _Pages, number: int, read: _Read) -> tuple[_Places, int]:
        page, level = pages.data[number], self._chunks[group].max_level
        data = self._read_body(page.body, read)
        defined, start = _read_levels(page, data, level, read)
        starts, lengths = np.zeros(page.num_values, np.int64), np.full(page.num_values, _NULL, np.int64)
        if page.encoding == _PLAIN:
            starts[defined], lengths[defined] = _find_plain(data, start, int(defined.sum()))
            body, blocks = page.body, _blocks_of(page.body, data, read)
        elif page.encoding in (_PLAIN_DICTIONARY, _RLE_DICTIONARY) and pages.dictionary:
            words = _PLACES.get((self, group, _NULL), lambda: self._find_words(pages.dictionary, read))
            numbers = _decode_runs(data, start + 1, len(data), data[start], int(defined.sum())) if defined.any() else []
            starts[defined], lengths[defined] = words.starts[numbers], words.lengths[numbers]
            body, blocks = words.body, words.blocks
        else:
            raise UnknownPages(f"encoding {page.encoding}")
        return _Places(body, blocks, starts, lengths), starts.nbytes + lengths.nbytes + _PAGE_BYTES

    def _find_words(self, page: _Page, read: _Read) -> tuple[_Places, int]:
        if page.encoding not in (_PLAIN, _PLAIN_DICTIONARY):
            raise UnknownPages(f"encoding {page.encoding} of a dictionary")
        data = self._read_body(page.body, read)
        starts, lengths = _find_plain(data, 0, page.num_values)
        return _Places(page.body, _blocks_of(page.body, data, read), starts, lengths), 2 * starts.nbytes + _PAGE_BYTES

    def _read_value(self, places: _Places, start: int, length: int, read: _Read) -> bytes:
        body = places.body
        if body.codec is None:
            return read(body.offset + start, length)
        if places.blocks is not None:
            return places.blocks.read(start, start + length, lambda at, size: read(body.offset + at, size))
        return self._read_body(body, read)[start : start + length]

    def _read_body(self, body: _Body, read: _Read) -> bytes:
        if body.codec is None:
            return read(body.offset, body.stored_bytes)

        def decode():
            data = _decode(read(body.offset, body.stored_bytes), body)
            return data, len(data)

        # A page of snappy is seldom read whole more than once.
        return decode()[0] if body.codec == "snappy" else self._cache.get((self, body), decode)


def is_known(codec: str) -> bool:
    """Whether pages are read here that pyarrow's metadata call so compressed."""
    return codec in _CODECS


def read_pages(chunk: Chunk, read: _Read) -> _Pages:
    """The pages of a chunk, by their headers only. Raises UnknownPages, LookupError."""
    pages, offset, firsts = _Pages(), chunk.start, [0]
    while firsts[-1] < chunk.rows:
        header, num_bytes = _read_header(read, offset, chunk.stop)
        offset += num_bytes
        kind, num_bytes, stored_bytes = (_number(header, name) for name in (1, 2, 3))
        if offset + stored_bytes > chunk.stop:
            raise UnknownPages("a page beyond its chunk")
        body = _Body(offset, stored_bytes, num_bytes, _CODECS[chunk.codec])
        if kind == _DICTIONARY_PAGE:
            pages.dictionary = _page_of(header[7], 2, body)
        elif kind == _DATA_PAGE:
            pages.data.append(_page_of(header[5], 2, body))
            if chunk.max_level and _number(header[5], 3) != _RLE:
                raise UnknownPages("levels in an old encoding")
        elif kind == _DATA_PAGE_V2:
            pages.data.append(_page_of_version_2(header[8], body))
        if kind in (_DATA_PAGE, _DATA_PAGE_V2):
            firsts.append(firsts[-1] + pages.data[-1].num_values)
        offset += stored_bytes
    if firsts[-1] != chunk.rows:
        raise UnknownPages("pages with more values than rows")
    pages.firsts = np.array(firsts[:-1], np.int64)
    return pages


def _page_of(header, encoding: int, body: _Body) -> _Page:
    return _Page(_number(header, 1), _number(header, encoding), body)


def _page_of_version_2(header, body: _Body) -> _Page:
    length = _number(header, 5)
    if _number(header, 6) or length > min(body.stored_bytes, body.num_bytes):
        raise UnknownPages("repeated values")
    codec = body.codec if header.get(7, True) else None
    body_of_values = _Body(body.offset + length, body.stored_bytes - length, body.num_bytes - length, codec)
    return replace(_page_of(header, 4, body_of_values), levels=(body.offset, length))


def _number(header, name: int) -> int:
    """A number that is not negative, of a struct."""
    value = header.get(name) if isinstance(header, dict) else None
    if type(value) is not int or value < 0:
        raise UnknownPages("a damaged header")
    return value


def _decode(stored: bytes, body: _Body) -> bytes:
    import pyarrow as pa

    return pa.Codec(body.codec).decompress(stored, body.num_bytes, asbytes=True)


def _blocks_of(body: _Body, data: bytes, read: _Read) -> SnappyBlocks | None:
    return find_blocks(read(body.offset, body.stored_bytes), len(data)) if body.codec == "snappy" else None


def _read_levels(page: _Page, data: bytes, max_level: int, read: _Read) -> tuple[np.ndarray, int]:
    """(bool [values], whether each is there; where the values begin in the body)."""
    if not max_level:
        return np.ones(page.num_values, bool), 0
    if page.levels is not None:
        data, start, stop, values = read(*page.levels), 0, page.levels[1], 0
    else:
        start = 4
        values = stop = start + struct.unpack_from("<I", data)[0]
    levels = _decode_runs(data, start, stop, max_level.bit_length(), page.num_values)
    return levels == max_level, values


def _find_plain(data: bytes, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(where each of `count` values begins, its length), arrays int64 [count]."""
    if 4 * count > len(data):
        raise UnknownPages("more values than bytes")
    starts, lengths = np.zeros(count, np.int64), np.zeros(count, np.int64)
    unpack = struct.Struct("<I").unpack_from
    for number in range(count):
        (length,) = unpack(data, start)
        starts[number], lengths[number] = start + 4, length
        start += 4 + length
    if start > len(data):
        raise UnknownPages("a value beyond its page")
    return starts, lengths


def _decode_runs(data: bytes, at: int, stop: int, width: int, count: int) -> np.ndarray:
    """The first `count` numbers of `width` bits of runs, repeated or packed (RLE of Encodings.md), int64 [count]."""
    runs, found = [], 0
    while found < count:
        if at >= stop:
            raise UnknownPages("runs that end too early")
        header, at = _read_varint(data, at)
        if header & 1:
            size = (header >> 1) * width
            runs.append(_unpack(data[at : min(at + size, stop)], width, min(header >> 1, -(-(count - found) // 8))))
        else:
            size = -(-width // 8)
            value = int.from_bytes(data[at : at + size], "little")
            runs.append(np.full(min(header >> 1, count - found), value, np.int64))
        at += size
        found += len(runs[-1])
        if not len(runs[-1]):
            raise UnknownPages("an empty run")
    return np.concatenate(runs)[:count] if runs else np.zeros(0, np.int64)


def _unpack(packed: bytes, width: int, groups: int) -> np.ndarray:
    """Groups of 8 numbers of `width` bits, fewer where the data end before."""
    if not width:
        return np.zeros(8 * groups, np.int64)
    bits = np.unpackbits(np.frombuffer(packed[: groups * width], np.uint8), bitorder="little")
    bits = bits[: len(bits) // width * width].reshape(-1, width)
    return bits.astype(np.int64) @ (1 << np.arange(width, dtype=np.int64))


def _read_header(read: _Read, offset: int, stop: int) -> tuple[dict, int]:
    """(a page's header, its bytes). It can hold the least and the largest value of the page."""
    size = _HEADER_BYTES
    while True:
        data = read(offset, min(size, stop - offset))
        try:
            return _read_struct(data, 0)
        except IndexError:
            if size >= min(_MAX_HEADER_BYTES, stop - offset):
                raise
            size *= 8


def _read_struct(data: bytes, at: int, depth: int = 0) -> tuple[dict, int]:
    """(values by field number, where it ends) of a struct of Thrift's compact protocol. Raises IndexError where the
    data end before it, UnknownPages."""
    if depth > _MAX_DEPTH:
        raise UnknownPages("a damaged header")
    values, number = {}, 0
    while tag := data[at]:
        at += 1
        if tag >> 4:
            number += tag >> 4
        else:
            number, at = _read_zigzag(data, at)
        values[number], at = _read_field(data, at, tag & 15, depth)
    return values, at + 1


def _read_field(data: bytes, at: int, kind: int, depth: int):
    if kind in (1, 2):
        return kind == 1, at
    if kind == 3:
        return data[at], at + 1
    if kind in (4, 5, 6):
        return _read_zigzag(data, at)
    if kind == 8:
        length, at = _read_varint(data, at)
        if at + length > len(data):
            raise IndexError
        return None, at + length  # no string is used
    if kind == 12:
        return _read_struct(data, at, depth + 1)
    raise UnknownPages(f"type {kind} in a page's header")


def _read_zigzag(data: bytes, at: int) -> tuple[int, int]:
    value, at = _read_varint(data, at)
    return (value >> 1) ^ -(value & 1), at


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise UnknownPages("a number of more than 64 bits")

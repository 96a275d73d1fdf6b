"""The file of what a frozen network makes of a part: an array for each row and variant, or why there is none.

Latents (`cached.latents`) and embeddings of captions (`cached.embeddings`) are such files; what an array is, and how
many a row has, is said by key (`cached.key`) and header. In use:

    create_file(path, key, header, codes, sizes, texts)      with all rows missing
    file = CachedFile(path, key)                             writable=True to fill in what is missing
    file.read(row, variant)                                  float32; None where it is not computed yet; RowError as
                                                             what it was made from would have raised
    file.write(row, variant, array)                          returns it rounded, as every later `read` gives it

Little endian:

    magic, version, bytes of the header, CRC-32 of the header       _START
    header        JSON: key, what decides the shapes of arrays besides, rows, bytes of texts, CRC-32 of the five
                  sections that follow
    codes         u8 [rows]             by which the key knows shape and number of the row's arrays
    widths        u16 [rows]            pixels of the picture as shown, as the index of the part has them
    heights       u16 [rows]
    ends          u64 [rows]            where a row's texts end
    texts         for each row JSON of its captions, "\n", JSON of its metadata; nothing where it cannot be read
    states        u8 [rows, variants]   0 missing, 1 there, from 2 on why it cannot be used, 2 + number in REASONS
    checksums     u32 [rows, variants]  CRC-32 of the array; where it cannot be used, of the state
    arrays        for each row its arrays, one after another, in the dtype of the key

The first sections are written once, with the file, and checked when it is opened. Arrays are written in place, then
their checksum, then their state: a process that is killed leaves a row missing, never a wrong one, and several
processes of a machine may write other rows of one file. Sections begin at multiples of 64 bytes; what is missing takes
no space on file systems that know holes.
"""

import json
import math
import os
import struct
import weakref
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
from isal import isal_zlib

from ...utils.errors import PartError, RowError
from ...utils.files import atomic_write, naming_full_disk
from .key import CacheKey, Cells, EmbeddingsKey, LatentsKey

MISSING, PRESENT, _FIRST_REASON = 0, 1, 2
# Why rows cannot be used. Their numbers are part of the format: append, never reorder.
REASONS = (
    "other", "not_finite", "too_small", "image", "gzip", "base64", "columns", "encoding", "caption", "meta",
    "unreadable", "empty_caption", "no_caption", "no_image", "two_images", "file_name", "tar", "class", "metadata",
    "damaged", "latents", "control", "no_control", "format", "outside",
)  # fmt: skip

_MAGIC, _VERSION = b"PPLDMLAT", 1
_START = struct.Struct("<8sIII")
_ALIGNMENT = 64
_STORED: dict[str, np.dtype] = {"float16": np.dtype("<f2"), "bfloat16": np.dtype("<u2"), "float32": np.dtype("<f4")}
_REMEDY = "the same `ppldm precompute` makes it again"


@dataclass(frozen=True)
class _Places:
    """Where the sections of a file begin, in bytes. `arrays`: int64 [rows + 1], those of each row, and the end."""

    codes: int
    widths: int
    heights: int
    ends: int
    texts: int
    states: int
    checksums: int
    arrays: np.ndarray


def create_file(
    path: Path, key: CacheKey, header: dict, codes: np.ndarray, sizes: np.ndarray, texts: list[bytes]
) -> None:
    """Write a file of which all rows are missing, atomically; one that is there is replaced, so that of several
    processes that may need it one creates it (`formats.index.lock`).

    header: what `key.cells` needs besides. codes: uint8 [rows]. sizes: uint16 [2, rows], widths and heights. texts: of
    each row. Raises OSError.
    """
    static = _static_sections(codes, sizes, texts)
    facts = {"rows": len(codes), "text_bytes": sum(map(len, texts)), "crc32": _checksum(static)}
    header = {"key": key.facts, **header, **facts}
    encoded = json.dumps(header).encode()
    places = _find_places(header, key.cells(header), key.dtype, len(encoded), codes)
    with atomic_write(path) as file:
        file.write(_START.pack(_MAGIC, _VERSION, len(encoded), isal_zlib.crc32(encoded)) + encoded)
        starts = places.codes, places.widths, places.heights, places.ends, places.texts
        for start, data in zip(starts, static, strict=True):
            file.seek(start)
            file.write(data)
        file.truncate(int(places.arrays[-1]))


def read_key(path: Path) -> CacheKey:
    """What a file was made of. Raises PartError."""
    return _read_header(path)[1]


class CachedFile:
    """An open file. `len()`: rows. `codes`, `widths`, `heights`: see the module. `num_variants`: of a row, at most.

    key: what it must be of; None for anything. Raises PartError where it is missing, damaged or of another key. Closed
    by `close()` or with the last reference.
    """

    def __init__(self, path, key: CacheKey | None = None, writable: bool = False):
        self.path = Path(path)
        header, self.key, header_bytes = _read_header(self.path)
        if key is not None and (words := key.differences(self.key)):
            raise PartError(f"{path} was made of something else: {'; '.join(words)}; make it again: `{key.command}`")
        self.header, self.cells = header, self.key.cells(header)
        self.num_variants, self._sizes = self.cells.variants, _array_bytes(self.cells, self.key.dtype)
        self._map = np.asarray(np.memmap(self.path, np.uint8, "r"))
        self._open_sections(header, header_bytes)
        self._stored = _STORED[self.key.dtype]
        self._number = os.open(self.path, os.O_WRONLY) if writable else None
        self.close = weakref.finalize(self, _close, self._number)

    def _open_sections(self, header: dict, header_bytes: int) -> None:
        rows, variants = header["rows"], self.num_variants
        start = _align(_START.size + header_bytes)
        codes = self._view(start, "u1", rows)
        places = _find_places(header, self.cells, self.key.dtype, header_bytes, codes)
        if len(self._map) != places.arrays[-1]:
            raise _damaged(self.path, f"it has {len(self._map)} bytes and not {places.arrays[-1]}")
        self.codes = self._view(places.codes, "u1", rows)
        self.widths, self.heights = (self._view(place, "<u2", rows) for place in (places.widths, places.heights))
        self._ends = self._view(places.ends, "<u8", rows)
        self._texts = self._view(places.texts, "u1", header["text_bytes"])
        if _checksum((self.codes, self.widths, self.heights, self._ends, self._texts)) != header["crc32"]:
            raise _damaged(self.path, "checksum")
        self.states = self._view(places.states, "u1", rows * variants).reshape(rows, variants)
        self._checksums = self._view(places.checksums, "<u4", rows * variants).reshape(rows, variants)
        self._places = places

    def _view(self, place: int, dtype: str, count: int) -> np.ndarray:
        end = place + count * np.dtype(dtype).itemsize
        if end > len(self._map):
            raise _damaged(self.path, "it is cut short")
        return self._map[place:end].view(dtype)

    def __len__(self) -> int:
        return len(self.codes)

    def text(self, row: int) -> bytes:
        """The texts of a row, as they were given."""
        return self._texts[int(self._ends[row - 1]) if row else 0 : int(self._ends[row])].tobytes()

    def read(self, row: int, variant: int) -> np.ndarray | None:
        """An array, float32; None where it is missing.

        Raises RowError where the row cannot be used, PartError where the file is damaged there.
        """
        state = self.states[row, variant]
        if state != PRESENT:
            if state == MISSING:
                return None
            if self.is_damaged(row, variant):
                raise _damaged(f"{self.path} row {row}", "checksum of its state")
            raise self.row_error(row, variant)
        data = self._array(row, variant)
        if isal_zlib.crc32(data) != self._checksums[row, variant]:
            raise _damaged(f"{self.path} row {row}", "checksum")
        return decode_array(data.view(self._stored).reshape(self._shape(row)), self.key.dtype)

    def write(self, row: int, variant: int, array: np.ndarray) -> np.ndarray | None:
        """Keep an array, float32, and return it as it will be read; where it is not finite, also only after rounding,
        mark the row as bad and return None. Raises OSError."""
        stored = encode_array(array, self.key.dtype)
        rounded = decode_array(stored, self.key.dtype)
        if not np.isfinite(rounded).all():
            self.mark_bad(row, variant, "not_finite")
            return None
        if rounded.shape != self._shape(row):
            raise ValueError(f"an array of shape {rounded.shape} is not of row {row}, {self._shape(row)}")
        place, size = self._place(row, variant)
        self._put(place, stored)
        self._put_checksum(row, variant, stored)
        self._set_state(row, variant, PRESENT)
        return rounded

    def mark_bad(self, row: int, variant: int, reason: str) -> None:
        """Keep why a row cannot be used: the reason of a RowError."""
        state = _FIRST_REASON + REASONS.index(reason if reason in REASONS else "other")
        self._put_checksum(row, variant, bytes([state]))
        self._set_state(row, variant, state)

    def forget(self, row: int, variant: int) -> None:
        """Make an array missing."""
        self._set_state(row, variant, MISSING)

    def is_damaged(self, row: int, variant: int) -> bool:
        """Whether an array that should be there, or the reason why it is not, is not what was written."""
        state = int(self.states[row, variant])
        if state == MISSING:
            return False
        data = self._array(row, variant) if state == PRESENT else bytes([state])
        return isal_zlib.crc32(data) != self._checksums[row, variant]

    def reason(self, row: int, variant: int) -> str | None:
        """Why a row cannot be used; None where it is missing or there."""
        state = int(self.states[row, variant])
        return None if state < _FIRST_REASON else _name_reason(state)

    def row_error(self, row: int, variant: int = 0) -> RowError | None:
        """The same as what to raise."""
        reason = self.reason(row, variant)
        return RowError(reason, f"{self.path} row {row} could not be encoded ({reason})") if reason else None

    def copy_rows(self, path: Path, key: CacheKey, rows: list[int]) -> None:
        """Write a file of `key` with these rows alone, and what is there of them. What depends on the number of its row
        is missing where that is another now. Raises OSError."""
        own = ("key", "rows", "text_bytes", "crc32")
        header = {name: value for name, value in self.header.items() if name not in own}
        codes, sizes = self.codes[rows], np.stack([self.widths, self.heights])[:, rows]
        header |= {"variants": int(codes.max())} if "variants" in header else {}
        create_file(path, key, header, codes, sizes, [self.text(row) for row in rows])
        with closing(CachedFile(path, key, writable=True)) as copy:
            for number, row in enumerate(rows):
                for variant in np.flatnonzero(self.states[row]).tolist():
                    state = int(self.states[row, variant])
                    if state == PRESENT and number != row and key.depends_on_number:
                        continue
                    if state == PRESENT:
                        copy._put(copy._place(number, variant)[0], self._array(row, variant))
                    copy._put(copy._places.checksums + 4 * (number * copy.num_variants + variant),
                              self._checksums[row, variant : variant + 1])  # fmt: skip
                    copy._set_state(number, variant, state)
            copy.flush()

    def flush(self) -> None:
        """Make what was written durable."""
        os.fsync(self._number)

    def _shape(self, row: int) -> tuple[int, ...]:
        return self.cells.shapes[self.codes[row]]

    def _place(self, row: int, variant: int) -> tuple[int, int]:
        size = int(self._sizes[self.codes[row]])
        return int(self._places.arrays[row]) + variant * size, size

    def _array(self, row: int, variant: int) -> np.ndarray:
        place, size = self._place(row, variant)
        return self._map[place : place + size]

    def _put_checksum(self, row: int, variant: int, data) -> None:
        place = self._places.checksums + 4 * (row * self.num_variants + variant)
        self._put(place, np.array([isal_zlib.crc32(data)], "<u4"))

    def _set_state(self, row: int, variant: int, state: int) -> None:
        self._put(self._places.states + row * self.num_variants + variant, bytes([state]))

    def _put(self, place: int, data) -> None:
        """By a write and not through the map, where a full disk would end the process by SIGBUS."""
        with naming_full_disk(self.path):
            data = memoryview(data).cast("B")
            while data:
                written = os.pwrite(self._number, data, place)
                data, place = data[written:], place + written


def encode_array(array: np.ndarray, dtype: str) -> np.ndarray:
    """float32 rounded to the nearest of `dtype`, ties to even; bfloat16 as its bits."""
    array = np.ascontiguousarray(array, np.float32)
    if dtype != "bfloat16":
        with np.errstate(over="ignore"):
            return array.astype(_STORED[dtype])
    bits = array.view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype("<u2")
    return np.where(np.isnan(array), np.uint16(0x7FC0), rounded)


def decode_array(stored: np.ndarray, dtype: str) -> np.ndarray:
    """The inverse of `encode_array`, float32."""
    if dtype == "bfloat16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)


def count_bytes(cells: Cells, dtype: str) -> np.ndarray:
    """The bytes of a row's arrays by its code; int64 [256], 0 for codes without any."""
    sizes = _array_bytes(cells, dtype)
    sizes[: len(cells.counts)] *= cells.counts
    return sizes


def count_file_bytes(cells: Cells, dtype: str, codes: np.ndarray, text_bytes: float) -> int:
    """The bytes of a file of rows of these codes, whose texts have about `text_bytes` each."""
    fixed = 1024 + len(codes) * (1 + 2 + 2 + 8 + 5 * cells.variants + text_bytes)
    return int(fixed + count_bytes(cells, dtype)[codes].sum())


def _array_bytes(cells: Cells, dtype: str) -> np.ndarray:
    """Of one array."""
    sizes = np.zeros(256, np.int64)
    sizes[: len(cells.shapes)] = [math.prod(shape) * _STORED[dtype].itemsize for shape in cells.shapes]
    return sizes


def _find_places(header: dict, cells: Cells, dtype: str, header_bytes: int, codes: np.ndarray) -> _Places:
    rows, place, places = header["rows"], _START.size + header_bytes, []
    states = rows * cells.variants
    for size in (rows, 2 * rows, 2 * rows, 8 * rows, header["text_bytes"], states, 4 * states):
        places.append(_align(place))
        place = places[-1] + size
    sizes = count_bytes(cells, dtype)[codes]
    return _Places(*places, arrays=_align(place) + np.concatenate([[0], np.cumsum(sizes)]))


def _align(place: int) -> int:
    return -(-place // _ALIGNMENT) * _ALIGNMENT


def _static_sections(codes: np.ndarray, sizes: np.ndarray, texts: list[bytes]) -> tuple[bytes, ...]:
    widths, heights = sizes
    ends = np.cumsum([len(text) for text in texts], dtype="<u8")
    arrays = codes.astype("u1"), widths.astype("<u2"), heights.astype("<u2"), ends
    return *(array.tobytes() for array in arrays), b"".join(texts)


def _checksum(sections: Iterable) -> int:
    checksum = 0
    for data in sections:
        checksum = isal_zlib.crc32(data, checksum)
    return checksum


def _read_header(path: Path) -> tuple[dict, CacheKey, int]:
    """(header, its key, bytes of the header) of a file."""
    try:
        with open(path, "rb") as file:
            start = file.read(_START.size)
            if len(start) < _START.size:
                raise _damaged(path, "it is cut short")
            magic, version, size, crc32 = _START.unpack(start)
            encoded = file.read(size)
    except FileNotFoundError as error:
        raise PartError(f"no file {path}; make it with `ppldm precompute`") from error
    except OSError as error:
        raise PartError(f"cannot read {path} ({error.strerror}); check the file and its disk") from error
    if magic == _MAGIC and version != _VERSION:
        raise PartError(f"{path} is of version {version} of the format, not {_VERSION}; delete it and make it again")
    if magic != _MAGIC or isal_zlib.crc32(encoded) != crc32:
        raise _damaged(path, "its header, or it is not a file of `ppldm precompute`")
    header = json.loads(encoded)
    facts = header["key"]
    return header, (EmbeddingsKey if "text_encoder" in facts else LatentsKey).from_facts(facts), size


def _name_reason(state: int) -> str:
    number = state - _FIRST_REASON
    return REASONS[number] if number < len(REASONS) else "other"


def _damaged(what, how: str) -> PartError:
    return PartError(f"{what} is damaged ({how}); {_REMEDY}")


def _close(number: int | None) -> None:
    if number is not None:
        os.close(number)


T = TypeVar("T")


class LastUsed(Generic[T]):
    """`open(number)`, of which the latest `count` are kept; a copy in another process opens its own."""

    def __init__(self, open: Callable[[int], T], count: int):
        self._arguments = open, count
        self._kept = lru_cache(maxsize=count)(open)

    def __call__(self, number: int) -> T:
        """Raises what `open` raises."""
        return self._kept(number)

    def __getstate__(self):
        return self._arguments

    def __setstate__(self, state):
        self.__init__(*state)

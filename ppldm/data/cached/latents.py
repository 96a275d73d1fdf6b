"""The file of a part's cached latents: what an autoencoder makes of each row and each of its enumerated crops.

In use:

    key = LatentsKey.of(encoder_digest, shapes, crops, "float16", source, part_content)     # `cached.key`
    path = find_latents(part_path, key, folder, read_key)    PartError names the field that differs, and the command
    latents = Latents(path, key)                             writable=True to fill in what is missing
    latents.read(row, crops.variant(crop))                   float32 [2, C, h, w], mean and standard deviation, without
                                                             the scaling factor; None where it is not computed yet;
                                                             RowError as the pixels would have raised
    latents.write(row, variant, moments)                     returns them rounded, as every later `read` gives them
    latents.captions(row), latents.meta(row)                 the row's texts, so that the part need not be there
    latents.codes, .widths, .heights                         number of a row's shape; its picture's size as in the index
    create_latents(path, key, C, f, codes, sizes, texts)     with all rows missing; texts from `encode_texts`

Little endian:

    magic, version, bytes of the header, CRC-32 of the header       _START
    header        JSON: key, channels, factor, rows, bytes of texts, CRC-32 of the five sections that follow
    codes         u8 [rows]             number of the row's shape among those of the key; 255: it has none
    widths        u16 [rows]            pixels of the picture as shown, as the index of the part has them
    heights       u16 [rows]
    ends          u64 [rows]            where a row's texts end
    texts         for each row JSON of its captions, "\n", JSON of its metadata; nothing where it cannot be read
    states        u8 [rows, variants]   0 missing, 1 there, from 2 on why it cannot be used, 2 + number in REASONS
    checksums     u32 [rows, variants]  CRC-32 of the moments; where they cannot be used, of the state
    moments       for each row and variant mean, then standard deviation: dtype [2, C, H / f, W / f]

The first sections are written once, with the file, and checked when it is opened. Moments are written in place, then
their checksum, then their state: a process that is killed leaves a row missing, never a wrong one, and several
processes of a machine may write other rows of one file. Sections begin at multiples of 64 bytes; what is missing takes
no space on file systems that know holes.
"""

import json
import os
import struct
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from isal import isal_zlib

from ...utils.errors import PartError, RowError
from ...utils.files import atomic_write, naming_full_disk
from ..formats.row import Row
from ..formats.rows import Rows
from .key import LatentsKey

MISSING, PRESENT, _FIRST_REASON = 0, 1, 2
NO_SHAPE = 255
# Why rows cannot be used. Their numbers are part of the format: append, never reorder.
REASONS = (
    "other", "not_finite", "too_small", "image", "gzip", "base64", "columns", "encoding", "caption", "meta",
    "unreadable", "empty_caption", "no_caption", "no_image", "two_images", "file_name", "tar", "class", "metadata",
    "damaged", "latents",
)  # fmt: skip

_MAGIC, _VERSION = b"PPLDMLAT", 1
_START = struct.Struct("<8sIII")
_ALIGNMENT = 64
_STORED = {"float16": np.dtype("<f2"), "bfloat16": np.dtype("<u2"), "float32": np.dtype("<f4")}
_REMEDY = "the same `ppldm precompute` makes it again"


@dataclass(frozen=True)
class _Places:
    """Where the sections of a file begin, in bytes. `moments`: int64 [rows + 1], those of each row, and the end."""

    codes: int
    widths: int
    heights: int
    ends: int
    texts: int
    states: int
    checksums: int
    moments: np.ndarray


def create_latents(
    path: Path, key: LatentsKey, channels: int, factor: int, codes: np.ndarray, sizes: np.ndarray, texts: list[bytes]
) -> None:
    """Write a file of which all rows are missing, atomically; one that is there is replaced, so that of several
    processes that may need it one creates it (`formats.index_lock`).

    factor: pixels a side to one latent. codes: uint8 [rows]. sizes: uint16 [2, rows], widths and heights. texts: of
    each row, by `encode_texts`. Raises OSError.
    """
    static = _static_sections(codes, sizes, texts)
    header = {
        "key": key.facts,
        "channels": channels,
        "factor": factor,
        "rows": len(codes),
        "text_bytes": sum(map(len, texts)),
        "crc32": _checksum(static),
    }
    encoded = json.dumps(header).encode()
    places = _find_places(header, key, len(encoded), codes)
    with atomic_write(path) as file:
        file.write(_START.pack(_MAGIC, _VERSION, len(encoded), isal_zlib.crc32(encoded)) + encoded)
        starts = places.codes, places.widths, places.heights, places.ends, places.texts
        for start, data in zip(starts, static, strict=True):
            file.seek(start)
            file.write(data)
        file.truncate(int(places.moments[-1]))


def encode_texts(captions: Iterable[str], meta: dict) -> bytes:
    """The texts of a row as the file has them."""
    parts = (json.dumps(value, ensure_ascii=False, separators=(",", ":")) for value in ([*captions], meta))
    return "\n".join(parts).encode("utf-8", "surrogatepass")


def read_texts(part: Rows, rows: Iterable[int] | None = None) -> list[bytes]:
    """The texts of rows of a part, None for all; nothing for those that cannot be read."""
    texts = []
    for number in range(len(part)) if rows is None else rows:
        try:
            row = part.read(number)
        except RowError:
            texts.append(b"")
        else:
            texts.append(encode_texts((row.caption, *row.other_captions), row.meta))
    return texts


def read_key(path: Path) -> LatentsKey:
    """What a file of latents was made of. Raises PartError."""
    return _read_header(path)[1]


class Latents:
    """An open file of latents. `len()`: rows. `codes`, `widths`, `heights`: see the module. `num_variants`: of a row.

    key: what it must be of; None for anything. Raises PartError where it is missing, damaged or of another key. Closed
    by `close()` or with the last reference.
    """

    def __init__(self, path, key: LatentsKey | None = None, writable: bool = False):
        self.path = Path(path)
        header, self.key, header_bytes = _read_header(self.path)
        if key is not None and (words := key.differences(self.key)):
            raise PartError(f"{path} was made of something else: {'; '.join(words)}; make it again: `{key.command}`")
        self.channels, self.factor = header["channels"], header["factor"]
        self.num_variants = self.key.num_variants
        self._map = np.asarray(np.memmap(self.path, np.uint8, "r"))
        self._open_sections(header, header_bytes)
        self._stored = _STORED[self.key.dtype]
        self._number = os.open(self.path, os.O_WRONLY) if writable else None
        self.close = weakref.finalize(self, _close, self._number)

    def _open_sections(self, header: dict, header_bytes: int) -> None:
        rows, variants = header["rows"], self.num_variants
        start = _align(_START.size + header_bytes)
        places = _find_places(header, self.key, header_bytes, self._view(start, "u1", rows))
        if len(self._map) != places.moments[-1]:
            raise _damaged(self.path, f"it has {len(self._map)} bytes and not {places.moments[-1]}")
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

    def shape(self, row: int) -> tuple[int, int] | None:
        """(height, width) of a row's crops in pixels; None where it has none, and no latents."""
        code = self.codes[row]
        return None if code == NO_SHAPE else self.key.shapes[code]

    def captions(self, row: int) -> list[str]:
        """All captions of a row. Raises RowError."""
        return json.loads(self._text_of(row).partition("\n")[0])

    def meta(self, row: int) -> dict:
        """The metadata of a row. Raises RowError."""
        return json.loads(self._text_of(row).partition("\n")[2])

    def texts(self, row: int) -> Row:
        """A row, without its picture. Raises RowError."""
        captions, _, meta = self._text_of(row).partition("\n")
        caption, *others = json.loads(captions)
        return Row(caption, b"", json.loads(meta), tuple(others))

    def _text_of(self, row: int) -> str:
        start, end = int(self._ends[row - 1]) if row else 0, int(self._ends[row])
        if start == end:
            state = int(self.states[row, 0])
            raise self._row_error(row, state) if state >= _FIRST_REASON else RowError(
                "unreadable", f"{self.path} row {row} could not be read when the file was made"
            )  # fmt: skip
        return self._texts[start:end].tobytes().decode("utf-8", "surrogatepass")

    def read(self, row: int, variant: int) -> np.ndarray | None:
        """The posterior's mean and standard deviation, float32 [2, C, h, w]; None where they are missing.

        Raises RowError where the row cannot be used, PartError where the file is damaged there.
        """
        state = self.states[row, variant]
        if state != PRESENT:
            if state == MISSING:
                return None
            if self.is_damaged(row, variant):
                raise _damaged(f"{self.path} row {row}", "checksum of its state")
            raise self._row_error(row, int(state))
        data = self._moments(row, variant)
        if isal_zlib.crc32(data) != self._checksums[row, variant]:
            raise _damaged(f"{self.path} row {row}", "checksum")
        return decode_moments(data.view(self._stored).reshape(self._moments_shape(row)), self.key.dtype)

    def write(self, row: int, variant: int, moments: np.ndarray) -> np.ndarray | None:
        """Keep moments, float32 [2, C, h, w], and return them as they will be read; where they are not finite, also
        only after rounding, mark the row as bad and return None. Raises OSError."""
        stored = encode_moments(moments, self.key.dtype)
        rounded = decode_moments(stored, self.key.dtype)
        if not np.isfinite(rounded).all():
            self.mark_bad(row, variant, "not_finite")
            return None
        if rounded.shape != self._moments_shape(row):
            raise ValueError(f"moments of shape {rounded.shape} are not of row {row}, {self._moments_shape(row)}")
        place, size = self._moments_place(row, variant)
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
        """Make moments missing."""
        self._set_state(row, variant, MISSING)

    def is_damaged(self, row: int, variant: int) -> bool:
        """Whether moments that should be there, or the reason why they are not, are not what was written."""
        state = int(self.states[row, variant])
        if state == MISSING:
            return False
        data = self._moments(row, variant) if state == PRESENT else bytes([state])
        return isal_zlib.crc32(data) != self._checksums[row, variant]

    def reason(self, row: int, variant: int) -> str | None:
        """Why a row cannot be used; None where it is missing or there."""
        state = int(self.states[row, variant])
        return None if state < _FIRST_REASON else _name_reason(state)

    def flush(self) -> None:
        """Make what was written durable."""
        os.fsync(self._number)

    def _row_error(self, row: int, state: int) -> RowError:
        reason = _name_reason(state)
        return RowError(reason, f"{self.path} row {row} could not be encoded ({reason})")

    def _moments_shape(self, row: int) -> tuple[int, ...]:
        height, width = self.key.shapes[self.codes[row]]
        return (2, self.channels, height // self.factor, width // self.factor)

    def _moments_place(self, row: int, variant: int) -> tuple[int, int]:
        start, end = self._places.moments[row], self._places.moments[row + 1]
        size = (end - start) // self.num_variants
        return int(start + variant * size), int(size)

    def _moments(self, row: int, variant: int) -> np.ndarray:
        place, size = self._moments_place(row, variant)
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


def encode_moments(moments: np.ndarray, dtype: str) -> np.ndarray:
    """float32 rounded to the nearest of `dtype`, ties to even; bfloat16 as its bits."""
    moments = np.ascontiguousarray(moments, np.float32)
    if dtype != "bfloat16":
        with np.errstate(over="ignore"):
            return moments.astype(_STORED[dtype])
    bits = moments.view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype("<u2")
    return np.where(np.isnan(moments), np.uint16(0x7FC0), rounded)


def decode_moments(stored: np.ndarray, dtype: str) -> np.ndarray:
    """The inverse of `encode_moments`, float32."""
    if dtype == "bfloat16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)


def count_bytes(key: LatentsKey, channels: int, factor: int) -> np.ndarray:
    """The bytes of a row's moments, all variants, by the code of its shape; int64 [256], 0 for codes without one."""
    sizes = np.zeros(256, np.int64)
    for code, (height, width) in enumerate(key.shapes):
        values = 2 * channels * (height // factor) * (width // factor)
        sizes[code] = key.num_variants * values * _STORED[key.dtype].itemsize
    return sizes


def count_file_bytes(key: LatentsKey, channels: int, factor: int, codes: np.ndarray, text_bytes: float) -> int:
    """The bytes of a file of rows of these codes, whose texts have about `text_bytes` each."""
    fixed = 1024 + len(codes) * (1 + 2 + 2 + 8 + 5 * key.num_variants + text_bytes)
    return int(fixed + count_bytes(key, channels, factor)[codes].sum())


def _find_places(header: dict, key: LatentsKey, header_bytes: int, codes: np.ndarray) -> _Places:
    rows, place, places = header["rows"], _START.size + header_bytes, []
    states = rows * key.num_variants
    for size in (rows, 2 * rows, 2 * rows, 8 * rows, header["text_bytes"], states, 4 * states):
        places.append(_align(place))
        place = places[-1] + size
    sizes = count_bytes(key, header["channels"], header["factor"])[codes]
    return _Places(*places, moments=_align(place) + np.concatenate([[0], np.cumsum(sizes)]))


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


def _read_header(path: Path) -> tuple[dict, LatentsKey, int]:
    """(header, its key, bytes of the header) of a file."""
    try:
        with open(path, "rb") as file:
            start = file.read(_START.size)
            if len(start) < _START.size:
                raise _damaged(path, "it is cut short")
            magic, version, size, crc32 = _START.unpack(start)
            encoded = file.read(size)
    except FileNotFoundError as error:
        raise PartError(f"no file of latents {path}; make it with `ppldm precompute`") from error
    except OSError as error:
        raise PartError(f"cannot read {path} ({error.strerror}); check the file and its disk") from error
    if magic == _MAGIC and version != _VERSION:
        raise PartError(f"{path} is of version {version} of the format, not {_VERSION}; delete it and make it again")
    if magic != _MAGIC or isal_zlib.crc32(encoded) != crc32:
        raise _damaged(path, "its header, or it is not a file of latents")
    header = json.loads(encoded)
    return header, LatentsKey.from_facts(header["key"]), size


def _name_reason(state: int) -> str:
    number = state - _FIRST_REASON
    return REASONS[number] if number < len(REASONS) else "other"


def _damaged(what, how: str) -> PartError:
    return PartError(f"{what} is damaged ({how}); {_REMEDY}")


def _close(number: int | None) -> None:
    if number is not None:
        os.close(number)

"""The file of what a frozen network makes of a part: an array for each row and variant, or why there is none.

Latents (`cached.latents`) and embeddings of captions (`cached.run`) are such files; what an array is, and how many a
row has, is said by key (`cached.key`) and header. In use:

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
from contextlib import closing, suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
from isal import isal_zlib

from ...config.data import EAGER
from ...utils.errors import ConfigError, PartError, RowError
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
_UNFINISHED = ".unfinished"
_REMEDY = "the same `ppldm precompute` makes it again"


def create_file(
    path: Path, key: CacheKey, header: dict, codes: np.ndarray, sizes: np.ndarray, texts: list[bytes]
) -> None:
    """Write a file of which all rows are missing, atomically; one that is there is replaced, so that of several
    processes that may need it one creates it (`formats.index.lock`).

    header: what `key.cells` needs besides. codes: uint8 [rows]. sizes: uint16 [2, rows], widths and heights. texts: of
    each row. Raises OSError.
    """
    widths, heights = sizes
    ends = np.cumsum([len(text) for text in texts], dtype="<u8")
    arrays = codes.astype("u1"), widths.astype("<u2"), heights.astype("<u2"), ends
    written = *(array.tobytes() for array in arrays), b"".join(texts)
    facts = {"rows": len(codes), "text_bytes": len(written[-1]), "crc32": _checksum(written)}
    header = {"key": key.facts, **header, **facts}
    encoded, cells = json.dumps(header).encode(), key.cells(header)
    sections, end = _find_sections(header, cells, len(encoded))
    with atomic_write(path) as file:
        file.write(_START.pack(_MAGIC, _VERSION, len(encoded), isal_zlib.crc32(encoded)) + encoded)
        for (start, _, _), data in zip(sections.values(), written, strict=False):
            file.seek(start)
            file.write(data)
        file.truncate(end + int(count_bytes(cells, key.dtype)[codes].sum()))


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
        self.num_variants, self._stored = self.cells.variants, _STORED[self.key.dtype]
        self._map = np.asarray(np.memmap(self.path, np.uint8, "r"))
        self._open_sections(header_bytes)
        self._number = os.open(self.path, os.O_WRONLY) if writable else -1
        self.close: Callable = weakref.finalize(self, os.close, self._number) if writable else lambda: None

    def _open_sections(self, header_bytes: int) -> None:
        sections, end = _find_sections(self.header, self.cells, header_bytes)
        if len(self._map) < end:
            raise _damaged(self.path, "it is cut short")
        views = [
            self._map[start : start + count * np.dtype(dtype).itemsize].view(dtype)
            for start, dtype, count in sections.values()
        ]
        self.codes, self.widths, self.heights, self._ends, self._texts, states, checksums = views
        # Where the arrays of each row begin, and where the last ones end.
        sizes = count_bytes(self.cells, self.key.dtype)[self.codes]
        self._starts = end + np.concatenate([[0], np.cumsum(sizes)])
        if len(self._map) != self._starts[-1]:
            raise _damaged(self.path, f"it has {len(self._map)} bytes and not {self._starts[-1]}")
        if _checksum(views[:5]) != self.header["crc32"]:
            raise _damaged(self.path, "checksum")
        shape = len(self), self.num_variants
        self.states, self._checksums = states.reshape(shape), checksums.reshape(shape)
        self._states_start, self._checksums_start = sections["states"][0], sections["checksums"][0]

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def engine(self) -> str:
        """What computed them (`--engine`). It decides no more than last bits, so it is no part of the key; but the rows
        of a file have all one."""
        return self.header.get("engine", EAGER)

    def check_engine(self, engine: str) -> None:
        """Raises ConfigError where `engine` may not compute what is missing."""
        if engine != self.engine:
            raise ConfigError(
                f"{self.path} lacks rows, and those it has were computed with --engine {self.engine}; complete it with "
                f"`{self.key.command} --engine {self.engine}`, or delete it"
            )

    def text(self, row: int) -> bytes:
        """The texts of a row, as they were given."""
        return self._texts[int(self._ends[row - 1]) if row else 0 : int(self._ends[row])].tobytes()

    def read(self, row: int, variant: int, on_demand: bool = False) -> np.ndarray | None:
        """An array, float32; None where it is missing.

        Raises RowError where the row cannot be used, PartError where the file is damaged there; None instead where it
        can be computed again `on_demand`: a machine leaves it so that lost its power.
        """
        state = self.states[row, variant]
        if state == MISSING:
            return None
        if self.is_damaged(row, variant):
            if on_demand:
                return None
            raise _damaged(f"{self.path} row {row}", "checksum" if state == PRESENT else "checksum of its state")
        if state != PRESENT:
            raise self.row_error(row, variant)
        return decode_array(self._array(row, variant).view(self._stored).reshape(self._shape(row)), self.key.dtype)

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
        self._put_checksum(row, variant, isal_zlib.crc32(stored))
        self._set_state(row, variant, PRESENT)
        return rounded

    def mark_bad(self, row: int, variant: int, reason: str) -> None:
        """Keep why a row cannot be used: the reason of a RowError."""
        state = _FIRST_REASON + REASONS.index(reason if reason in REASONS else "other")
        self._put_checksum(row, variant, isal_zlib.crc32(bytes([state])))
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
        number = int(self.states[row, variant]) - _FIRST_REASON
        if number < 0:
            return None
        return REASONS[number] if number < len(REASONS) else "other"

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
                    copy._put_checksum(number, variant, self._checksums[row, variant])
                    copy._set_state(number, variant, state)
            copy.flush()

    def flush(self) -> None:
        """Make what was written durable."""
        os.fsync(self._number)

    def _shape(self, row: int) -> tuple[int, ...]:
        return self.cells.shapes[self.codes[row]]

    def _place(self, row: int, variant: int) -> tuple[int, int]:
        size = math.prod(self._shape(row)) * self._stored.itemsize
        return int(self._starts[row]) + variant * size, size

    def _array(self, row: int, variant: int) -> np.ndarray:
        place, size = self._place(row, variant)
        return self._map[place : place + size]

    def _put_checksum(self, row: int, variant: int, checksum: int) -> None:
        self._put(self._checksums_start + 4 * (row * self.num_variants + variant), np.array([checksum], "<u4"))

    def _set_state(self, row: int, variant: int, state: int) -> None:
        self._put(self._states_start + row * self.num_variants + variant, bytes([state]))

    def _put(self, place: int, data) -> None:
        """By a write and not through the map, where a full disk would end the process by SIGBUS."""
        with naming_full_disk(self.path):
            data = memoryview(data).cast("B")
            while data:
                written = os.pwrite(self._number, data, place)
                data, place = data[written:], place + written


def cached_path(part: Path, key: CacheKey, folder: Path | None = None) -> Path:
    """The file of a part's arrays: beside it, or in `folder`."""
    return (folder or part.parent) / f"{part.name}.{key.digest[:8]}{key.suffix}"


def unfinished_path(target: Path) -> Path:
    """Where a cached file is made before it gets its name."""
    return target.with_name(f".{target.name}{_UNFINISHED}")


def find_cached(part: Path, key: CacheKey, folder: Path | None) -> Path:
    """The file of `key` for a part. Raises PartError, which says in what the files that are there differ, and the
    command that makes what is missing."""
    path = cached_path(part, key, folder)
    if path.is_file():
        return path
    others = list_cached(path.parent, part.name, key.suffix)
    if not others:
        raise PartError(f"{part} has no cached {key.what} in {path.parent}; make them with `{key.command}`")
    differences = {other: key.differences(read_key(other)) for other in others}
    nearest = min(others, key=lambda other: len(differences[other]))
    raise PartError(
        f"{nearest} was made of something else: {'; '.join(differences[nearest])}; make what this run needs with "
        f"`{key.command}`, or run with what the {key.what} were made of"
    )


def find_alike(part: Path, key: LatentsKey, folder: Path | None) -> list[Path]:
    """The files of a part whose latents are as of this key, whichever shapes they have; the key's own file first.
    Raises PartError, as `find_cached`, where there are none."""
    own, alike = cached_path(part, key, folder), []
    for path in list_cached(own.parent, part.name):
        with suppress(PartError):  # a damaged one, which serves nobody
            if path != own and not replace(key, shapes=(found := read_key(path)).shapes).differences(found):
                alike.append(path)
    return [own] * own.is_file() + alike or [find_cached(part, key, folder)]


def list_cached(folder: Path, part: str, suffix: str = LatentsKey.suffix) -> list[Path]:
    """The finished files of one kind in a folder, of parts of this name."""
    with suppress(FileNotFoundError):
        return [path for path in _list_once(folder, os.stat(folder).st_mtime_ns).get(part, ()) if path.suffix == suffix]
    return []


@lru_cache(maxsize=8)
def _list_once(folder: Path, changed: int) -> dict[str, list[Path]]:
    """Of so many parts, each would else list the whole folder."""
    return list_files(folder)


def list_files(folder: Path) -> dict[str, list[Path]]:
    """The cached files of both kinds in a folder by the name of their part, those too that nobody has finished."""
    found = {}
    for path in sorted(folder.glob("*")):
        target = path.name.removesuffix(_UNFINISHED)
        target = target if target == path.name else target.removeprefix(".")
        if target.endswith((LatentsKey.suffix, EmbeddingsKey.suffix)) and not target.startswith("."):
            found.setdefault(target.rpartition(".")[0].rpartition(".")[0], []).append(path)
    return found


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
    sizes, counted = np.zeros(256, np.int64), zip(cells.shapes, cells.counts, strict=True)
    sizes[: len(cells.counts)] = [math.prod(shape) * count * _STORED[dtype].itemsize for shape, count in counted]
    return sizes


def count_file_bytes(cells: Cells, dtype: str, codes: np.ndarray, text_bytes: float) -> int:
    """The bytes of a file of rows of these codes, whose texts have about `text_bytes` each."""
    fixed = 1024 + len(codes) * (1 + 2 + 2 + 8 + 5 * cells.variants + text_bytes)
    return int(fixed + count_bytes(cells, dtype)[codes].sum())


def _find_sections(header: dict, cells: Cells, header_bytes: int) -> tuple[dict[str, tuple[int, str, int]], int]:
    """(where each section begins, its dtype and how many values it has; where the arrays begin)."""
    rows, sections, place = header["rows"], {}, _START.size + header_bytes
    dtypes = {"codes": "u1", "widths": "<u2", "heights": "<u2", "ends": "<u8"}
    dtypes |= {"texts": "u1", "states": "u1", "checksums": "<u4"}
    counts = {"texts": header["text_bytes"], "states": rows * cells.variants, "checksums": rows * cells.variants}
    for name, dtype in dtypes.items():
        count = counts.get(name, rows)
        start = _align(place)
        sections[name] = start, dtype, count
        place = start + count * np.dtype(dtype).itemsize
    return sections, _align(place)


def _align(place: int) -> int:
    return -(-place // _ALIGNMENT) * _ALIGNMENT


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


def _damaged(what, how: str) -> PartError:
    return PartError(f"{what} is damaged ({how}); {_REMEDY}")

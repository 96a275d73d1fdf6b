"""The file of what a frozen network makes of a part: an array for each row and variant, or why there is none.

Latents and embeddings of captions are such files; what an array is, and how many a row has, is said by key
(`cached.key`) and header. That of latents has `channels` and `factor`, pixels a side to one latent, and `engine` where
that was not eager; the code of a row is the number of its shape among those of the key, or `shapes.NO_SHAPE`. Its
arrays are float32 [2, C, h, w], mean and standard deviation, unscaled.

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

The first sections are written once and checked when the file is opened. Arrays are written in place, then their
checksum, then their state: a process that is killed leaves a row missing, never a wrong one, and several processes of a
machine may write other rows of one file. Sections begin at multiples of 64 bytes; what is missing is a hole.
"""

import json
import math
import os
import struct
import weakref
import zlib
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from dataclasses import replace
from functools import lru_cache, reduce
from pathlib import Path

import numpy as np
from isal import isal_zlib

from ...config.data import EAGER
from ...utils.errors import ConfigError, PartError, RowError
from ...utils.files import atomic_write, naming_full_disk
from ..filelist import Source
from ..formats.row import Row, Rows
from ..shapes import NO_SHAPE
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
    """Write a file of which all rows are missing, atomically. header: what `key.cells` needs besides. codes: uint8
    [rows]. sizes: uint16 [2, rows], widths and heights. texts: of each row. Raises OSError."""
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
    """An open file, closed by `close()` or with the last reference. `num_variants`: of a row, at most. key: what it
    must be of; None for anything. Raises PartError where it is missing, damaged or of another key."""

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
        self._starts = end + np.cumsum([0, *count_bytes(self.cells, self.key.dtype)[self.codes]])
        if len(self._map) != self._starts[-1]:
            raise _damaged(self.path, f"it has {len(self._map)} bytes and not {self._starts[-1]}")
        if _checksum(views[:5]) != self.header["crc32"]:
            raise _damaged(self.path, "checksum")
        self.states, self._checksums = (one.reshape(len(self), self.num_variants) for one in (states, checksums))
        self._states_start, self._checksums_start = sections["states"][0], sections["checksums"][0]

    def __len__(self) -> int:
        return len(self.codes)

    def check_engine(self, engine: str) -> None:
        """Raises ConfigError where `engine` may not compute what is missing: the rows of a file have all one."""
        own = self.header.get("engine", EAGER)
        if engine != own:
            raise ConfigError(
                f"{self.path} lacks rows, and those it has were computed with --engine {own}; complete it with "
                f"`{self.key.command} --engine {own}`, or delete it"
            )

    def text(self, row: int) -> bytes:
        """The texts of a row, as they were given."""
        return self._texts[int(self._ends[row - 1]) if row else 0 : int(self._ends[row])].tobytes()

    def read(self, row: int, variant: int, on_demand: bool = False) -> np.ndarray | None:
        """An array, float32; None where it is missing. Raises RowError where the row cannot be used, PartError where
        the file is damaged there; None instead where it can be computed again `on_demand`."""
        state = self.states[row, variant]
        if state == MISSING:
            return None
        if self.is_damaged(row, variant):
            if on_demand:
                return None
            raise _damaged(f"{self.path} row {row}", "checksum" if state == PRESENT else "checksum of its state")
        if state != PRESENT:
            raise self.row_error(row, variant)
        stored = self._map[self._place(row, variant)].view(self._stored)
        return decode_array(stored.reshape(self._shape(row)), self.key.dtype)

    def write(self, row: int, variant: int, array: np.ndarray) -> np.ndarray | None:
        """Keep an array, float32, and return it as it will be read; None for one not finite. Raises OSError."""
        stored = encode_array(array, self.key.dtype)
        rounded = decode_array(stored, self.key.dtype)
        if not np.isfinite(rounded).all():
            self.mark_bad(row, variant, "not_finite")
            return None
        if rounded.shape != self._shape(row):
            raise ValueError(f"an array of shape {rounded.shape} is not of row {row}, {self._shape(row)}")
        self._put(self._place(row, variant).start, stored)
        self._settle(row, variant, PRESENT, isal_zlib.crc32(stored))
        return rounded

    def mark_bad(self, row: int, variant: int, reason: str) -> None:
        """Keep why a row cannot be used: the reason of a RowError."""
        state = _FIRST_REASON + REASONS.index(reason if reason in REASONS else "other")
        self._settle(row, variant, state, isal_zlib.crc32(bytes([state])))

    def forget(self, row: int, variant: int) -> None:
        """Make an array missing."""
        self._set_state(row, variant, MISSING)

    def is_damaged(self, row: int, variant: int) -> bool:
        """Whether an array that should be there, or the reason why it is not, is not what was written."""
        state = int(self.states[row, variant])
        if state == MISSING:
            return False
        data = self._map[self._place(row, variant)] if state == PRESENT else bytes([state])
        return isal_zlib.crc32(data) != self._checksums[row, variant]

    def reason(self, row: int, variant: int) -> str | None:
        """Why a row cannot be used; None where it is missing or there."""
        number = int(self.states[row, variant]) - _FIRST_REASON
        return (*REASONS, "other")[min(number, len(REASONS))] if number >= 0 else None

    def row_error(self, row: int, variant: int = 0) -> RowError | None:
        """The same as what to raise."""
        reason = self.reason(row, variant)
        return RowError(reason, f"{self.path} row {row} could not be encoded ({reason})") if reason else None

    def copy_rows(self, path: Path, key: CacheKey, rows: list[int]) -> None:
        """Write a file of `key` with what is there of these rows, less what their numbers decide. Raises OSError."""
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
                        copy._put(copy._place(number, variant).start, self._map[self._place(row, variant)])
                    copy._settle(number, variant, state, self._checksums[row, variant])
            copy.flush()

    def flush(self) -> None:
        """Make what was written durable."""
        os.fsync(self._number)

    def _shape(self, row: int) -> tuple[int, ...]:
        return self.cells.shapes[self.codes[row]]

    def _place(self, row: int, variant: int) -> slice:
        size = math.prod(self._shape(row)) * self._stored.itemsize
        start = int(self._starts[row]) + variant * size
        return slice(start, start + size)

    def _settle(self, row: int, variant: int, state: int, checksum: int) -> None:
        """Of an array that is written: the checksum, then the state."""
        self._put(self._checksums_start + 4 * (row * self.num_variants + variant), np.array([checksum], "<u4"))
        self._set_state(row, variant, state)

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
    """The file of `key` for a part. Raises PartError: in what others differ, and the command that makes it."""
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
    """The files of a part with latents as of this key, of whichever shapes; its own first. Raises as `find_cached`."""
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


# Of so many parts, each would else list the whole folder.
_list_once = lru_cache(maxsize=8)(lambda folder, changed: list_files(folder))


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
    rows, place, sections = header["rows"], _START.size + header_bytes, {}
    stated = {"codes": ("u1", rows), "widths": ("<u2", rows), "heights": ("<u2", rows), "ends": ("<u8", rows)}
    stated |= {"texts": ("u1", header["text_bytes"]), "states": ("u1", rows * cells.variants)}
    for name, (dtype, count) in (stated | {"checksums": ("<u4", rows * cells.variants)}).items():
        start = -(-place // _ALIGNMENT) * _ALIGNMENT
        sections[name] = start, dtype, count
        place = start + count * np.dtype(dtype).itemsize
    return sections, -(-place // _ALIGNMENT) * _ALIGNMENT


def _checksum(sections: Iterable) -> int:
    return reduce(lambda checksum, data: isal_zlib.crc32(data, checksum), sections, 0)


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


def create_latents(path: Path, key: LatentsKey, header: dict, part: Rows) -> None:
    """`create_file` for the rows of a part. Raises OSError."""
    sizes = np.stack([part.widths, part.heights])
    create_file(path, key, header, key.find_codes(*sizes), sizes, read_texts(part))


def encode_texts(captions: Iterable[str], meta: dict) -> bytes:
    """The texts of a row as the file has them."""
    parts = (json.dumps(value, ensure_ascii=False, separators=(",", ":")) for value in ([*captions], meta))
    return "\n".join(parts).encode("utf-8", "surrogatepass")


def read_texts(part: Rows, rows: Iterable[int] | None = None) -> list[bytes]:
    """The texts of rows of a part, None for all; nothing for those that cannot be read."""
    texts = []
    for number in range(len(part)) if rows is None else rows:
        texts.append(b"")
        with suppress(RowError):
            row = part.read(number)
            texts[-1] = encode_texts((row.caption, *row.other_captions), row.meta)
    return texts


class Latents(CachedFile):
    """An open file of latents."""

    def shape(self, row: int) -> tuple[int, int] | None:
        """(height, width) of a row's crops in pixels; None where it has none, and no latents."""
        code = self.codes[row]
        return None if code == NO_SHAPE else self.key.shapes[code]

    def texts(self, row: int) -> Row:
        """A row, without its picture. Raises RowError."""
        text = self.text(row).decode("utf-8", "surrogatepass")
        if not text:
            error = RowError("unreadable", f"{self.path} row {row} could not be read when the file was made")
            raise self.row_error(row) or error
        captions, _, meta = text.partition("\n")
        caption, *others = json.loads(captions)
        return Row(caption, b"", json.loads(meta), tuple(others))


class CachedRows(Rows):
    """The rows of a part that is not here, from its latents: texts and sizes, and no picture. path: where it would lie.
    Raises PartError without latents of it."""

    has_images = False

    def __init__(self, path, source: Source):
        self.path, folder = Path(path), source.latents_dir or Path(path).parent
        found = list_cached(folder, self.path.name)
        if not found:
            raise PartError(
                f"{path} is not here, and {folder} has no cached latents of it; correct the line, or copy them"
            )
        if len({read_key(one).part for one in found}) > 1:
            raise PartError(
                f"{folder} holds latents of several parts named {self.path.name}, and the part itself is not here to "
                "say which; keep them in folders of their own"
            )
        self._latents = Latents(found[0])  # of any key, since texts and sizes are the same in all
        key, self.close = self._latents.key, self._latents.close
        self.widths, self.heights = np.asarray(self._latents.widths), np.asarray(self._latents.heights)
        prompts = () if key.idx_to_prompt is None else (zlib.crc32(key.idx_to_prompt.encode()),)
        self.identity = (*key.part, *prompts)

    def __len__(self) -> int:
        return len(self._latents)

    def read(self, row: int) -> Row:
        """Without a picture. Raises RowError where it could not be read when the latents were made."""
        self._where(row)
        return self._latents.texts(row)

    def read_preview(self, row: int) -> np.ndarray | None:
        """The latents of a row's first crop, float32 [C, h, w]; None if missing. Raises RowError, PartError."""
        moments = self._latents.read(row, 0)
        return None if moments is None else moments[0]

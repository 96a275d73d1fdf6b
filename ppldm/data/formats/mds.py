"""`format=mds`: shards of MosaicML streaming, `shard.00000.mds`, each of which says itself what is in it.

A shard is, little endian: the number of samples u32; where each begins, and the last ends, u32[n + 1]; a JSON object
that names the columns with their encodings and sizes; the samples. A sample is the sizes u32 of its columns of no fixed
size, then the columns. Where `index.json` is there, its sizes and hashes must be those of the shards. A compressed
shard, `shard.00000.mds.zstd`, is read from a copy without its compression (`formats.base`).

A shard of pictures has an encoded image, a caption, and metadata. A shard of latents, as micro_diffusion writes them,
has `latents_256` and so on in place of the image: float16 [C, h, w], one sample of the VAE's posterior, times the
scaling factor. Arrays, pickles and other columns of bytes are not looked at.

`write_shards` writes rows as such shards, which MosaicML's library reads.
"""

import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ...utils.checksums import hash_file, measure_file
from ...utils.errors import PartError, RowError, StoreError
from ...utils.files import read_json
from ...utils.store.cache import address_of, hold, in_store, place_of
from ..images import image_size
from . import base
from .index import MDS_SAMPLES, Index, IndexSpec
from .layouts import CONTROL_COLUMNS, DEFAULT_LAYOUT
from .parquet_table import CAPTION_COLUMNS, IMAGE_COLUMNS
from .row import Row, decode_text

# The suffixes that MosaicML's writer gives, and what pyarrow calls their formats.
_CODECS = {".zstd": "zstd", ".gz": "gzip", ".br": "brotli", ".bz2": "bz2", ".snappy": "snappy"}
_BLOCK_BYTES, _UNPACKED = 1 << 20, ".unpacked"
_MAX_BYTES = 1 << 32  # of a shard, whose offsets are u32
_MAX_COLUMNS_BYTES = 1 << 20
_CAPTION_COLUMNS = (*CAPTION_COLUMNS, "caption_syn_pixart_llava15")
_IMAGE_ENCODINGS = ("jpeg", "png", "bytes")  # the encoded file as it is
_LATENTS, _CAPTION_LATENTS = "latents_", "caption_latents"
_NUMBERS = {"int": "<i8"} | {
    f"{kind}{8 * size}": f"<{kind[0]}{size}"
    for kind, sizes in (("int", (1, 2, 4, 8)), ("uint", (1, 2, 4, 8)), ("float", (2, 4, 8)))
    for size in sizes
}
_TEXTS = ("str", "str_int", "str_float", "json", *_NUMBERS)  # what can be a caption or metadata
STATED = "index.json"  # which says how many bytes each shard beside it has, and their hashes
SHARD_BYTES = 1 << 28  # of pictures and captions in a shard that is written, unless one row has more


def unpacked_name(name: str) -> str:
    """The name of a shard without the suffix of its compression."""
    stem, suffix = os.path.splitext(name)
    return stem if suffix in _CODECS and stem.endswith(".mds") else name


def is_packed(path: Path) -> bool:
    """Whether a shard is compressed, by its name: two of the formats have no mark of their own."""
    return unpacked_name(path.name) != path.name


@contextmanager
def open_stream(path: Path) -> Iterator:
    """A shard's bytes by `read(size)`, unpacked on the way. Raises PartError, also in the block."""
    if not is_packed(path):
        with open(path, "rb") as file:
            yield file
        return
    import pyarrow as pa

    codec = _CODECS[path.suffix]
    try:
        with _unpack_snappy(path) if codec == "snappy" else pa.input_stream(path, codec) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        words = " ".join(str(error).split())[:200]
        raise PartError(f"{path} cannot be unpacked ({words}); get it again") from error


def _unpack_snappy(path: Path):
    """The raw format, which begins with the size of what it holds: seven bits a byte, the lowest first."""
    import pyarrow as pa

    data, size = path.read_bytes(), 0
    for place, byte in enumerate(data[:5]):
        size |= (byte & 127) << 7 * place
        if byte < 128:
            break
    if size > _MAX_BYTES:
        raise OSError("its size cannot be")
    return pa.BufferReader(pa.Codec("snappy").decompress(data, size))


def open_samples(path: Path) -> BinaryIO:
    """A shard, or its unpacked copy, as a binary file that is not buffered. Raises PartError, OutputError."""
    if not is_packed(path):
        return open(path, "rb", buffering=0)
    content = measure_file(path)
    return base.open_copy(path, content, _UNPACKED, partial(_unpack, path, content))


def _unpack(path: Path, content: tuple[int, int]) -> None:
    num_bytes = 0
    with base.making_copy(path, content, _UNPACKED) as write, open_stream(path) as packed:
        while block := packed.read(_BLOCK_BYTES):
            num_bytes += len(block)
            if num_bytes > _MAX_BYTES:
                raise PartError(f"{path} holds more than a shard can; get it again")
            write(block)


@dataclass(frozen=True)
class _Column:
    """`size`: in bytes, None where each sample says it."""

    name: str
    encoding: str
    size: int | None


class MdsLayout:
    """Where the samples of a shard lie and what its columns are. `starts`: int64 [samples + 1]. `caption`, `image`: the
    columns with these, `image` None in a shard of latents; where they are not named, the known ones. `control`: that of
    the second image, where `has_control` asks for one beside the first. Raises PartError."""

    def __init__(self, path: Path, has_control: bool = False, image: str = "", caption: str = ""):
        self.path = path
        with open_stream(path) as file:
            self.starts = self._read_starts(file)
            self.columns = self._read_columns(file.read(int(self.starts[0]) - 4 * len(self.starts) - 4))
        self.caption = base.find_column(self.named("str"), (caption,) if caption else _CAPTION_COLUMNS, path)
        images, known = self.named(*_IMAGE_ENCODINGS), (image,) if image else IMAGE_COLUMNS
        has_image = not self.latents or not set(images).isdisjoint(known)
        self.image = base.find_column(images, known, path) if has_image else None
        self.control = base.find_column(images, CONTROL_COLUMNS, path) if has_image and has_control else None

    def named(self, *encodings: str) -> list[str]:
        """The columns of some encodings."""
        return [column.name for column in self.columns if column.encoding in encodings]

    @cached_property
    def latents(self) -> dict[int, str]:
        """The columns of latents by the resolution that they were made at."""
        sides = {name.removeprefix(_LATENTS): name for name in self.named("bytes") if name.startswith(_LATENTS)}
        return {int(side): name for side, name in sides.items() if side.isdecimal()}

    def places(self, read: Callable[[int], bytes], length: int, where: str) -> dict[str, slice]:
        """Where each column is in a sample, of which `read` gives the first n bytes. Raises RowError "damaged"."""
        num_sizes = sum(column.size is None for column in self.columns)
        sizes, found, offset = np.frombuffer(read(4 * num_sizes), "<u1"), {}, 4 * num_sizes
        if len(sizes) == 4 * num_sizes:
            stated = iter(sizes.view("<u4").tolist())
            for column in self.columns:
                end = offset + (next(stated) if column.size is None else column.size)
                found[column.name] = slice(offset, end)
                offset = end
        if offset != length or not found:
            raise RowError("damaged", f"{where}: damaged MDS data; get the shard again")
        return found

    def split(self, data: bytes, where: str) -> dict[str, bytes]:
        """The bytes of each column of a sample. Raises RowError "damaged"."""
        places = self.places(lambda length: data[:length], len(data), where)
        return {name: data[place] for name, place in places.items()}

    def decode(self, data: bytes, where: str) -> Row:
        """The row of a sample. Raises RowError "damaged", "no_image", "no_control", "empty_caption", "encoding"."""
        values = self.split(data, where)
        for column, reason in ((self.image, "no_image"), (self.control, "no_control")):
            if column and not values[column]:
                raise RowError(reason, f"{where} has an empty {column!r}")
        caption, meta = self.decode_texts(values, where)
        image, control = (values[column] if column else b"" for column in (self.image, self.control))
        return Row(caption, image, meta, control=control)

    def decode_texts(self, values: dict[str, bytes], where: str) -> tuple[str, dict]:
        """(caption, metadata) of the bytes of columns. Raises RowError "empty_caption", "encoding"."""
        caption = " ".join(decode_text(values[self.caption], where).split())
        if not caption:
            raise RowError("empty_caption", f"{where} has an empty caption")
        columns = [column for column in self.columns if column.encoding in _TEXTS and column.name != self.caption]
        decoded = {column.name: _decode(column.encoding, values[column.name], where) for column in columns}
        return caption, {name: value for name, value in decoded.items() if base.is_plain(value)}

    def damaged(self) -> PartError:
        """The error of a shard that is not as long, or not laid out, as it says."""
        return PartError(f"{self.path} is not an MDS shard, or is damaged or cut short; get it again")

    def _read_starts(self, file) -> np.ndarray:
        size = None if is_packed(self.path) else os.fstat(file.fileno()).st_size
        count = int.from_bytes(file.read(4), "little") + 1
        words = file.read(4 * count) if size is None or 4 * count < size else b""
        starts = np.frombuffer(words[: len(words) // 4 * 4], "<u4").astype(np.int64)
        if (
            len(starts) < count
            or starts[-1] != (starts[-1] if size is None else size)
            or (np.diff(starts) < 0).any()
            or not 0 < starts[0] - 4 * len(starts) - 4 <= _MAX_COLUMNS_BYTES
        ):
            raise self.damaged()
        return starts

    def _read_columns(self, text: bytes) -> tuple[_Column, ...]:
        try:
            stated = json.loads(text)
            names, encodings = stated["column_names"], stated["column_encodings"]
            columns = tuple(_Column(*one) for one in zip(names, encodings, stated["column_sizes"], strict=True))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise PartError(f"{self.path} is not an MDS shard, or is damaged ({error}); get it again") from error
        sizes = [column.size for column in columns if column.size is not None]
        if not columns or not all(type(size) is int and 0 <= size <= base.MAX_ROW_BYTES for size in sizes):
            raise PartError(f"{self.path} states columns that cannot be; get it again")
        return columns


class MdsShard(base.IndexedRows):
    """The samples of a shard. `has_caption_latents`: whether rows have a text encoder's hidden states of captions."""

    spec = IndexSpec((MDS_SAMPLES,))

    def __init__(self, path, layout: str = DEFAULT_LAYOUT):
        self._copy_kind = _UNPACKED if is_packed(Path(path)) else ""
        super().__init__(path, layout)
        self.latents, self.has_images = self._layout.latents, self._layout.image is not None
        self.has_caption_latents = _CAPTION_LATENTS in self._layout.named("bytes")

    @cached_property
    def _layout(self) -> MdsLayout:
        return MdsLayout(self.path, self._has_control)

    def read_fields(self, row: int) -> tuple[str, dict]:
        where = self._where(row)
        return self._layout.decode_texts(self._read_columns(row, self._layout.named(*_TEXTS), where), where)

    def read_latents(self, row: int, resolution: int, shape: tuple[int, ...]) -> np.ndarray:
        """The scaled latents of a row, float16 of `shape`. Raises RowError "damaged", "latents", PartError."""
        column = self.latents.get(resolution)
        if column is None:
            made = ", ".join(map(str, sorted(self.latents))) or "none"
            raise PartError(f"{self.path} has latents of {made} pixels and not of {resolution}; set --resolution")
        return self._read_float16(row, column, shape)

    def read_caption_latents(self, row: int, shape: tuple[int, ...]) -> np.ndarray:
        """A caption's hidden states, float16 [tokens, width]. Raises RowError "damaged", "latents", "not_finite"."""
        found = self._read_float16(row, _CAPTION_LATENTS, shape)
        if not np.isfinite(found).all():
            raise RowError("not_finite", f"{self._where(row)}: {_CAPTION_LATENTS} is not finite")
        return found

    def _read_float16(self, row: int, column: str, shape: tuple[int, ...]) -> np.ndarray:
        where = self._where(row)
        data = self._read_columns(row, [column], where)[column]
        if len(data) != 2 * math.prod(shape):
            needed = " x ".join(map(str, shape))
            raise RowError("latents", f"{where}: {len(data)} bytes of latents where {needed} float16 are needed")
        return np.frombuffer(data, "<f2").reshape(shape)

    def read_preview(self, row: int) -> np.ndarray | None:
        """A row's smallest latents, float32 [C, h, w], of a VAE that scales down by 8, else None. Raises RowError."""
        side, data = min(self.latents), self.check_latents(row)[self.latents[min(self.latents)]]
        return None if len(data) % (side // 8) ** 2 else data.reshape(-1, side // 8, side // 8).astype(np.float32)

    def check_latents(self, row: int) -> dict[str, np.ndarray]:
        """All latents of a row by column, float16 [n]. Raises RowError "damaged", "latents", "not_finite"."""
        where, found = self._where(row), {}
        for name, data in self._read_columns(row, [*self.latents.values()], where).items():
            if not data or len(data) % 2:
                raise RowError("latents", f"{where}: {name} has {len(data)} bytes, which are not float16 numbers")
            found[name] = np.frombuffer(data, "<f2")
            if not np.isfinite(found[name]).all():
                raise RowError("not_finite", f"{where}: {name} is not finite")
        return found

    def _read_columns(self, row: int, names: list[str], where: str) -> dict[str, bytes]:
        """The bytes of columns of a row, read by themselves: those of a text encoder's output are large."""
        start, length = int(self._index.offsets[row]), int(self._index.lengths[row])
        places = self._layout.places(lambda count: self._read_stored(start, count, where), length, where)
        found = {name: places[name] for name in names}
        return {n: self._read_stored(start + p.start, p.stop - p.start, where) for n, p in found.items()}

    def _make_copy(self) -> None:
        _unpack(self.path, self.identity[:2])

    def _build(self) -> tuple[Path, Index]:
        layout, table = self._layout, []
        with base.indexing(self.path, int(layout.starts[-1]), "B") as bar, open_stream(self.path) as file:
            _check_stated(self.path)
            file.read(int(layout.starts[0]))
            for start, stop in zip(layout.starts[:-1].tolist(), layout.starts[1:].tolist(), strict=True):
                if stop - start > base.MAX_ROW_BYTES:
                    raise PartError(f"{self.path} row {len(table)} is over {base.MAX_ROW_BYTES} bytes long; omit it")
                data = file.read(stop - start)
                if len(data) < stop - start:
                    raise layout.damaged()
                try:
                    size = image_size(layout.split(data, "")[layout.image]) if layout.image else (0, 0)
                except RowError:  # which reading the row says
                    size = 0, 0
                table.append((start, stop - start, *size))
                bar.update(stop - start)
            if file.read(1):
                raise layout.damaged()
        return base.store_rows(self.path, self.spec, table)

    def _decode(self, data: bytes, where: str) -> Row:
        return self._layout.decode(data, where)


def _decode(encoding: str, data: bytes, where: str):
    """The value of metadata; None of what is none."""
    if encoding == "str":
        return decode_text(data, where)
    if encoding in _NUMBERS:
        dtype = np.dtype(_NUMBERS[encoding])
        return np.frombuffer(data, dtype)[0].item() if len(data) == dtype.itemsize else None
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _check_stated(path: Path) -> None:
    """Compare a shard with the bytes and hashes that `index.json` says of it. Raises PartError, StoreError, OSError."""
    index, num_bytes, release = path.with_name(STATED), path.stat().st_size, None
    if in_store(path):
        try:
            index = place_of(address_of(index))  # one for all shards of a folder
            release = hold(index)
        except StoreError as error:
            if not error.missing:
                raise
    stated = _read_stated(index, index.stat().st_mtime_ns).get(path.name, {}) if index.exists() else {}
    if release:
        release()
    if num_bytes != stated.get("bytes", num_bytes):
        raise PartError(f"{path} has {num_bytes} bytes where {STATED} says {stated['bytes']}; get it again")
    for name, digest in stated.get("hashes", {}).items():
        if name in hashlib.algorithms_guaranteed and hash_file(path, name) != digest:
            raise PartError(f"{path} does not have the {name} that {STATED} says; get it again")


@lru_cache(maxsize=4)
def _read_stated(path: Path, changed: int) -> dict[str, dict]:
    """{`bytes`, `hashes`} of each file by its name: all shards of a folder ask for them."""
    try:
        files = [shard.get(kind) or {} for shard in read_json(path)["shards"] for kind in ("raw_data", "zip_data")]
        return {file["basename"]: {"bytes": file["bytes"], "hashes": dict(file["hashes"])} for file in files if file}
    except (AttributeError, KeyError, TypeError, ValueError):  # of something else, or damaged
        return {}


def write_shards(folder: Path, place: str, rows: Iterable[Row], suffix: str = "") -> list[dict]:
    """Write rows into a folder as shards of about SHARD_BYTES, compressed by `suffix` ".zstd". What `index.json` says
    of each, if it lies where the folder is `place`. Columns: `caption` (str), `jpg` (jpeg: the picture's file, which
    MosaicML's library opens by what it is), `control_image` (bytes) where a row of the shard has one, `width` and
    `height` (int32) where all rows have them, and as JSON each further field of the metadata, null where a row lacks
    it; one of these names is left out. What is bytes in the metadata is so in the shard. Raises OSError."""
    import pyarrow as pa

    shards, compression = [], _CODECS.get(suffix)
    for held in _fill_shards(rows):
        data, columns = _encode_shard(held)
        files, name = [], f"shard.{len(shards):05}.mds"
        for end in dict.fromkeys(("", suffix)):
            data = pa.Codec(compression).compress(data, asbytes=True) if end else data
            files.append({"basename": f"{place}/{name}{end}", "bytes": len(data), "hashes": {}})
        (folder / f"{name}{suffix}").write_bytes(data)  # a frame of zstd with its size, which that library needs
        raw, packed = [*files, None][:2]
        shards.append(columns | {"compression": compression, "samples": len(held), "raw_data": raw, "zip_data": packed})
    return shards


def _fill_shards(rows: Iterable[Row]) -> Iterator[list[Row]]:
    held, num_bytes = [], 0
    for row in rows:
        size = len(row.caption) + len(row.image) + len(row.control)
        size += sum(len(value) for value in row.meta.values() if isinstance(value, bytes))
        if held and num_bytes + size > SHARD_BYTES:
            yield held
            held, num_bytes = [], 0
        held.append(row)
        num_bytes += size
    yield held


def _encode_shard(rows: list[Row]) -> tuple[bytes, dict]:
    """(a shard without compression, what `index.json` says of its columns)."""
    columns = {"caption": "str"} | ({"jpg": "jpeg"} if any(row.image for row in rows) else {})
    columns |= {"control_image": "bytes"} if any(row.control for row in rows) else {}
    fields = {name for row in rows for name in row.meta} - {*columns}
    sides = [name for name in ("width", "height") if all(_is_int32(row.meta.get(name)) for row in rows)]
    raw = {name for name in fields if any(isinstance(row.meta.get(name), bytes) for row in rows)}
    columns |= dict.fromkeys(fields, "json") | dict.fromkeys(sides, "int32") | dict.fromkeys(raw, "bytes")
    columns = dict(sorted(columns.items()))
    fixed = [4 if name in sides else None for name in columns]
    stated = {"column_encodings": [*columns.values()], "column_names": [*columns], "column_sizes": fixed}
    stated |= {"format": "mds", "hashes": [], "size_limit": SHARD_BYTES, "version": 2}
    pieces, lengths = [], [0]  # of samples, which are joined once: pictures are large
    for row in rows:
        values = {name: row.meta.get(name, b"") if name in raw else json.dumps(row.meta.get(name)).encode()
                  for name in fields}  # fmt: skip
        values |= {name: struct.pack("<i", row.meta[name]) for name in sides}
        values |= {"caption": row.caption.encode("utf-8", "replace"), "jpg": row.image, "control_image": row.control}
        sizes = np.array([len(values[name]) for name in columns if name not in sides], "<u4")
        pieces += (sample := [sizes.tobytes(), *(values[name] for name in columns)])
        lengths.append(sum(map(len, sample)))
    config = json.dumps(stated).encode()
    starts = np.cumsum(lengths) + 4 * (len(rows) + 2) + len(config)
    return b"".join([np.array([len(rows), *starts], "<u4").tobytes(), config, *pieces]), stated


def _is_int32(value) -> bool:
    return type(value) is int and -(1 << 31) <= value < 1 << 31

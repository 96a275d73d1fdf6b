"""`format=mds`: shards of MosaicML streaming, `shard.00000.mds`, each of which says itself what is in it.

A shard is, little endian: the number of samples u32; where each begins, and the last ends, u32[n + 1]; a JSON object
that names the columns with their encodings and sizes; the samples. A sample is the sizes u32 of its columns of no fixed
size, then the columns, one after the other. `index.json` is not needed; where it is there, its sizes and hashes must be
those of the shards. A compressed shard is read from a copy (`mds.packed`); its index has places in that.

A shard of pictures has an encoded image, a caption, and metadata. A shard of latents, as micro_diffusion writes them,
has `latents_256` and so on in place of the image: float16 [C, h, w], one sample of the VAE's posterior, times the
scaling factor. Arrays, pickles and other columns of bytes are not looked at.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np

from ....utils.checksums import hash_file
from ....utils.errors import PartError, RowError
from ....utils.files import read_json
from ...images.decode import image_size
from ..base import MAX_ROW_BYTES, IndexedRows, find_column, indexing, is_plain, store_rows
from ..copies import Copy
from ..index.cache import IndexSpec, stat_part
from ..index.entries import MDS_SAMPLES, Index
from ..layouts import CONTROL_COLUMNS, CONTROL_LAYOUT, DEFAULT_LAYOUT
from ..parquet_table import CAPTION_COLUMNS, IMAGE_COLUMNS
from ..row import Row, decode_text
from .packed import copy_of, is_packed, open_stream

_CAPTION_COLUMNS = (*CAPTION_COLUMNS, "caption_syn_pixart_llava15")
_IMAGE_ENCODINGS = ("jpeg", "png", "bytes")  # the encoded file as it is
_LATENTS, _CAPTION_LATENTS = "latents_", "caption_latents"
_MAX_COLUMNS_BYTES = 1 << 20
_NUMBERS = {"int": "<i8"} | {
    f"{kind}{8 * size}": f"<{kind[0]}{size}"
    for kind, sizes in (("int", (1, 2, 4, 8)), ("uint", (1, 2, 4, 8)), ("float", (2, 4, 8)))
    for size in sizes
}
_TEXTS = ("str", "str_int", "str_float", "json", *_NUMBERS)  # what can be a caption or metadata
# (offset, length) -> bytes, fewer at the end
ReadBytes = Callable[[int, int], bytes]
_STATED = "index.json"  # which says how many bytes each shard beside it has, and their hashes


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
        self.caption = find_column(self._named("str"), (caption,) if caption else _CAPTION_COLUMNS, path)
        images, known = self._named(*_IMAGE_ENCODINGS), (image,) if image else IMAGE_COLUMNS
        has_image = not self.latents or not set(images).isdisjoint(known)
        self.image = find_column(images, known, path) if has_image else None
        self.control = find_column(images, CONTROL_COLUMNS, path) if has_image and has_control else None

    def _named(self, *encodings: str) -> list[str]:
        return [column.name for column in self.columns if column.encoding in encodings]

    def __len__(self) -> int:
        return len(self.starts) - 1

    @cached_property
    def latents(self) -> dict[int, str]:
        """The columns of latents by the resolution that they were made at."""
        sides = {name.removeprefix(_LATENTS): name for name in self._named("bytes") if name.startswith(_LATENTS)}
        return {int(side): name for side, name in sides.items() if side.isdecimal()}

    @cached_property
    def texts(self) -> list[str]:
        """The columns of the caption and of metadata."""
        return self._named(*_TEXTS)

    def places(self, read: ReadBytes, start: int, stop: int, where: str) -> dict[str, tuple[int, int]]:
        """(offset, length) of each column of the sample at [start, stop). Raises RowError "damaged"."""
        num_sizes = sum(column.size is None for column in self.columns)
        sizes, found, offset = np.frombuffer(read(start, 4 * num_sizes), "<u1"), {}, start + 4 * num_sizes
        if len(sizes) == 4 * num_sizes:
            stated = iter(sizes.view("<u4").tolist())
            for column in self.columns:
                length = next(stated) if column.size is None else column.size
                found[column.name] = offset, length
                offset += length
        if offset != stop or not found:
            raise RowError("damaged", f"{where}: damaged MDS data; get the shard again")
        return found

    def decode(self, data: bytes, where: str) -> Row:
        """The row of a sample's bytes, its image empty in a shard of latents. Raises RowError "damaged", "no_image",
        "no_control", "empty_caption", "encoding"."""
        places = self.places(lambda offset, length: data[offset : offset + length], 0, len(data), where)
        values = {name: data[offset : offset + length] for name, (offset, length) in places.items()}
        image = values[self.image] if self.image else b""
        if self.image and not image:
            raise RowError("no_image", f"{where} has an empty {self.image!r}")
        control = values[self.control] if self.control else b""
        if self.control and not control:
            raise RowError("no_control", f"{where} has an empty {self.control!r}")
        caption, meta = self.decode_texts(values, where)
        return Row(caption, image, meta, control=control)

    def decode_texts(self, values: dict[str, bytes], where: str) -> tuple[str, dict]:
        """(caption, metadata) of the bytes of columns. Raises RowError "empty_caption", "encoding"."""
        caption = " ".join(decode_text(values[self.caption], where).split())
        if not caption:
            raise RowError("empty_caption", f"{where} has an empty caption")
        columns = [column for column in self.columns if column.encoding in _TEXTS and column.name != self.caption]
        decoded = {column.name: _decode(column.encoding, values[column.name], where) for column in columns}
        return caption, {name: value for name, value in decoded.items() if is_plain(value)}

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
        if not columns or not all(type(size) is int and 0 <= size <= MAX_ROW_BYTES for size in sizes):
            raise PartError(f"{self.path} states columns that cannot be; get it again")
        return columns


class MdsShard(IndexedRows):
    """The samples of a shard: the first of parquet's image columns that is there, and of its caption columns."""

    spec = IndexSpec((MDS_SAMPLES,))

    def __init__(self, path, layout: str = DEFAULT_LAYOUT):
        stat_part(Path(path), self.spec)
        self._layout = MdsLayout(Path(path), layout == CONTROL_LAYOUT)
        super().__init__(path, layout)

    @property
    def latents(self) -> dict[int, str]:
        """The columns of latents by the resolution that they were made at; none in a shard of pictures."""
        return self._layout.latents

    @property
    def has_images(self) -> bool:
        return self._layout.image is not None

    def read_fields(self, row: int) -> tuple[str, dict]:
        where = self._where(row)
        return self._layout.decode_texts(self._read_columns(row, self._layout.texts, where), where)

    def read_latents(self, row: int, resolution: int, shape: tuple[int, ...]) -> np.ndarray:
        """The scaled latents of a row, float16 of `shape`. Raises RowError "damaged", "latents", and PartError where
        the shard has none of that resolution."""
        where, column = self._where(row), self.latents.get(resolution)
        if column is None:
            made = ", ".join(map(str, sorted(self.latents))) or "none"
            raise PartError(f"{self.path} has latents of {made} pixels and not of {resolution}; set --resolution")
        return self._read_float16(row, column, shape, where)

    @property
    def has_caption_latents(self) -> bool:
        """Whether rows have a text encoder's hidden states of their caption, as micro_diffusion writes them."""
        return any((column.name, column.encoding) == (_CAPTION_LATENTS, "bytes") for column in self._layout.columns)

    def read_caption_latents(self, row: int, shape: tuple[int, ...]) -> np.ndarray:
        """Hidden states of a row's caption, float16 of `shape`, [tokens, width]. Raises RowError "damaged", "latents",
        "not_finite"."""
        where = self._where(row)
        found = self._read_float16(row, _CAPTION_LATENTS, shape, where)
        if not np.isfinite(found).all():
            raise RowError("not_finite", f"{where}: {_CAPTION_LATENTS} is not finite")
        return found

    def _read_float16(self, row: int, column: str, shape: tuple[int, ...], where: str) -> np.ndarray:
        data = self._read_columns(row, [column], where)[column]
        if len(data) != 2 * math.prod(shape):
            needed = " x ".join(map(str, shape))
            raise RowError("latents", f"{where}: {len(data)} bytes of latents where {needed} float16 are needed")
        return np.frombuffer(data, "<f2").reshape(shape)

    def read_preview(self, row: int) -> np.ndarray | None:
        """The latents of a row at the lowest resolution, float32 [C, h, w], of a VAE that scales down by 8; None where
        they are not of such. Raises RowError."""
        side, data = min(self.latents), self.check_latents(row)[self.latents[min(self.latents)]]
        return None if len(data) % (side // 8) ** 2 else data.reshape(-1, side // 8, side // 8).astype(np.float32)

    def check_latents(self, row: int) -> dict[str, np.ndarray]:
        """All latents of a row by their columns, float16 in one dimension. Raises RowError "damaged", "latents" where
        there are none, "not_finite"."""
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

        def read(offset: int, length: int) -> bytes:
            return self._read_stored(offset, length, where)

        start = int(self._index.offsets[row])
        places = self._layout.places(read, start, start + int(self._index.lengths[row]), where)
        return {name: read(*places[name]) for name in names}

    def _find_copy(self) -> Copy | None:
        return copy_of(self.path, self.identity) if is_packed(self.path) else None

    def _build(self) -> tuple[Path, Index]:
        layout, table = self._layout, []
        with indexing(self.path, int(layout.starts[-1]), "B") as bar, open_stream(self.path) as file:
            _check_stated(self.path)
            file.read(int(layout.starts[0]))
            for start, stop in zip(layout.starts[:-1].tolist(), layout.starts[1:].tolist(), strict=True):
                if stop - start > MAX_ROW_BYTES:
                    raise PartError(f"{self.path} row {len(table)} is over {MAX_ROW_BYTES} bytes long; omit it")
                data = file.read(stop - start)
                if len(data) < stop - start:
                    raise layout.damaged()
                table.append((start, stop - start, *(self._image_size(data) if layout.image else (0, 0))))
                bar.update(stop - start)
            if file.read(1):
                raise layout.damaged()
        return store_rows(self.path, self.spec, table)

    def _image_size(self, data: bytes) -> tuple[int, int]:
        def read(offset: int, length: int) -> bytes:
            return data[offset : offset + length]

        try:
            return image_size(read(*self._layout.places(read, 0, len(data), "")[self._layout.image]))
        except RowError:  # which reading the row says
            return 0, 0

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
    """Compare a shard with what `index.json` says of it, as far as it does: its bytes, and those of its hashes that
    Python knows. Raises PartError, OSError."""
    stated, num_bytes = _find_stated(path.parent).get(path.name, {}), path.stat().st_size
    if num_bytes != stated.get("bytes", num_bytes):
        raise PartError(f"{path} has {num_bytes} bytes where {_STATED} says {stated['bytes']}; get it again")
    for name, digest in stated.get("hashes", {}).items():
        if name in hashlib.algorithms_guaranteed and hash_file(path, name) != digest:
            raise PartError(f"{path} does not have the {name} that {_STATED} says; get it again")


def _find_stated(folder: Path) -> dict[str, dict]:
    try:
        return _read_stated(folder / _STATED, (folder / _STATED).stat().st_mtime_ns)
    except FileNotFoundError:
        return {}


@lru_cache(maxsize=4)
def _read_stated(path: Path, changed: int) -> dict[str, dict]:
    """{`bytes`, `hashes`} of each file by its name: all shards of a folder ask for them."""
    try:
        files = [shard.get(kind) or {} for shard in read_json(path)["shards"] for kind in ("raw_data", "zip_data")]
        return {file["basename"]: {"bytes": file["bytes"], "hashes": dict(file["hashes"])} for file in files if file}
    except (AttributeError, KeyError, TypeError, ValueError):  # of something else, or damaged
        return {}

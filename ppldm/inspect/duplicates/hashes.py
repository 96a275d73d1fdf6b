"""Perceptual hashes of pictures: 64 bits that hardly change when a picture is resized or compressed again.

The hash is pHash (Zauner 2010, "Implementation and Benchmarking of Perceptual Image Hash Functions"): grey, shrunk to
32 x 32, the 8 x 8 lowest frequencies of its DCT, each a bit: above their median or not. A crop of a twentieth of the
sides moves some 10 bits, so nine crops of every picture are hashed too, of the middle, each side and corner. The
mirrored picture has the same frequencies, the odd horizontal ones with the other sign: its hash is `mirrored`.

A picture of one colour has no hash: all of its frequencies are noise. Plain ones, such as two shapes on white, share
hashes with strangers, so a thumbnail in colour decides about what is near (`look_alike`).

OUT/hashes holds a parquet file for each span of up to 1,000 rows, finished or absent, which says what it was made of:
each picture is decoded once for every question that is asked of it, and again where the part has changed.

    sha256 binary[32]           of the image file
    hash, mirrored int64        `hash_picture`; missing for pictures without structure
    crops list<int64>           nine of each
    thumbnail binary            16 x 16 x 3 bytes of each that has a hash
    pixels int64                width x height as shown
    caption_chars int32, key string (of the metadata, where it has one)
    reason string               why the row cannot be used; then there is nothing else
"""

import hashlib
import os
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import lru_cache
from json import dumps
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from ...data.images import decode_pixels, image_size
from ...utils.errors import RowError
from ...utils.files import atomic_write
from ..parts import Span, open_rows

CROPPED_SHARE = 0.05  # of a side, that the hashed crops leave out
NUM_CROPS = 9
NUM_HASHES = 2 + NUM_CROPS
THUMBNAIL_SIDE = 16
MAX_DIFFERENCE = 0.25
_SIDE, _SHRUNK, _FREQUENCIES = 160, 32, 8
_FLAT = 2.0  # standard deviation in levels of 255, below which a picture has no structure
_ENDS = ((0, 1), (0, 1 - CROPPED_SHARE), (CROPPED_SHARE / 2, 1 - CROPPED_SHARE / 2), (CROPPED_SHARE, 1))
_ALL, _LOW, _MIDDLE, _HIGH = range(4)
# Of each crop: which of _ENDS down and across.
_CROPS = (
    *((_MIDDLE, _MIDDLE), (_ALL, _LOW), (_ALL, _HIGH), (_LOW, _ALL), (_HIGH, _ALL)),
    *((_LOW, _LOW), (_LOW, _HIGH), (_HIGH, _LOW), (_HIGH, _HIGH)),
)
# Part of every file: a change of what is in it must change it.
_VERSION = 1
_SCHEMA = pa.schema(
    {
        "sha256": pa.binary(32),
        "hash": pa.int64(),
        "mirrored": pa.int64(),
        "crops": pa.list_(pa.int64()),
        "thumbnail": pa.binary(),
        "pixels": pa.int64(),
        "caption_chars": pa.int32(),
        "key": pa.string(),
        "reason": pa.string(),
    }
)
_KEY = b"ppldm"


@dataclass(frozen=True)
class Hashed:
    """A span with the file of its hashes. rows: of the span, counted through all parts."""

    span: Span
    path: Path
    rows: slice

    def read(self, columns: Sequence[str]) -> pa.Table:
        """These columns of the file, in the order of its rows."""
        return pq.read_table(self.path, columns=list(columns), partitioning=None)


def hash_picture(image: bytes) -> tuple[np.ndarray, np.ndarray] | None:
    """(int64 [NUM_HASHES]: of an encoded image, of it mirrored, of its crops; uint8 [16, 16, 3]: its thumbnail); None
    where it has no structure. Raises RowError "image" where it cannot be decoded."""
    square = Image.fromarray(decode_pixels(image)).resize((_SIDE, _SIDE), Image.Resampling.BILINEAR, reducing_gap=2.0)
    small = np.asarray(square.convert("L"), np.float32)
    if small.std() < _FLAT:
        return None
    thumbnail = np.asarray(square.resize((THUMBNAIL_SIDE, THUMBNAIL_SIDE), Image.Resampling.BOX))
    # [4, 8, 4, 8]: of each of _ENDS down, each across.
    blocks = (_transform() @ small @ _transform().T).reshape(len(_ENDS), _FREQUENCIES, len(_ENDS), _FREQUENCIES)
    whole = blocks[_ALL, :, _ALL]
    mirror = np.where(np.arange(_FREQUENCIES) % 2, -1, 1)
    hashes = np.stack([whole, whole * mirror, *(blocks[down, :, across] for down, across in _CROPS)])
    values = hashes.reshape(len(hashes), -1)
    bits = values > np.median(values[:, 1:], axis=1, keepdims=True)  # the first is the mean
    return np.packbits(bits, axis=1).view(">i8").astype(np.int64).ravel(), thumbnail


def look_alike(one: np.ndarray, other: np.ndarray, mirrored: bool, crops: bool) -> np.ndarray:
    """bool [N]: whether thumbnails, uint8 [N, 16, 16, 3], show the same in the same colours: as a whole, or one of them
    as a crop of the other, or mirrored. They do where they differ by at most a quarter of what they vary by."""
    alike = np.zeros(len(one), bool)
    one, other = one.astype(np.float32), other.astype(np.float32)
    cuts = [_shrink(*ends, THUMBNAIL_SIDE, THUMBNAIL_SIDE).astype(np.float32) for ends in _ENDS]  # type: ignore[call-arg]
    for first, second in ((one, other), (other, one)):
        limit = MAX_DIFFERENCE * (second.std(axis=(1, 2)).max(axis=1) + _FLAT)
        for down, across in ((_ALL, _ALL), *(_CROPS if crops else ())):
            cut = np.einsum("iu,nuvc,jv->nijc", cuts[down], first, cuts[across], optimize=True)
            for shown in (cut, cut[:, :, ::-1])[: 1 + mirrored]:
                alike |= np.sqrt(((shown - second) ** 2).mean(axis=(1, 2, 3))) <= limit
    return alike


@lru_cache(maxsize=1)
def _transform() -> np.ndarray:
    """float32 [32, 160]: the lowest frequencies (DCT-II) of each of _ENDS of 160 values, after shrinking it to 32."""
    places = (np.arange(_SHRUNK) + 0.5) / _SHRUNK
    dct = np.cos(np.pi * np.outer(np.arange(_FREQUENCIES), places))
    return np.concatenate([dct @ _shrink(*ends, _SIDE, _SHRUNK) for ends in _ENDS]).astype(np.float32)  # type: ignore[call-arg]


def _shrink(start: float, stop: float, side: int, count: int) -> np.ndarray:
    """float [count, side]: means over `count` equal stretches of [start, stop) of a side."""
    edges = np.linspace(start, stop, count + 1) * side
    pixels = np.arange(side)
    overlap = np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels)
    return overlap.clip(0) / (edges[1] - edges[0])


def hash_span(span: Span, folder: Path) -> Path:
    """The file of the hashes of a span, made where there is none of these very rows. Raises DataError, OutputError."""
    part = span.part
    name = hashlib.sha256(os.fsencode(part.path.absolute())).hexdigest()[:16]
    path = folder / f"{name}-{span.start:09}.parquet"
    with closing(open_rows(part)) as rows:
        key = dumps([_VERSION, part.source.format, part.source.layout, list(rows.identity), span.start, span.stop])
        with suppress(FileNotFoundError, pa.ArrowInvalid):
            if (pq.read_schema(path).metadata or {}).get(_KEY) == key.encode():
                return path
        found = [_hash_row(rows, row) for row in range(span.start, span.stop)]
    table = pa.Table.from_pylist(found, _SCHEMA.with_metadata({_KEY: key}))
    with atomic_write(path) as file:
        pq.write_table(table, file)
    return path


def _hash_row(rows, number: int) -> dict:
    try:
        row = rows.read(number)
        if not row.image:
            raise RowError("no_image", "only its latents are here")
        found = hash_picture(row.image)
    except RowError as error:
        return {"reason": error.reason}
    width, height = int(rows.widths[number]), int(rows.heights[number])
    if not (width and height):
        width, height = image_size(row.image)
    key = row.meta.get("key")
    facts = {
        "sha256": hashlib.sha256(row.image).digest(),
        "pixels": width * height,
        "caption_chars": len(row.caption),
        "key": key if isinstance(key, str) else None,
    }
    if found is None:
        return facts
    hashes, thumbnail = found
    whole, mirrored, *crops = hashes.tolist()
    return facts | {"hash": whole, "mirrored": mirrored, "crops": crops, "thumbnail": thumbnail.tobytes()}

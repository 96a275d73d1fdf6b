"""Hashes of rows, kept by spans of parts, so that each picture is decoded once for every question that is asked of it.

OUT/hashes holds a parquet file for each span of up to 1,000 rows, finished or absent, which says what it was made of:
where the part has changed, it is made again.

    sha256 binary[32]           of the image file
    hash, mirrored int64        `hashes.hash_picture`; missing for pictures without structure
    crops list<int64>           nine of each
    thumbnail binary            16 x 16 x 3 bytes of each that has a hash
    pixels int64                width x height as shown
    caption_chars int32
    key string                  of the row's metadata, where it has one
    reason string               why the row cannot be used; then there is nothing else
"""

import hashlib
import os
from collections.abc import Sequence
from contextlib import closing
from json import dumps
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ...data.images.decode import image_size
from ...utils.errors import RowError
from ...utils.files import atomic_write
from ..parts import Span, open_rows
from .hashes import hash_picture

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


def hash_span(span: Span, folder: Path) -> Path:
    """The file of the hashes of a span, made where there is none of these very rows. Raises DataError, OutputError."""
    part = span.part
    name = hashlib.sha256(os.fsencode(part.path.absolute())).hexdigest()[:16]
    path = folder / f"{name}-{span.start:09}.parquet"
    with closing(open_rows(part)) as rows:
        key = dumps([_VERSION, part.source.format, part.source.layout, list(rows.identity), span.start, span.stop])
        if _read_key(path) != key.encode():
            found = [_hash_row(rows, row) for row in range(span.start, span.stop)]
            table = pa.Table.from_pylist(found, _SCHEMA.with_metadata({_KEY: key}))
            with atomic_write(path) as file:
                pq.write_table(table, file)
    return path


def read_hashes(path: Path, columns: Sequence[str]) -> pa.Table:
    """These columns of a file, in the order of its rows."""
    return pq.read_table(path, columns=list(columns), partitioning=None)


def read_digests(table: pa.Table) -> np.ndarray:
    """uint64 [rows]: the first 64 bits of each sha256, 0 where there is none."""
    column = table["sha256"].combine_chunks().fill_null(bytes(32))
    return np.frombuffer(column.buffers()[1], ">u8").reshape(-1, 4)[column.offset :][: len(column), 0].astype(np.uint64)


def _read_key(path: Path) -> bytes | None:
    try:
        return (pq.read_schema(path).metadata or {}).get(_KEY)
    except (FileNotFoundError, pa.ArrowInvalid):
        return None


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

"""`format=parquet`: tables with the bytes of an image and a caption, as Hugging Face data sets and img2dataset write.

The rows of a table cannot be read at random: the least that can be read is a row group. So a table is repacked, once,
into a part of the cache folder, a few rows at a time, and read from there. A row without image or caption stays a row,
one with too few columns.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..utils.errors import OutputError, PartError
from .image import image_size
from .index import PARQUET_ROWS, Index
from .indexed import IndexedRows, indexing
from .part import inflate_member, write_lines
from .row import Row, decode_row, encode_row
from .stored import Way, make_copy_dir, stat_part

IMAGE_COLUMNS = ("image", "jpg", "jpeg", "png", "webp", "image_bytes")
CAPTION_COLUMNS = ("text", "caption", "txt", "TEXT")
_BATCH_ROWS = 64
_NO_ROW = b"\t\n"

# A (line, image size) pair, as parts are written from.
_Line = tuple[bytes, tuple[int, int]]


class ParquetTable(IndexedRows):
    """The rows of a parquet file: the first column of IMAGE_COLUMNS that is there holds the image, as bytes or as a
    struct with `bytes`, the first of CAPTION_COLUMNS the caption; the others are metadata."""

    way = Way((PARQUET_ROWS,), copy_suffix=".rows")

    def _build(self) -> tuple[Path, Index]:
        copy = self.way.copy_path(self.path, stat_part(self.path))
        make_copy_dir(self.path, copy)
        try:
            return copy, write_lines(copy, _lines(self.path), self.way)
        except OSError as error:
            raise OutputError(
                f"cannot repack {self.path} into {copy.parent}: {error.strerror or error}; set PPLDM_CACHE_DIR to a "
                "folder with space"
            ) from error

    def _decode(self, data: bytes, where: str) -> Row:
        return decode_row(inflate_member(data, where), where)


def _lines(path: Path) -> Iterator[_Line]:
    good = 0
    with open_table(path) as (table, image, caption), indexing(path, table.metadata.num_rows, "row") as bar:
        for batch in table.iter_batches(_BATCH_ROWS):
            lines = [_line(record, image, caption) for record in _records(batch)]
            good += sum(line != _NO_ROW for line, _ in lines)
            yield from lines
            bar.update(len(lines))
    if not good:
        raise PartError(f"none of the rows of {path} has both image bytes in {image!r} and a text in {caption!r}")


@contextmanager
def open_table(path: Path) -> Iterator[tuple]:
    """(pyarrow ParquetFile, name of the image column, of the caption column). Raises PartError, also in the block."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as table:
            names = table.schema_arrow.names
            yield table, _find_column(names, IMAGE_COLUMNS, path), _find_column(names, CAPTION_COLUMNS, path)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise PartError(f"{path} is no parquet file, or damaged ({_one_line(error)}); get it again") from error


def read_records(table, start: int, stop: int) -> Iterator[dict | None]:
    """Rows [start, stop) of a pyarrow ParquetFile; None for one whose text is not UTF-8."""
    groups, first, end = [], 0, 0
    for group in range(table.metadata.num_row_groups):
        begin, end = end, end + table.metadata.row_group(group).num_rows
        if begin < stop and end > start:
            first = begin if not groups else first
            groups.append(group)
    row = first
    for batch in table.iter_batches(_BATCH_ROWS, row_groups=groups) if groups else ():
        skipped, taken = max(0, start - row), min(batch.num_rows, stop - row)
        row += batch.num_rows
        if taken > skipped:
            yield from _records(batch.slice(skipped, taken - skipped))


def _records(batch) -> Iterator[dict | None]:
    """The rows of a record batch; None for one whose text is not UTF-8."""
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:
        for number in range(batch.num_rows):
            try:
                yield from batch.slice(number, 1).to_pylist()
            except UnicodeDecodeError:
                yield None


def _line(record: dict | None, image_column: str, caption_column: str) -> _Line:
    if record is None:
        return _NO_ROW, (0, 0)
    image, caption = record.pop(image_column), record.pop(caption_column)
    image = image.get("bytes") if isinstance(image, dict) else image
    caption = " ".join(caption.split()) if isinstance(caption, str) else ""
    if not isinstance(image, bytes) or not image or not caption:
        return _NO_ROW, (0, 0)
    meta = {name: value for name, value in record.items() if is_plain(value)}
    return encode_row(Row(caption, image, meta)), image_size(image)


def is_plain(value) -> bool:
    """Whether a value of a table can be metadata."""
    return isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))


def _find_column(columns: list[str], names: tuple[str, ...], path: Path) -> str:
    for name in names:
        if name in columns:
            return name
    raise PartError(f"{path} has the columns {', '.join(columns)[:200]}; one of {', '.join(names)} is due")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]

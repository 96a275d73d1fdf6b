"""`format=parquet`: tables with the bytes of an image and a caption, as Hugging Face data sets and img2dataset write.

The least that is read of a table is a row group, or, of a large one, the batches up to the row; the latest are kept,
`_CACHE_BYTES` in a process, whatever the number of tables. The index holds row numbers, image sizes, and in place of
lengths the CRC-32s of the lines that rows make, since parquet seldom has checksums. A row without image or caption
stays a row, one with too few columns.
"""

import math
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from isal import isal_zlib

from ..utils.errors import PartError, RowError
from .image import image_size
from .index import PARQUET_ROWS, Index
from .indexed import IndexedRows, indexing, store_rows
from .row import Row, decode_row, encode_row
from .stored import Way

IMAGE_COLUMNS = ("image", "jpg", "jpeg", "png", "webp", "image_bytes")
CAPTION_COLUMNS = ("text", "caption", "txt", "TEXT")
_BATCH_ROWS = 64
_NO_ROW = b"\t\n"
_CACHE_BYTES = 256 << 20
_LARGE_GROUP_BYTES = 64 << 20

# A (line, image size) pair, as parts are written from.
_Line = tuple[bytes, tuple[int, int]]


class ParquetTable(IndexedRows):
    """The rows of a parquet file: the first column of IMAGE_COLUMNS that is there holds the image, as bytes or as a
    struct with `bytes`, the first of CAPTION_COLUMNS the caption; the others are metadata."""

    way = Way((PARQUET_ROWS,))

    def __init__(self, path):
        super().__init__(path)
        self._reader = None

    def read(self, row: int) -> Row:
        if not 0 <= row < len(self):
            raise IndexError(f"{self.path} has rows 0 to {len(self) - 1}, no row {row}")
        where = f"{self.path} row {row}"
        self._file.read(0, 0, where)  # notices a change
        if self._reader is None:
            self._reader = _GroupReader(self.path)
        line, _ = _line(self._reader.read(row, where), self._reader.image, self._reader.caption)
        if isal_zlib.crc32(line) != self._index.lengths[row]:
            raise RowError("unreadable", f"{where}: damaged parquet data (checksum); get it again")
        return decode_row(line, where)

    def close(self) -> None:
        if self._reader:
            self._reader.close()
        super().close()

    def _decode(self, data: bytes, where: str) -> Row:
        raise NotImplementedError  # rows are no bytes of the file

    def _build(self) -> tuple[Path, Index]:
        rows, good = [], 0
        with (
            open_table(self.path) as (table, *columns),
            indexing(self.path, table.metadata.num_rows, "row") as bar,
        ):
            for batch in table.iter_batches(_BATCH_ROWS):
                for record in _records(batch):
                    line, size = _line(record, *columns)
                    good += line != _NO_ROW
                    rows.append((len(rows), isal_zlib.crc32(line), *size))
                bar.update(batch.num_rows)
        if not good:
            raise PartError(
                f"none of the rows of {self.path} has both image bytes in {columns[0]!r} and a text in {columns[1]!r}"
            )
        return self.path, store_rows(self.path, self.way, rows)


class _GroupReader:
    """Rows of a parquet file by their number. `image`, `caption`: names of columns. Raises PartError."""

    def __init__(self, path: Path):
        import pyarrow.parquet as pq

        with open_table(path) as (table, self.image, self.caption):
            metadata = table.metadata
            groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        self._starts = np.cumsum([0, *(group.num_rows for group in groups)])
        self._bytes = [group.total_byte_size for group in groups]
        self._table = pq.ParquetFile(path)
        self._batches = None  # of a large group: (group, what is left of its batches)
        self._first, self._batch = 0, None

    def read(self, row: int, where: str) -> dict | None:
        """A record, as `_records` has it. Raises RowError "unreadable"."""
        import pyarrow as pa

        group = int(np.searchsorted(self._starts, row, side="right")) - 1
        try:
            if self._bytes[group] <= _LARGE_GROUP_BYTES:
                rows, first = self._read_group(group), int(self._starts[group])
            else:
                rows, first = self._read_batch(group, row)
            return next(_records(rows.slice(row - first, 1)))
        except (pa.ArrowException, OSError) as error:
            raise RowError("unreadable", f"{where}: damaged parquet data ({_one_line(error)}); get it again") from error

    def close(self) -> None:
        """Give file and memory back."""
        for key in [key for key in _CACHE if key[0] is self]:
            _CACHE.pop(key, None)
        self._batches = self._batch = None
        self._table.close()

    def _read_group(self, group: int):
        key = self, group
        if key in _CACHE:
            _CACHE.move_to_end(key)
            return _CACHE[key]
        rows = _CACHE[key] = self._table.read_row_group(group, use_threads=False)
        while sum(kept.nbytes for kept in _CACHE.values()) > _CACHE_BYTES and len(_CACHE) > 1:
            _CACHE.popitem(last=False)
        return rows

    def _read_batch(self, group: int, row: int):
        """The batch with a row, found by reading on from the last one where it comes after it."""
        if self._batches is None or self._batches[0] != group or row < self._first:
            batches = self._table.iter_batches(_BATCH_ROWS, row_groups=[group], use_threads=False)
            self._batches, self._batch, self._first = (group, batches), None, int(self._starts[group])
        while self._batch is None or row >= self._first + self._batch.num_rows:
            self._first += 0 if self._batch is None else self._batch.num_rows
            self._batch = next(self._batches[1])
        return self._batch, self._first


# (reader, number of the group): its rows, the latest last.
_CACHE: OrderedDict = OrderedDict()


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

"""`format=parquet`: tables with the bytes of an image and a caption, as Hugging Face data sets and img2dataset write.

An image is read by itself, from its page (`parquet_pages`); all other columns, which are small, by row group, and kept
as the beginnings of the lines that rows make. What is not written so is read by row group whole, or, of a large one, in
batches up to the row (`parquet_groups`). What is kept is bounded in a process, whatever the number of tables.

The index holds row numbers, image sizes, and in place of lengths the CRC-32s of the lines, since parquet seldom has
checksums. A row without image or caption stays a row, one with too few columns.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pybase64
from isal import isal_zlib

from ....utils.errors import PartError, RowError
from ...images.decode import image_size
from ..base import IndexedRows, find_column, indexing, is_plain, store_rows
from ..index.cache import IndexSpec
from ..index.entries import PARQUET_ROWS, Index
from ..layouts import DEFAULT_LAYOUT, LAYOUTS
from ..open_file import OpenFile
from ..row import Row, decode_row, decode_text_columns, encode_text_columns
from .byte_cache import ByteCache
from .groups import GroupReader
from .pages import BinaryColumn, Chunk, UnknownPages, is_known

IMAGE_COLUMNS = ("image", "jpg", "jpeg", "png", "webp", "image_bytes")
CAPTION_COLUMNS = ("text", "caption", "txt", "TEXT")
_BATCH_ROWS = 64
_NO_ROW = b"\t\n"
_CACHE = ByteCache(256 << 20)  # row groups, and pages that are decoded whole
_TEXTS = ByteCache(64 << 20)
_TEXT_ROWS = 256  # whose beginnings are made together; the order's runs are of as many
_LARGE_TEXT_BYTES = 64 << 20

# The line of a row up to its image, empty without a caption; its image.
_Line = tuple[bytes, bytes | None]


class ParquetTable(IndexedRows):
    """The rows of a parquet file: the first column of IMAGE_COLUMNS that is there holds the image, as bytes or as a
    struct with `bytes`, the first of CAPTION_COLUMNS the caption; the others are metadata."""

    spec = IndexSpec((PARQUET_ROWS,))

    def __init__(self, path):
        super().__init__(path)
        self._reader = None

    def read(self, row: int) -> Row:
        where = self._where(row)
        self._file.read(0, 0, where)  # notices a change
        if self._reader is None:
            self._reader = _LineReader(self.path, self._file)
        head, image = self._reader.read(row, where)
        if _crc32(head, image) != self._index.lengths[row]:
            raise RowError("unreadable", f"{where}: damaged parquet data (checksum); get it again")
        if not (head and image):
            return decode_row(_NO_ROW, where)  # raises
        caption, meta = decode_text_columns(head, where, LAYOUTS[DEFAULT_LAYOUT])
        return Row(caption, image, meta)

    def close(self) -> None:
        if self._reader:
            self._reader.close()
        super().close()

    def _decode(self, data: bytes, where: str) -> Row:
        raise NotImplementedError  # rows are not bytes of the file

    def _build(self) -> tuple[Path, Index]:
        rows, good = [], 0
        with (
            open_table(self.path) as (table, *columns),
            indexing(self.path, table.metadata.num_rows, "row") as bar,
        ):
            for batch in table.iter_batches(_BATCH_ROWS):
                for record in _records(batch):
                    head, image = _line(record, *columns)
                    is_good = bool(head and image)
                    good += is_good
                    rows.append((len(rows), _crc32(head, image), *(image_size(image) if is_good else (0, 0))))
                bar.update(batch.num_rows)
        if not good:
            raise PartError(
                f"none of the rows of {self.path} has both image bytes in {columns[0]!r} and a text in {columns[1]!r}"
            )
        return store_rows(self.path, self.spec, rows)


class _LineReader:
    """Lines of a parquet file by their row number. Raises PartError."""

    def __init__(self, path: Path, file: OpenFile):
        import pyarrow.parquet as pq

        with open_table(path) as (table, self._image, self._caption):
            metadata = table.metadata
            groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
            leaf = _find_leaf(table, self._image)
            self._others = [table.schema.column(i).path for i in range(metadata.num_columns) if i != leaf]
            self._images = self._open_images(table, leaf, groups, file)
        self._starts = np.cumsum([0, *(group.num_rows for group in groups)])
        self._table = pq.ParquetFile(path)
        self._groups = GroupReader(self._table, groups, self._starts, _CACHE)

    def read(self, row: int, where: str) -> _Line:
        """A line. Raises RowError "unreadable"."""
        import pyarrow as pa

        group = int(np.searchsorted(self._starts, row, side="right")) - 1
        try:
            if group in self._by_page:
                try:
                    place = row - int(self._starts[group])
                    return self._read_head(group, place), self._images.read(group, place, where)
                except UnknownPages:
                    self._by_page.discard(group)
            return _line(next(_records(self._groups.read(group, row))), self._image, self._caption)
        except (pa.ArrowException, OSError) as error:
            raise RowError("unreadable", f"{where}: damaged parquet data ({_one_line(error)}); get it again") from error

    def close(self) -> None:
        """Give file and memory back."""
        _TEXTS.drop(self)
        self._images.close()
        self._groups.close()
        self._table.close()

    def _open_images(self, table, leaf: int | None, groups: list, file: OpenFile) -> BinaryColumn:
        """The column of images; `_by_page`: the groups that it may be able to read."""
        self._by_page, chunks = set(), []
        for number, group in enumerate(groups if leaf is not None else ()):
            column, level = group.column(leaf), table.schema.column(leaf).max_definition_level
            start = min(filter(None, (column.dictionary_page_offset, column.data_page_offset)), default=0)
            chunks.append(Chunk(start, start + column.total_compressed_size, group.num_rows, column.compression, level))
            texts = group.total_byte_size - column.total_uncompressed_size
            if is_known(column.compression) and texts <= _LARGE_TEXT_BYTES:
                self._by_page.add(number)
        return BinaryColumn(file, chunks, _CACHE)

    def _read_head(self, group: int, place: int) -> bytes:
        block = place // _TEXT_ROWS
        heads = _TEXTS.get((self, group, block), lambda: self._make_heads(group, block * _TEXT_ROWS))
        return heads[place % _TEXT_ROWS]

    def _make_heads(self, group: int, start: int) -> tuple[list[bytes], int]:
        texts = _CACHE.get((self._groups, "texts", group), lambda: self._groups.read_columns(group, self._others))
        records = _records(texts.slice(start, _TEXT_ROWS))
        heads = [_line(record, self._image, self._caption)[0] for record in records]
        return heads, sum(map(len, heads)) + 60 * len(heads)


def _find_leaf(table, column: str) -> int | None:
    """The number of the physical column with the bytes of an image column; None where it is not as plain as that."""
    import pyarrow as pa

    if table.schema_arrow.names.count(column) != 1:
        return None
    kind, path = table.schema_arrow.field(column).type, column
    if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        kind, path = kind.field("bytes").type, f"{column}.bytes"
    paths = [table.schema.column(i).path for i in range(table.metadata.num_columns)]
    if not (pa.types.is_binary(kind) or pa.types.is_large_binary(kind)) or paths.count(path) != 1:
        return None
    leaf = table.schema.column(paths.index(path))
    return paths.index(path) if leaf.physical_type == "BYTE_ARRAY" and not leaf.max_repetition_level else None


@contextmanager
def open_table(path: Path) -> Iterator[tuple]:
    """(pyarrow ParquetFile, name of the image column, of the caption column). Raises PartError, also in the block."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as table:
            names = table.schema_arrow.names
            yield table, *(find_column(names, known, path) for known in (IMAGE_COLUMNS, CAPTION_COLUMNS))
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise PartError(f"{path} is not a parquet file, or is damaged ({_one_line(error)}); get it again") from error


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
        return b"", None
    caption, image, meta = split_record(record, image_column, caption_column)
    return (encode_text_columns(caption, meta), image) if caption else (b"", None)


def split_record(record: dict, image_column: str, caption_column: str) -> tuple[str, bytes | None, dict]:
    """(caption, "" where there is no text; encoded image, None where there are no bytes; metadata) of a row."""
    image, caption = record.get(image_column), record[caption_column]
    image = image.get("bytes") if isinstance(image, dict) else image
    caption = " ".join(caption.split()) if isinstance(caption, str) else ""
    columns = (image_column, caption_column)
    meta = {name: value for name, value in record.items() if name not in columns and is_plain(value)}
    return caption, image if isinstance(image, bytes) else None, meta


def _crc32(head: bytes, image: bytes | None) -> int:
    """Of a row's line; of an empty one where it has no caption or no image."""
    if not (head and image):
        return isal_zlib.crc32(_NO_ROW)
    return isal_zlib.crc32(b"\n", isal_zlib.crc32(pybase64.b64encode(image), isal_zlib.crc32(head)))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]

"""`format=parquet`: tables with the bytes of an image and a caption, as Hugging Face data sets and img2dataset write.

Images are read by themselves, from their pages (`parquet.pages`); all other columns, which are small, by row group, and
kept as the beginnings of the lines that rows make. What is not written so is read by row group whole, or, of a large
one, in batches up to the row (`parquet.groups`). What is kept is bounded in a process, whatever the number of tables.

The index holds row numbers, image sizes, and in place of lengths the CRC-32s of the lines, since parquet seldom has
checksums. A row without image or caption stays a row, one with too few columns. In `layout=control` the first of
CONTROL_COLUMNS that is there holds the second image, as the first column does.
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
from ..layouts import CONTROL_COLUMNS, DEFAULT_LAYOUT, LAYOUTS
from ..open_file import OpenFile
from ..row import Row, decode_row, decode_text_columns, encode_text_columns
from ..sample_files import CAPTION_KEYS
from .byte_cache import ByteCache
from .groups import GroupReader
from .pages import BinaryColumn, Chunk, UnknownPages, is_known

IMAGE_COLUMNS = ("image", "jpg", "jpeg", "png", "webp", "image_bytes")
CAPTION_COLUMNS = CAPTION_KEYS
_BATCH_ROWS = 64
_NO_ROW = b"\t\n"
_CACHE = ByteCache(256 << 20)  # row groups, and pages that are decoded whole
_TEXTS = ByteCache(64 << 20)
_TEXT_ROWS = 256  # whose beginnings are made together; the order's runs are of as many
_LARGE_TEXT_BYTES = 64 << 20

# The line of a row up to its image, empty without a caption; its image; its second image.
_Line = tuple[bytes, bytes | None, bytes | None]


class ParquetTable(IndexedRows):
    """The rows of a parquet file: the first column of IMAGE_COLUMNS that is there holds the image, as bytes or as a
    struct with `bytes`, the first of CAPTION_COLUMNS the caption; the others are metadata."""

    spec = IndexSpec((PARQUET_ROWS,))

    def __init__(self, path, layout: str = DEFAULT_LAYOUT):
        super().__init__(path, layout)
        self._reader = None

    def read(self, row: int) -> Row:
        where = self._where(row)
        self._file.read(0, 0, where)  # notices a change
        if self._reader is None:
            self._reader = _LineReader(self.path, self._file, self._has_control)
        head, image, control = self._reader.read(row, where)
        if _crc32(head, image, control) != self._index.lengths[row]:
            raise RowError("unreadable", f"{where}: damaged parquet data (checksum); get it again")
        if not (head and image):
            return decode_row(_NO_ROW, where)  # raises
        if self._has_control and not control:
            raise RowError("no_control", f"{where} has no second image ({', '.join(CONTROL_COLUMNS)})")
        caption, meta = decode_text_columns(head, where, LAYOUTS[DEFAULT_LAYOUT])
        return Row(caption, image, meta, control=control or b"")

    def close(self) -> None:
        if self._reader:
            self._reader.close()
        super().close()

    def _decode(self, data: bytes, where: str) -> Row:
        raise NotImplementedError  # rows are not bytes of the file

    def _build(self) -> tuple[Path, Index]:
        rows, good = [], 0
        with (
            open_table(self.path, self._has_control) as (table, *columns),
            indexing(self.path, table.metadata.num_rows, "row") as bar,
        ):
            for batch in table.iter_batches(_BATCH_ROWS):
                for record in _records(batch):
                    line = _line(record, *columns)
                    is_good = bool(line[0] and line[1])
                    good += is_good
                    rows.append((len(rows), _crc32(*line), *(image_size(line[1]) if is_good else (0, 0))))
                bar.update(batch.num_rows)
        if not good:
            raise PartError(
                f"none of the rows of {self.path} has both image bytes in {columns[0]!r} and a text in {columns[1]!r}"
            )
        return store_rows(self.path, self.spec, rows)


class _LineReader:
    """Lines of a parquet file by their row number. Raises PartError."""

    def __init__(self, path: Path, file: OpenFile, has_control: bool = False):
        import pyarrow.parquet as pq

        with open_table(path, has_control) as (table, *self._columns):
            metadata = table.metadata
            groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
            leaves = [_find_leaf(table, name) for name in (self._columns[0], self._columns[2]) if name]
            self._others = [table.schema.column(i).path for i in range(metadata.num_columns) if i not in leaves]
            self._images = [self._open_images(table, leaf, groups, file) for leaf in leaves if None not in leaves]
            self._by_page = _find_readable(groups, leaves)
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
                    image, *further = [one.read(group, place, where) for one in self._images]
                    return self._read_head(group, place), image, further[0] if further else None
                except UnknownPages:
                    self._by_page.discard(group)
            return _line(next(_records(self._groups.read(group, row))), *self._columns)
        except (pa.ArrowException, OSError) as error:
            raise RowError("unreadable", f"{where}: damaged parquet data ({_one_line(error)}); get it again") from error

    def close(self) -> None:
        """Give file and memory back."""
        _TEXTS.drop(self)
        for images in self._images:
            images.close()
        self._groups.close()
        self._table.close()

    def _open_images(self, table, leaf: int, groups: list, file: OpenFile) -> BinaryColumn:
        chunks, level = [], table.schema.column(leaf).max_definition_level
        for column, rows in ((group.column(leaf), group.num_rows) for group in groups):
            start = min(filter(None, (column.dictionary_page_offset, column.data_page_offset)), default=0)
            chunks.append(Chunk(start, start + column.total_compressed_size, rows, column.compression, level))
        return BinaryColumn(file, chunks, _CACHE)

    def _read_head(self, group: int, place: int) -> bytes:
        block = place // _TEXT_ROWS
        heads = _TEXTS.get((self, group, block), lambda: self._make_heads(group, block * _TEXT_ROWS))
        return heads[place % _TEXT_ROWS]

    def _make_heads(self, group: int, start: int) -> tuple[list[bytes], int]:
        texts = _CACHE.get((self._groups, "texts", group), lambda: self._groups.read_columns(group, self._others))
        records = _records(texts.slice(start, _TEXT_ROWS))
        heads = [_line(record, *self._columns)[0] for record in records]
        return heads, sum(map(len, heads)) + 60 * len(heads)


def _find_readable(groups: list, leaves: list[int | None]) -> set[int]:
    """The row groups whose images, the columns `leaves`, may be read by page, and whose other columns are small."""

    def is_readable(group) -> bool:
        columns = [group.column(leaf) for leaf in leaves]
        texts = group.total_byte_size - sum(column.total_uncompressed_size for column in columns)
        return all(is_known(column.compression) for column in columns) and texts <= _LARGE_TEXT_BYTES

    return set() if None in leaves else {number for number, group in enumerate(groups) if is_readable(group)}


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
def open_table(path: Path, has_control: bool = False) -> Iterator[tuple]:
    """(pyarrow ParquetFile, name of the image column, of the caption column, of that of second images or None). Raises
    PartError, also in the block."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as table:
            names = table.schema_arrow.names
            columns = [find_column(names, known, path) for known in (IMAGE_COLUMNS, CAPTION_COLUMNS)]
            yield table, *columns, find_column(names, CONTROL_COLUMNS, path) if has_control else None
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


def _line(record: dict | None, *columns: str | None) -> _Line:
    if record is None:
        return b"", None, None
    caption, image, control, meta = split_record(record, *columns)
    return (encode_text_columns(caption, meta), image, control) if caption else (b"", None, None)


def split_record(
    record: dict, image_column: str, caption_column: str, control_column: str | None
) -> tuple[str, bytes | None, bytes | None, dict]:
    """(caption, "" where there is no text; encoded image and second image, None where there are no bytes; metadata) of
    a row."""
    caption, columns = record[caption_column], (image_column, caption_column, control_column)
    caption = " ".join(caption.split()) if isinstance(caption, str) else ""
    images = [record.get(name) for name in (image_column, control_column)]
    images = [one.get("bytes") if isinstance(one, dict) else one for one in images]
    image, control = (one if isinstance(one, bytes) else None for one in images)
    return caption, image, control, {k: v for k, v in record.items() if k not in columns and is_plain(v)}


def _crc32(head: bytes, image: bytes | None, control: bytes | None) -> int:
    """Of a row's line; of an empty one where it has no caption or no image."""
    if not (head and image):
        return isal_zlib.crc32(_NO_ROW)
    crc32 = isal_zlib.crc32(pybase64.b64encode(image), isal_zlib.crc32(head))
    if control:
        crc32 = isal_zlib.crc32(pybase64.b64encode(control), isal_zlib.crc32(b"\t", crc32))
    return isal_zlib.crc32(b"\n", crc32)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]

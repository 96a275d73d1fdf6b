"""`format=parquet`: tables with the bytes of an image and a caption, as Hugging Face data sets and img2dataset write.

Row groups have no way into their middle, so the rows are read from a copy of the file (`formats.base`): a line each, as
a part has it. A row without image or caption stays a row, whose line has too few columns."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pybase64

from ...utils.checksums import measure_file
from ...utils.errors import PartError, RowError
from ..images import image_size
from . import base
from .folder import CAPTION_KEYS
from .index import PARQUET_LINES, Index, IndexSpec
from .layouts import CONTROL_COLUMNS, CONTROL_LAYOUT, LAYOUTS
from .row import Row, decode_row, encode_text_columns

IMAGE_COLUMNS = ("image", "jpg", "jpeg", "png", "webp", "image_bytes")
CAPTION_COLUMNS = CAPTION_KEYS
_BATCH_ROWS = 64
_NO_ROW = b"\t\n"


class ParquetTable(base.LineRows):
    """The rows of a parquet file: the first column of IMAGE_COLUMNS that is there holds the image, as bytes or as a
    struct with `bytes`, the first of CAPTION_COLUMNS the caption; the others are metadata."""

    spec = IndexSpec((PARQUET_LINES,))

    def _decode(self, data: bytes, where: str) -> Row:
        if not self._has_control or data == _NO_ROW:
            return decode_row(data, where)
        if data.count(b"\t") < LAYOUTS[CONTROL_LAYOUT].num_columns - 1:
            raise RowError("no_control", f"{where} has no second image ({', '.join(CONTROL_COLUMNS)})")
        return decode_row(data, where, LAYOUTS[CONTROL_LAYOUT])

    @property
    def _copy_kind(self) -> str:
        return ".control.lines" if self._has_control else ".lines"

    def _build(self) -> tuple[Path, Index]:
        rows, offset, good = [], 0, 0
        content = measure_file(self.path)
        with (
            base.making_copy(self.path, content, self._copy_kind) as write,
            open_table(self.path, self._has_control) as opened,
        ):
            table, *columns = opened
            with base.indexing(self.path, table.metadata.num_rows, "row") as bar:
                for record in read_records(table, 0, table.metadata.num_rows):
                    line, image = _make_line(record, *columns)
                    write(line)
                    good += image is not None
                    rows.append((offset, len(line), *(image_size(image) if image else (0, 0))))
                    offset += len(line)
                    bar.update()
            if not good:
                raise PartError(
                    f"none of the rows of {self.path} has both image bytes in {columns[0]!r} and a text in "
                    f"{columns[1]!r}"
                )
        return base.store_rows(self.path, self.spec, rows, content)


@contextmanager
def open_table(path: Path, has_control: bool = False, image: str = "", caption: str = "") -> Iterator[tuple]:
    """(pyarrow ParquetFile; columns of image, caption, second image or None); those named, else the known ones. Raises
    PartError, also in the block."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as table:
            names = table.schema_arrow.names
            known = (image,) if image else IMAGE_COLUMNS, (caption,) if caption else CAPTION_COLUMNS
            columns = [base.find_column(names, one, path) for one in known]
            yield table, *columns, base.find_column(names, CONTROL_COLUMNS, path) if has_control else None
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        problem = " ".join(str(error).split())[:200]
        raise PartError(f"{path} is not a parquet file, or is damaged ({problem}); get it again") from error


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


def _make_line(record: dict | None, *columns: str | None) -> tuple[bytes, bytes | None]:
    """(the line of a row, its image); without a caption or an image, a line that is no row, and None."""
    if record is None:
        return _NO_ROW, None
    caption, image, control, meta = split_record(record, *columns)
    if not (caption and image):
        return _NO_ROW, None
    images = b"\t".join(pybase64.b64encode(one) for one in (image, control) if one)
    return encode_text_columns(caption, meta) + images + b"\n", image


def split_record(
    record: dict, image_column: str, caption_column: str, control_column: str | None
) -> tuple[str, bytes | None, bytes | None, dict]:
    """(caption, "" if there is no text; encoded image and second image, None without bytes; metadata) of a row."""
    caption, columns = record[caption_column], (image_column, caption_column, control_column)
    caption = " ".join(caption.split()) if isinstance(caption, str) else ""
    images = [record.get(name) for name in (image_column, control_column)]
    images = [one.get("bytes") if isinstance(one, dict) else one for one in images]
    image, control = (one if isinstance(one, bytes) else None for one in images)
    return caption, image, control, {k: v for k, v in record.items() if k not in columns and base.is_plain(v)}

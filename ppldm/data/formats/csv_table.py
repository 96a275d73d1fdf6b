"""`format=csv`: a table of pictures and captions, such as `dir,text`, with a header line and quotes as RFC 4180 says.

The picture's path is taken from the folder of the table. Other columns are metadata, numbers as numbers.
"""

import csv
import json
from collections.abc import Iterator
from pathlib import Path

from ...utils.errors import PartError, RowError
from .base import MAX_ROW_BYTES, IndexedRows, indexing, read_file, read_image_size, store_rows
from .index import CSV_RECORDS, Index
from .index_cache import IndexSpec
from .row import Row
from .sample_files import decode_text

IMAGE_COLUMNS = ("dir", "path", "image", "file", "filepath")
CAPTION_COLUMNS = ("text", "caption", "title")

# A field that is longer is an error of the whole table; by default that is 131,072 characters.
csv.field_size_limit(MAX_ROW_BYTES)


class CsvTable(IndexedRows):
    """The records of a CSV file: the first column of IMAGE_COLUMNS that is there names the picture, the first of
    CAPTION_COLUMNS is the caption."""

    spec = IndexSpec((CSV_RECORDS,))

    def __init__(self, path):
        path = Path(path)
        try:
            with open(path, "rb") as file:
                self._columns = next(read_records(file, path))[2]
        except StopIteration:
            raise PartError(f"{path} is empty; its first line should name the columns, such as dir,text") from None
        except OSError as error:
            raise PartError(f"cannot read {path}: {error.strerror}; correct its line in the filelist") from error
        self._image = _find_column(self._columns, IMAGE_COLUMNS, path)
        self._caption = _find_column(self._columns, CAPTION_COLUMNS, path)
        super().__init__(path)

    def _build(self) -> tuple[Path, Index]:
        total = self.path.stat().st_size
        table, with_size = [], 0
        with open(self.path, "rb") as file, indexing(self.path, total, "B") as bar:
            records = read_records(file, self.path)
            next(records)
            for offset, length, fields in records:
                complete = len(fields) == len(self._columns)
                size = read_image_size(self._image_path(fields)) if complete else (0, 0)
                with_size += size != (0, 0)
                table.append((offset, length, *size))
                if len(table) == 100 and not with_size:
                    break
                bar.update(offset + length - bar.n)
        if table and not with_size:
            raise PartError(
                f"none of the first {len(table)} pictures that {self.path} names can be read; they are looked for from "
                f"the folder {self.path.parent.resolve()}"
            )
        return self.path, store_rows(self.path, self.spec, table)

    def _decode(self, data: bytes, where: str) -> Row:
        try:
            fields = next(csv.reader([decode_text(data, where)]))
        except (csv.Error, StopIteration) as error:
            raise RowError("columns", f"{where}: not a record of the table ({error})") from error
        if len(fields) != len(self._columns):
            raise RowError("columns", f"{where}: {len(fields)} columns where the header has {len(self._columns)}")
        caption = " ".join(fields[self._caption].split())
        if not caption:
            raise RowError("empty_caption", f"{where} has no caption")
        rest = {
            name: number_or_text(text)
            for place, (name, text) in enumerate(zip(self._columns, fields, strict=True))
            if place not in (self._image, self._caption) and text
        }
        path = self._image_path(fields)
        return Row(caption, read_file(path, where), {"key": path.stem, **rest})

    def _image_path(self, fields: list[str]) -> Path:
        return self.path.parent / fields[self._image]


def list_images(path: Path) -> Iterator[Path]:
    """The pictures that a table names, in order; those of lines that are no rows too. Raises PartError."""
    with open(path, "rb") as file:
        records = read_records(file, path)
        _, _, columns = next(records, (0, 0, []))
        image = _find_column(columns, IMAGE_COLUMNS, path)
        yield from (path.parent / fields[image] for _, _, fields in records if image < len(fields))


def read_records(file, path: Path) -> Iterator[tuple[int, int, list[str]]]:
    """(offset from where the file stands, length, fields) of each record that is not blank. Raises PartError."""
    read = 0

    def lines():
        nonlocal read
        for number, line in enumerate(file):
            read += len(line)
            try:
                yield decode_text(line, f"line {number + 1}")
            except RowError as error:
                raise PartError(f"{path}: {error}; write the table in UTF-8") from error

    reader = csv.reader(lines())
    start = 0
    try:
        for fields in reader:
            if fields:
                yield start, read - start, fields
            start = read
    except csv.Error as error:
        raise PartError(f"{path} is no table of quoted columns, at line {reader.line_num} ({error})") from error


def _find_column(columns: list[str], names: tuple[str, ...], path: Path) -> int:
    for name in names:
        if name in columns:
            return columns.index(name)
    raise PartError(
        f"{path} has the columns {', '.join(columns)[:200]}; the first line must name one of {', '.join(names)}"
    )


def number_or_text(text: str) -> int | float | str:
    """The number that a text spells, else the text."""
    try:
        value = json.loads(text, parse_constant=lambda _: None)
    except ValueError:
        return text
    return value if type(value) in (int, float) else text

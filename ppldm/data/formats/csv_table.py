"""Tables that name pictures, with captions. `format=csv`: one such as `dir,text`, with a header line and quotes as RFC
4180 says; conversion reads JSON lines by the same rules. A picture's path is taken from the folder of the table. Other
columns are metadata, numbers as numbers. In `layout=control` the first of CONTROL_COLUMNS names the second image."""

import csv
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from ...utils.errors import PartError, RowError
from ...utils.log import get_logger
from . import base
from .folder import list_pictures
from .index import CSV_RECORDS, Index, IndexSpec, stat_part
from .layouts import CONTROL_COLUMNS, CONTROL_LAYOUT, DEFAULT_LAYOUT
from .row import Row, decode_text, find_name

# Of a Hugging Face imagefolder, the one that is used first. They come from elsewhere with their folder, and name
# pictures in it alone.
IMAGEFOLDER_TABLES = ("metadata.jsonl", "metadata.csv")
IMAGE_COLUMNS = ("dir", "path", "image", "file", "filepath", "file_name", "image_path", "filename", "image_name")
CAPTION_COLUMNS = ("text", "caption", "title", "txt", "prompt", "TEXT", "description")
KNOWN = IMAGE_COLUMNS, CAPTION_COLUMNS

# A field that is longer is an error of the whole table; by default that is 131,072 characters.
csv.field_size_limit(base.MAX_ROW_BYTES)


class CsvTable(base.IndexedRows):
    """The records of a CSV file, by the first columns of IMAGE_COLUMNS and CAPTION_COLUMNS that are there."""

    spec = IndexSpec((CSV_RECORDS,))

    def __init__(self, path, layout: str = DEFAULT_LAYOUT):
        stat_part(Path(path), self.spec)
        with open(path, "rb") as file:
            self._columns, _ = read_table(file, Path(path), layout == CONTROL_LAYOUT)
        super().__init__(path, layout)

    def _build(self) -> tuple[Path, Index]:
        table, with_size = [], 0
        with open(self.path, "rb") as file, base.indexing(self.path, self.path.stat().st_size, "B") as bar:
            for offset, length, fields in read_table(file, self.path)[1]:
                size = 0, 0
                if len(fields) == len(self._columns):
                    name = find_image(dict(zip(self._columns, fields, strict=True)))
                    if name and not leads_out(self.path, name):
                        size = base.read_image_size(self.path.parent / name)
                with_size += size != (0, 0)
                table.append((offset, length, *size))
                if len(table) == base.ROWS_TO_TRY and not with_size:
                    break
                bar.update(offset + length - bar.n)
        if table and not with_size:
            raise PartError(
                f"none of the first {len(table)} pictures that {self.path} names can be read; they are looked for from "
                f"the folder {self.path.parent.resolve()}"
            )
        if self.path.name in IMAGEFOLDER_TABLES:
            warn_of_unnamed(self.path, list_images(self.path, self._has_control))
        return base.store_rows(self.path, self.spec, table)

    def _decode(self, data: bytes, where: str) -> Row:
        try:
            fields = next(csv.reader([decode_text(data, where, "utf-8-sig")]))
        except (csv.Error, StopIteration) as error:
            raise RowError("columns", f"{where}: not a record of the table ({error})") from error
        values = parse_record(self._columns, fields, where)
        return make_row(values, self.path, where, has_control=self._has_control)


def list_images(path: Path, has_control: bool = False) -> Iterator[Path]:
    """The pictures that a table names, in order; those of lines that are not rows too. Raises PartError."""
    with open(path, "rb") as file:
        columns, records = read_table(file, path, has_control)
        kinds = (IMAGE_COLUMNS, CONTROL_COLUMNS) if has_control else (IMAGE_COLUMNS,)
        named = [columns.index(base.find_column(columns, kind, path)) for kind in kinds]
        yield from (path.parent / fields[one] for _, _, fields in records for one in named if one < len(fields))


def warn_of_unnamed(table: Path, named: Iterable[Path]) -> None:
    """Say how many pictures beside and below a table are not among those that its lines name."""
    pictures, lines = (set(map(os.path.normpath, paths)) for paths in (list_pictures(table.parent), named))
    if left := sorted(pictures - lines):
        get_logger().warning("%s: no line for %d picture(s) such as %s", table, len(left), left[0])


def read_table(
    file, path: Path, has_control: bool = False, known: tuple[tuple[str, ...], ...] = KNOWN
) -> tuple[list[str], Iterator[tuple[int, int, list[str]]]]:
    """(columns, records after the header as `read_records` has them) of a file at its beginning. Raises PartError where
    no column is among those of `known`, or names the second images that `has_control` asks for."""
    records = read_records(file, path)
    _, _, columns = next(records, (0, 0, None))
    if columns is None:
        raise PartError(f"{path} is empty; its first line should name the columns, such as dir,text")
    for names in (*known, *((CONTROL_COLUMNS,) if has_control else ())):
        base.find_column(columns, names, path)
    return columns, records


def read_records(file, path: Path) -> Iterator[tuple[int, int, list[str]]]:
    """(offset from where the file stands, length, fields) of each record that is not blank. Raises PartError."""
    start = read = 0

    def lines():
        nonlocal read
        for number, line in enumerate(file):
            read += len(line)
            yield decode_text(line, f"line {number + 1}", "utf-8-sig")

    reader = csv.reader(lines(), delimiter="\t" if path.suffix == ".tsv" else ",")
    try:
        for fields in reader:
            if fields:
                yield start, read - start, fields
            start = read
    except RowError as error:
        raise PartError(f"{path}: {error}") from error
    except csv.Error as error:
        raise PartError(f"{path} is not a table of quoted columns, at line {reader.line_num} ({error})") from error


def parse_record(columns: list[str], fields: list[str], where: str, known: tuple[tuple[str, ...], ...] = KNOWN) -> dict:
    """Values by column, numbers as numbers but for pictures, captions and keys. Raises RowError "columns"."""
    if len(fields) != len(columns):
        raise RowError("columns", f"{where}: {len(fields)} columns where the header has {len(columns)}")
    named, texts = zip(columns, fields, strict=True), {name.casefold() for name in (*known[0], *known[1], "key")}
    return {name: text if name.casefold() in texts else _number_or_text(text) for name, text in named}


def find_image(values: Mapping, names: tuple[str, ...] = IMAGE_COLUMNS) -> str | None:
    """The path of the picture that a line names, under the first of `names` that it has; None where it names none."""
    value = values.get(_first(values, names))
    return value if isinstance(value, str) and value else None


def leads_out(table: Path, name: str) -> bool:
    """Whether the table of an imagefolder names what is not in its folder."""
    is_out = os.path.isabs(name) or os.path.normpath(name).split("/")[0] == ".."
    return is_out and table.name in IMAGEFOLDER_TABLES


def make_row(
    values: Mapping, table: Path, where: str, known: tuple[tuple[str, ...], ...] = KNOWN, has_control: bool = False
) -> Row:
    """The row of a line of a table, its values by column; `known`: names of that of pictures and that of captions.
    Raises RowError "no_image", "outside", "no_control" as asked for, "no_caption", "empty_caption", "unreadable"."""
    names, captions = known
    image = find_image(values, names)
    if image is None:
        raise RowError("no_image", f"{where} names no picture ({', '.join(names)})")
    second = find_image(values, CONTROL_COLUMNS) if has_control else None
    if has_control and second is None:
        raise RowError("no_control", f"{where} names no second image ({', '.join(CONTROL_COLUMNS)})")
    for name in filter(None, (image, second)):
        if leads_out(table, name):
            problem = f"{where} names {name}, which is outside the folder of {table.name}; move it there"
            raise RowError("outside", problem)
    caption = _first(values, captions)
    if caption is None:
        raise RowError("no_caption", f"{where} has no caption ({', '.join(captions)})")
    text = " ".join(str(values[caption]).split())
    if not text:
        raise RowError("empty_caption", f"{where} has an empty caption")
    used = {_first(values, names), caption, _first(values, CONTROL_COLUMNS) if has_control else None}
    meta = {name: value for name, value in values.items() if name not in used and base.is_plain(value) and value != ""}
    control = base.read_file(table.parent, second, where) if second else b""
    return Row(text, base.read_file(table.parent, image, where), {"key": Path(image).stem, **meta}, control=control)


def _first(values: Mapping, names: tuple[str, ...]) -> str | None:
    return find_name([name for name, value in values.items() if value is not None], names)


def _number_or_text(text: str) -> int | float | str:
    """The number that a text spells, else the text."""
    try:
        value = json.loads(text, parse_constant=lambda _: None)
    except ValueError:
        return text
    return value if type(value) in (int, float) else text

"""Units that are tables of names of pictures, with captions: CSV files, JSON lines, Hugging Face's imagefolder.

A picture's path is taken from the folder of its table. Other columns are metadata.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...data.formats.csv_table import CAPTION_COLUMNS, IMAGE_COLUMNS, number_or_text, read_records
from ...data.formats.parquet.table import is_plain
from ...data.formats.row import Row
from ...data.formats.sample_files import decode_meta
from ...utils.errors import PartError, RowError
from ...utils.jobs import Piece
from .source import Span, read_bytes

# Of a Hugging Face imagefolder, the one that is used first.
IMAGEFOLDER_TABLES = ("metadata.jsonl", "metadata.csv")

_IMAGE_NAMES = ("file_name", *IMAGE_COLUMNS, "image_path")
_CAPTION_NAMES = (*CAPTION_COLUMNS, "txt", "prompt", "TEXT")


@dataclass(frozen=True)
class _NamedRow:
    """A line of a table; `values` is what its columns say, or the error that says why they cannot be read."""

    key: str
    folder: Path
    values: dict | RowError

    @property
    def image(self) -> Path | None:
        """The path of the picture."""
        name = _first(self.values, _IMAGE_NAMES) if isinstance(self.values, dict) else None
        return self.folder / name if isinstance(name, str) and name else None

    def load(self) -> Row:
        """Raises RowError "columns", "metadata", "no_image", "no_caption", "empty_caption", "unreadable"."""
        if isinstance(self.values, RowError):
            raise self.values
        if self.image is None:
            raise RowError("no_image", f"no picture is named ({', '.join(_IMAGE_NAMES)})")
        caption = _first(self.values, _CAPTION_NAMES)
        if caption is None:
            raise RowError("no_caption", f"{self.image.name} has no caption ({', '.join(_CAPTION_NAMES)})")
        text = " ".join(str(caption).split())
        if not text:
            raise RowError("empty_caption", f"{self.image.name} has an empty caption")
        used = {_first_name(self.values, _IMAGE_NAMES), _first_name(self.values, _CAPTION_NAMES)}
        rest = {name: value for name, value in self.values.items() if name not in used and is_plain(value)}
        return Row(text, read_bytes(self.image), {name: value for name, value in rest.items() if value != ""})


class _TableUnit:
    """What CSV files and JSON lines share: spans of bytes, cut between records."""

    path: Path

    def spans(self, rows: int) -> list[Span]:
        spans, starts = [], []
        for start, stop in self._places():
            if len(starts) == rows:
                spans.append(Span(starts[0], start, rows))
                starts = []
            starts.append(start)
            end = stop
        return [*spans, Span(starts[0], end, len(starts))] if starts else spans

    def input_pieces(self, span: Span) -> list[Piece]:
        with open(self.path, "rb") as file:
            head = len(file.readline())
        table = [Piece(self.path, self.path.name, 0, head), Piece(self.path, self.path.name, span.start, span.stop)]
        return table + [Piece(row.image, row.image.name) for row in self.read(span) if row.image]

    def read(self, span: Span) -> Iterator[_NamedRow]:
        with open(self.path, "rb") as file:
            yield from self._rows(file, span)

    def _row(self, number: str, values: dict | RowError) -> _NamedRow:
        key = values.get("key") if isinstance(values, dict) else None
        row = _NamedRow(number, self.path.parent, values)
        return _NamedRow(str(key or (row.image.stem if row.image else number)), self.path.parent, values)


@dataclass(frozen=True)
class CsvUnit(_TableUnit):
    """A CSV file, quoted as RFC 4180 says, whose first line names the columns; `part_1.csv` of `ppldm annotate`."""

    path: Path

    def _places(self) -> Iterator[tuple[int, int]]:
        with open(self.path, "rb") as file:
            records = read_records(file, self.path)
            header = next(records, None)
            if header is None or not set(header[2]) & set(_IMAGE_NAMES):
                raise PartError(f"{self.path} does not name pictures; its first line should, such as dir,text")
            yield from ((offset, offset + length) for offset, length, _ in records)

    def _rows(self, file, span: Span) -> Iterator[_NamedRow]:
        header = next(read_records(file, self.path))[2]
        file.seek(span.start)
        for number, (offset, _, fields) in enumerate(read_records(file, self.path)):
            if number == span.rows:
                return
            place = f"byte {span.start + offset}"
            if len(fields) != len(header):
                problem = f"{len(fields)} columns at {place} where the header has {len(header)}"
                yield self._row(place, RowError("columns", problem))
                continue
            named = dict(zip(header, fields, strict=True))
            texts = (*_IMAGE_NAMES, *_CAPTION_NAMES, "key")
            yield self._row(place, {k: v if k in texts else number_or_text(v) for k, v in named.items()})


@dataclass(frozen=True)
class JsonLinesUnit(_TableUnit):
    """A JSON object a line, as `metadata.jsonl` of an imagefolder: `{"file_name": "0001.png", "text": "a dog"}`."""

    path: Path

    def _places(self) -> Iterator[tuple[int, int]]:
        with open(self.path, "rb") as file:
            stop = 0
            for line in file:
                start, stop = stop, stop + len(line)
                if line.strip():
                    yield start, stop

    def _rows(self, file, span: Span) -> Iterator[_NamedRow]:
        file.seek(span.start)
        offset = span.start
        while offset < span.stop:
            line = file.readline()
            if line.strip():
                place = f"byte {offset}"
                try:
                    yield self._row(place, decode_meta(line, f"the line at {place}"))
                except RowError as error:
                    yield self._row(place, error)
            offset += len(line)


def _first(values: dict, names: tuple[str, ...]):
    name = _first_name(values, names)
    return None if name is None else values[name]


def _first_name(values: dict, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if values.get(name) is not None), None)

"""The units of a source: a folder of pictures, a tar, a parquet file or a table of names, each as its format reads it.

A unit says into which spans its rows fall (of a given number of rows, the last may have fewer), names the files or
bytes that a span is made from, and reads the rows of a span one by one, so that memory does not grow with the source.
Every row that a unit knows of comes out, the incomplete ones too: `load` says by a named `RowError` why a row cannot be
used, so that the converter can count it. With `has_control`, every row must have a second image (`formats.layouts`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

from ...data.formats.csv_table import (
    IMAGE_COLUMNS,
    find_image,
    leads_out,
    make_row,
    parse_record,
    read_records,
    read_table,
)
from ...data.formats.folder import list_samples, read_sample
from ...data.formats.folder_names import split_name
from ...data.formats.layouts import CONTROL_COLUMNS
from ...data.formats.mds.packed import is_packed, open_samples
from ...data.formats.mds.shard import MdsLayout
from ...data.formats.parquet_table import open_table, split_record
from ...data.formats.parquet_table import read_records as read_parquet_records
from ...data.formats.row import Row
from ...data.formats.sample_files import ALL_SUFFIXES, assemble_row, decode_meta
from ...data.formats.tar import read_samples, scan_samples
from ...utils.errors import PartError, RowError
from ...utils.jobs import Piece

KEY_DIGITS = 9  # as img2dataset writes keys
# The reason of rows of img2dataset's parquet files that are there to say that their download failed.
NOT_DOWNLOADED = "not_downloaded"
# Of a Hugging Face imagefolder this column names the picture, whatever else is there.
_IMAGE_COLUMNS = ("file_name", *IMAGE_COLUMNS)


@dataclass(frozen=True)
class Span:
    """Some consecutive rows of a unit. `start` and `stop`: rows, or bytes in the unit's file, as the unit has it."""

    start: int
    stop: int
    rows: int


@dataclass(frozen=True)
class SourceRow:
    """`key`: the row's name in its source. `load`: reads the row, its image as it is. Raises RowError."""

    key: str
    load: Callable[[], Row]


@dataclass(frozen=True)
class Unit(ABC):
    """Rows that are read together. It can be pickled: a worker process, or a Spark executor, reads its spans."""

    path: Path
    has_control: bool = False

    @abstractmethod
    def spans(self, rows: int) -> list[Span]:
        """Spans of at most that many rows, in order. Raises DataError where the unit cannot be read at all."""

    @abstractmethod
    def input_pieces(self, span: Span) -> list[Piece]:
        """The files, or bytes of them, that the rows of a span are made from."""

    @abstractmethod
    def read(self, span: Span) -> Iterator[SourceRow]:
        """The rows of a span."""


class FolderUnit(Unit):
    """A folder of pictures with captions, one base name a row."""

    def spans(self, rows: int) -> list[Span]:
        return _cut_rows(len(list_samples(self.path, self.has_control)), rows)

    def input_pieces(self, span: Span) -> list[Piece]:
        def place(name: str) -> int:
            return ALL_SUFFIXES.index(split_name(name, self.has_control)[1])

        return [Piece(self.path / name, name) for names in self._samples(span) for name in sorted(names, key=place)]

    def read(self, span: Span) -> Iterator[SourceRow]:
        for names in self._samples(span):
            key = split_name(names[0], self.has_control)[0]
            yield SourceRow(key, partial(read_sample, self.path, names, self.path.name, self.has_control))

    def _samples(self, span: Span) -> Iterator[list[str]]:
        samples = list_samples(self.path, self.has_control)
        return (samples[number] for number in range(span.start, min(span.stop, len(samples))))


class TarUnit(Unit):
    """A tar of samples. Where it is damaged, the samples before are rows, and the rest is one bad row, "tar"."""

    def spans(self, rows: int) -> list[Span]:
        return _cut(self._places(), rows)

    def input_pieces(self, span: Span) -> list[Piece]:
        return [Piece(self.path, self.path.name, span.start, span.stop)]

    def read(self, span: Span) -> Iterator[SourceRow]:
        left, problem = span.rows, f"{self.path.name} is damaged at its end; get it again"
        with open(self.path, "rb") as file:
            file.seek(span.start)
            try:
                with closing(read_samples(file, self.path)) as samples:
                    for key, files in islice(samples, span.rows):
                        left -= 1
                        own = Path(key).name, [*files.items()], self.path.name, None, self.has_control
                        yield SourceRow(key, partial(assemble_row, *own))
            except PartError as error:
                problem = str(error).replace(str(self.path), self.path.name)
        for _ in range(left):
            yield SourceRow(self.path.name, partial(_fail, RowError("tar", problem)))

    def _places(self) -> Iterator[tuple[int, int]]:
        end = 0
        try:
            with open(self.path, "rb") as file, closing(scan_samples(file, self.path)) as samples:
                for start, end in samples:
                    yield start, end
        except PartError:
            yield end, self.path.stat().st_size


class ParquetUnit(Unit):
    """A table with the bytes of a picture and a caption in each row, as `parquet_table` names columns."""

    def spans(self, rows: int) -> list[Span]:
        with open_table(self.path, self.has_control) as (table, *_):
            return _cut_rows(table.metadata.num_rows, rows)

    def input_pieces(self, span: Span) -> list[Piece]:
        with open_table(self.path) as (table, image, caption, _):
            start, stop = _find_bytes(table.metadata, span)
            # What the columns are called and hold stands elsewhere in the file.
            columns = str([image, caption, *((field.name, str(field.type)) for field in table.schema_arrow)])
        return [Piece(self.path, f"{self.path.name} {columns}", start, stop)]

    def read(self, span: Span) -> Iterator[SourceRow]:
        with open_table(self.path, self.has_control) as (table, *columns):
            for number, values in enumerate(read_parquet_records(table, span.start, span.stop), start=span.start):
                key = str((values or {}).get("key") or f"{number:0{KEY_DIGITS}}")
                yield SourceRow(key, partial(_load_record, key, values, *columns))


class MdsUnit(Unit):
    """A shard of MosaicML streaming, with an encoded picture and a caption in each row."""

    def spans(self, rows: int) -> list[Span]:
        layout = MdsLayout(self.path, self.has_control)
        if layout.image is None:
            raise PartError(f"{self.path} holds latents and no pictures; train on it by latents=cached")
        starts = layout.starts.tolist()
        return _cut(zip(starts[:-1], starts[1:], strict=True), rows)

    def input_pieces(self, span: Span) -> list[Piece]:
        # What the columns are stands elsewhere in the file.
        columns = str(MdsLayout(self.path).columns)
        place = () if is_packed(self.path) else (span.start, span.stop)
        return [Piece(self.path, f"{self.path.name} {columns}", *place)]

    def read(self, span: Span) -> Iterator[SourceRow]:
        layout = MdsLayout(self.path, self.has_control)
        first = int(np.searchsorted(layout.starts, span.start))
        with open_samples(self.path) as file:
            file.seek(span.start)
            for number in range(first, first + span.rows):
                data = file.read(int(layout.starts[number + 1] - layout.starts[number]))
                row = _or_error(layout.decode, data, f"{self.path.name} row {number}")
                failed = isinstance(row, RowError)
                key = str((not failed and row.meta.get("key")) or f"{number:0{KEY_DIGITS}}")
                yield SourceRow(key, partial(_fail, row) if failed else lambda row=row: row)


@dataclass(frozen=True)
class PackedUnit(Unit):
    """Small folders of pictures in parts of a chosen size: their rows one after another, whatever folder they lie in.

    Each folder makes parts of its own by default, so that a part depends on one folder only; thousands of folders with
    a few pictures each then make thousands of small parts. Packed, a part takes the next rows of as many folders as it
    needs, and each row says in its metadata, `folder`, which one it is from. `pieces`: the folders, relative to `path`,
    and the span of each.
    """

    pieces: tuple[tuple[str, Span], ...] = ()

    def spans(self, rows: int) -> list[Span]:
        """All of it, which has been cut to size."""
        total = sum(span.rows for _, span in self.pieces)
        return [Span(0, total, total)]

    def input_pieces(self, span: Span) -> list[Piece]:
        return [
            replace(piece, name=f"{name}/{piece.name}")
            for name, rows in self.pieces
            for piece in FolderUnit(self.path / name, self.has_control).input_pieces(rows)
        ]

    def read(self, span: Span) -> Iterator[SourceRow]:
        for name, piece in self.pieces:
            for row in FolderUnit(self.path / name, self.has_control).read(piece):
                yield row if name == "." else SourceRow(row.key, partial(_load_with_folder, row, name))


def _load_with_folder(source_row: SourceRow, folder: str) -> Row:
    """folder: from that of the whole source, which the row lies in. Raises RowError as the row itself."""
    row = source_row.load()
    return replace(row, meta=row.meta | {"folder": folder})


class _TableUnit(Unit):
    """What CSV files and JSON lines share: spans of bytes, cut between records; `_records` gives the place and the
    values, or the error, of each of a span."""

    def spans(self, rows: int) -> list[Span]:
        return _cut(self._places(), rows)

    def input_pieces(self, span: Span) -> list[Piece]:
        with open(self.path, "rb") as file:
            head = len(file.readline())
            kinds = (_IMAGE_COLUMNS, CONTROL_COLUMNS) if self.has_control else (_IMAGE_COLUMNS,)
            images = [self._image(values, kind) for _, values in self._records(file, span) for kind in kinds]
        table = [Piece(self.path, self.path.name, 0, head), Piece(self.path, self.path.name, span.start, span.stop)]
        return table + [Piece(image, image.name) for image in images if image]

    def read(self, span: Span) -> Iterator[SourceRow]:
        with open(self.path, "rb") as file:
            for place, values in self._records(file, span):
                if isinstance(values, RowError):
                    yield SourceRow(place, partial(_fail, values))
                    continue
                image = self._image(values, _IMAGE_COLUMNS)
                key = str(values.get("key") or (image.stem if image else place))
                where = f"{self.path.name}, {place}"
                own = values, self.path, where, _IMAGE_COLUMNS, self.has_control
                yield SourceRow(key, partial(make_row, *own))

    def _image(self, values: dict | RowError, names: tuple[str, ...]) -> Path | None:
        name = None if isinstance(values, RowError) else find_image(values, names)
        return self.path.parent / name if name and not leads_out(self.path, name) else None


class CsvUnit(_TableUnit):
    """A CSV file, quoted as RFC 4180 says, whose first line names the columns; `part_1.csv` of `ppldm annotate`."""

    def _places(self) -> Iterator[tuple[int, int]]:
        with open(self.path, "rb") as file:
            records = read_table(file, self.path, self.has_control)[1]
            yield from ((start, start + length) for start, length, _ in records)

    def _records(self, file, span: Span) -> Iterator[tuple[str, dict | RowError]]:
        file.seek(0)
        header, _ = read_table(file, self.path)
        file.seek(span.start)
        for offset, _, fields in islice(read_records(file, self.path), span.rows):
            place = f"byte {span.start + offset}"
            yield place, _or_error(parse_record, header, fields, place)


class JsonLinesUnit(_TableUnit):
    """A JSON object a line, as `metadata.jsonl` of an imagefolder: `{"file_name": "0001.png", "text": "a dog"}`."""

    def _places(self) -> Iterator[tuple[int, int]]:
        with open(self.path, "rb") as file:
            stop = 0
            for line in file:
                start, stop = stop, stop + len(line)
                if line.strip():
                    yield start, stop

    def _records(self, file, span: Span) -> Iterator[tuple[str, dict | RowError]]:
        file.seek(span.start)
        offset = span.start
        while offset < span.stop:
            line = file.readline()
            if line.strip():
                yield f"byte {offset}", _or_error(decode_meta, line, f"the line at byte {offset}")
            offset += len(line)


def pack(cut: Sequence[tuple[Unit, Span]], root: Path, rows: int) -> list[tuple[Unit, Span]]:
    """Units and their spans with those of folders, `root` or below it, joined to `rows` rows each; only the last before
    a unit of another kind, or of all, may have fewer. Order stays."""
    packed: list[tuple[Unit, Span]] = []
    pieces: list[tuple[str, Span]] = []

    def flush() -> None:
        if pieces:
            unit = PackedUnit(root, cut[0][0].has_control, tuple(pieces))
            packed.extend((unit, span) for span in unit.spans(rows))
            pieces.clear()

    for unit, span in cut:
        if not isinstance(unit, FolderUnit):
            flush()
            packed.append((unit, span))
            continue
        start = span.start
        while start < span.stop:
            room = rows - sum(piece.rows for _, piece in pieces)
            stop = min(span.stop, start + room)
            pieces.append((unit.path.relative_to(root).as_posix(), Span(start, stop, stop - start)))
            start = stop
            if room == pieces[-1][1].rows:
                flush()
    flush()
    return packed


def _cut_rows(total: int, rows: int) -> list[Span]:
    return [Span(start, min(start + rows, total), min(rows, total - start)) for start in range(0, total, rows)]


def _cut(places: Iterable[tuple[int, int]], rows: int) -> list[Span]:
    """Spans of rows that lie at the bytes [start, stop); each reaches to the beginning of the next."""
    spans, starts = [], []
    for start, stop in places:
        if len(starts) == rows:
            spans.append(Span(starts[0], start, rows))
            starts = []
        starts.append(start)
        end = stop
    return [*spans, Span(starts[0], end, len(starts))] if starts else spans


def _load_record(
    key: str, values: dict | None, image_column: str, caption_column: str, control_column: str | None
) -> Row:
    """Raises RowError "encoding", "no_image", "no_control", "empty_caption", and NOT_DOWNLOADED where the table says
    so."""
    if values is None:
        raise RowError("encoding", f"row {key} has text that is not UTF-8")
    caption, image, control, meta = split_record(values, image_column, caption_column, control_column)
    if not image:
        status = values.get("status")
        if status not in (None, "success"):
            why = str(values.get("error_message") or status)[:100]
            raise RowError(NOT_DOWNLOADED, f"row {key} was not downloaded ({why})")
        raise RowError("no_image", f"row {key} has no image in column {image_column!r}")
    if control_column and not control:
        raise RowError("no_control", f"row {key} has no second image in column {control_column!r}")
    if not caption:
        raise RowError("empty_caption", f"row {key} has no text in column {caption_column!r}")
    return Row(caption, image, meta, control=control or b"")


def _find_bytes(metadata, span: Span) -> tuple[int, int]:
    """The bytes [start, stop) of a parquet file that hold the row groups of a span."""
    starts, stops, first = [], [], 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        if first < span.stop and first + group.num_rows > span.start:
            for column in map(group.column, range(group.num_columns)):
                starts.append(column.dictionary_page_offset or column.data_page_offset)
                stops.append(starts[-1] + column.total_compressed_size)
        first += group.num_rows
    return min(starts, default=0), max(stops, default=0)


def _or_error(function: Callable[..., dict], *arguments) -> dict | RowError:
    try:
        return function(*arguments)
    except RowError as error:
        return error


def _fail(error: RowError) -> Row:
    raise error

"""Units whose pictures lie inside one file: WebDataset tars and parquet files, as img2dataset writes both."""

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from ...data.formats.parquet.table import is_plain, open_table, read_records
from ...data.formats.row import Row
from ...data.formats.sample_files import assemble_row
from ...data.formats.tar import read_samples, scan_samples
from ...utils.errors import PartError, RowError
from ...utils.jobs import Piece
from .source import KEY_DIGITS, NOT_DOWNLOADED, Span


@dataclass(frozen=True)
class _Sample:
    """The files of one base name of a tar."""

    key: str
    files: Mapping[str, bytes]

    def load(self) -> Row:
        """Raises RowError as `ppldm.data.formats.sample_files.assemble_row`."""
        return assemble_row(Path(self.key).name, self.files, "tar")


@dataclass(frozen=True)
class _BadRow:
    """A row of which nothing is known but that it cannot be read."""

    key: str
    error: RowError

    def load(self) -> Row:
        """Raises the error."""
        raise self.error


@dataclass(frozen=True)
class TarUnit:
    """A tar of samples. Where it is damaged, the samples before are rows, and the rest is one bad row, "tar"."""

    path: Path

    def spans(self, rows: int) -> list[Span]:
        spans, ends = [], []
        try:
            with open(self.path, "rb") as file, closing(scan_samples(file, self.path)) as samples:
                for start, stop in samples:
                    if len(ends) == rows:
                        spans.append(Span(ends[0], start, rows))
                        ends = []
                    ends.append(start)
                    last = stop
        except PartError:
            ends.append(ends[-1] if ends else spans[-1].stop if spans else 0)
            last = self.path.stat().st_size
        if ends:
            spans.append(Span(ends[0], last, len(ends)))
        return spans

    def input_pieces(self, span: Span) -> list[Piece]:
        return [Piece(self.path, self.path.name, span.start, span.stop)]

    def read(self, span: Span) -> Iterator[_Sample | _BadRow]:
        read = 0
        with open(self.path, "rb") as file:
            file.seek(span.start)
            try:
                with closing(read_samples(file, self.path)) as samples:
                    while read < span.rows:
                        sample = next(samples, None)
                        if sample is None:
                            break
                        read += 1
                        yield _Sample(*sample)
            except PartError as error:
                problem = str(error).replace(str(self.path), self.path.name)
                while read < span.rows:
                    read += 1
                    yield _BadRow(self.path.name, RowError("tar", problem))
        while read < span.rows:
            read += 1
            yield _BadRow(self.path.name, RowError("tar", f"{self.path.name} is damaged at its end; get it again"))


@dataclass(frozen=True)
class _Record:
    """A row of a parquet file; `values` is None where its text is not UTF-8."""

    key: str
    values: dict | None
    image: str
    caption: str

    def load(self) -> Row:
        """Raises RowError "encoding", "no_image", "empty_caption", and NOT_DOWNLOADED where the table says so."""
        if self.values is None:
            raise RowError("encoding", f"row {self.key} has text that is not UTF-8")
        image, caption = self.values[self.image], self.values[self.caption]
        image = image.get("bytes") if isinstance(image, dict) else image
        if not isinstance(image, bytes) or not image:
            status = self.values.get("status")
            if status not in (None, "success"):
                why = str(self.values.get("error_message") or status)[:100]
                raise RowError(NOT_DOWNLOADED, f"row {self.key} was not downloaded ({why})")
            raise RowError("no_image", f"row {self.key} has no image in column {self.image!r}")
        text = " ".join(caption.split()) if isinstance(caption, str) else ""
        if not text:
            raise RowError("empty_caption", f"row {self.key} has no text in column {self.caption!r}")
        rest = {name: value for name, value in self.values.items() if name not in (self.image, self.caption)}
        return Row(text, image, {name: value for name, value in rest.items() if is_plain(value)})


@dataclass(frozen=True)
class ParquetUnit:
    """A table with the bytes of a picture and a caption in each row, as `parquet.table` names columns."""

    path: Path

    def spans(self, rows: int) -> list[Span]:
        with open_table(self.path) as (table, _, _):
            total = table.metadata.num_rows
        return [Span(start, min(start + rows, total), min(rows, total - start)) for start in range(0, total, rows)]

    def input_pieces(self, span: Span) -> list[Piece]:
        with open_table(self.path) as (table, image, caption):
            start, stop = _find_bytes(table.metadata, span)
            # What the columns are called and hold stands elsewhere in the file.
            columns = str([image, caption, *((field.name, str(field.type)) for field in table.schema_arrow)])
        return [Piece(self.path, f"{self.path.name} {columns}", start, stop)]

    def read(self, span: Span) -> Iterator[_Record]:
        with open_table(self.path) as (table, image, caption):
            for number, values in enumerate(read_records(table, span.start, span.stop), start=span.start):
                key = values.get("key") if values else None
                yield _Record(str(key or f"{number:0{KEY_DIGITS}}"), values, image, caption)


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

"""The units of a source: a folder of pictures, a tar, a parquet file or a table of names, each as its format reads it.

A unit says into which spans its rows fall, which files or bytes a span is made from, and reads a span row by row, so
that memory does not grow. Every row that it knows of comes out; in place of one that cannot be used, its `RowError`.
With `has_control`, every row must have a second image.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import groupby, islice, pairwise
from pathlib import Path
from typing import TypeVar

import numpy as np

from ...data.formats import csv_table
from ...data.formats.folder import (
    ALL_SUFFIXES,
    IMAGE_SUFFIXES,
    PICTURE_SUFFIXES,
    assemble_row,
    decode_meta,
    entries_of,
    list_samples,
    read_sample,
    split_name,
)
from ...data.formats.layouts import CONTROL_COLUMNS
from ...data.formats.mds import MdsLayout, is_packed, open_samples, unpacked_name
from ...data.formats.parquet_table import open_table, read_records, split_record
from ...data.formats.row import Row
from ...data.formats.tar import read_class_prompts, read_samples, scan_samples
from ...data.text.survey import has_captions_beside, write_class_table, write_table
from ...utils.errors import ConfigError, DataError, PartError, RowError
from ...utils.files import as_path, meant_path
from ...utils.finished import Piece
from ...utils.log import get_logger
from ..place import AddressPath, natural_key

T = TypeVar("T")
KEY_DIGITS = 9  # as img2dataset writes keys
# The reason of rows of img2dataset's parquet files that are there to say that their download failed.
NOT_DOWNLOADED = "not_downloaded"
# Of a Hugging Face imagefolder this column names the picture, whatever else is there.
_IMAGE_COLUMNS = tuple(dict.fromkeys(("file_name", *csv_table.IMAGE_COLUMNS)))


@dataclass(frozen=True)
class Span:
    """Some consecutive rows of a unit. `start` and `stop`: rows, or bytes in the unit's file, as the unit has it."""

    start: int
    stop: int
    rows: int


@dataclass(frozen=True)
class Unit(ABC):
    """Rows that are read together. It can be pickled: a worker process, or a Spark executor, reads its spans.
    `columns`: of a table, that of pictures and that of captions, "" being one of a known name."""

    path: Path
    has_control: bool = False
    columns: tuple[str, str] = ("", "")

    def spans(self, rows: int) -> list[Span]:
        """Spans of at most that many rows, in order. Raises DataError where the unit cannot be read at all."""
        spans, starts = [], []
        for start, stop in self._places():
            if len(starts) == rows:
                spans.append(Span(starts[0], start, rows))  # up to the beginning of the next
                starts = []
            starts.append(start)
            end = stop
        return [*spans, Span(starts[0], end, len(starts))] if starts else spans

    @abstractmethod
    def _places(self) -> Iterable[tuple[int, int]]:
        """[start, stop) of each row, in order: its number and the next, or bytes in the unit's file."""

    def input_pieces(self, span: Span) -> list[Piece]:
        """The files, or bytes of them, that the rows of a span are made from."""
        return [Piece(self.path, self.path.name, span.start, span.stop)]

    @abstractmethod
    def read(self, span: Span) -> Iterator[tuple[str, Row | RowError]]:
        """(its name in its source, the row with its image as it is) of the rows of a span."""


class FolderUnit(Unit):
    """A folder of pictures with captions, one base name a row."""

    def _places(self) -> Iterable[tuple[int, int]]:
        return pairwise(range(len(list_samples(self.path, self.has_control)) + 1))

    def input_pieces(self, span: Span) -> list[Piece]:
        def place(name: str) -> int:
            return ALL_SUFFIXES.index(split_name(name, self.has_control)[1])

        return [Piece(self.path / name, name) for names in self._samples(span) for name in sorted(names, key=place)]

    def read(self, span: Span) -> Iterator[tuple[str, Row | RowError]]:
        for names in self._samples(span):
            key = split_name(names[0], self.has_control)[0]
            yield key, or_error(read_sample, self.path, names, self.path.name, self.has_control)

    def _samples(self, span: Span) -> Iterator[list[str]]:
        samples = list_samples(self.path, self.has_control)
        return (samples[number] for number in range(span.start, min(span.stop, len(samples))))


@dataclass(frozen=True)
class TarUnit(Unit):
    """A tar of samples. Where it is damaged, the samples before are rows, and the rest is one bad row, "tar".
    `idx_to_prompt`: the file with the captions of the classes that `.cls` has; None without."""

    idx_to_prompt: Path | None = None

    def input_pieces(self, span: Span) -> list[Piece]:
        table = [Piece(self.idx_to_prompt, "idx_to_prompt")] if self.idx_to_prompt else []
        return super().input_pieces(span) + table

    def read(self, span: Span) -> Iterator[tuple[str, Row | RowError]]:
        left, problem = span.rows, f"{self.path.name} is damaged at its end; get it again"
        prompts = read_class_prompts(str(self.idx_to_prompt)) if self.idx_to_prompt else None
        with open(self.path, "rb") as file:
            file.seek(span.start)
            try:
                with closing(read_samples(file, self.path)) as samples:
                    for key, files in islice(samples, span.rows):
                        left -= 1
                        own = Path(key).name, [*files.items()], self.path.name, prompts, self.has_control
                        yield key, or_error(assemble_row, *own)
            except PartError as error:
                problem = str(error).replace(str(self.path), self.path.name)
        for _ in range(left):
            yield self.path.name, RowError("tar", problem)

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

    def _places(self) -> Iterable[tuple[int, int]]:
        with open_table(self.path, self.has_control, *self.columns) as (table, *_):
            return pairwise(range(table.metadata.num_rows + 1))

    def input_pieces(self, span: Span) -> list[Piece]:
        starts, stops, first = [], [], 0  # bytes of the row groups that hold the span
        with open_table(self.path, False, *self.columns) as (table, image, caption, _):
            for group in map(table.metadata.row_group, range(table.metadata.num_row_groups)):
                if first < span.stop and first + group.num_rows > span.start:
                    for column in map(group.column, range(group.num_columns)):
                        starts.append(column.dictionary_page_offset or column.data_page_offset)
                        stops.append(starts[-1] + column.total_compressed_size)
                first += group.num_rows
            # What the columns are called and hold stands elsewhere in the file.
            columns = str([image, caption, *((field.name, str(field.type)) for field in table.schema_arrow)])
        name = f"{self.path.name} {columns}"
        return [Piece(self.path, name, min(starts, default=0), max(stops, default=0))]

    def read(self, span: Span) -> Iterator[tuple[str, Row | RowError]]:
        with open_table(self.path, self.has_control, *self.columns) as (table, *columns):
            for number, values in enumerate(read_records(table, span.start, span.stop), start=span.start):
                key = str((values or {}).get("key") or f"{number:0{KEY_DIGITS}}")
                yield key, or_error(_load_record, key, values, *columns)


class MdsUnit(Unit):
    """A shard of MosaicML streaming, with an encoded picture and a caption in each row."""

    def _places(self) -> Iterable[tuple[int, int]]:
        layout = MdsLayout(self.path, self.has_control, *self.columns)
        if layout.image is None:
            raise PartError(f"{self.path} holds latents and no pictures; train on it by latents=cached")
        return pairwise(layout.starts.tolist())

    def input_pieces(self, span: Span) -> list[Piece]:
        # What the columns are stands elsewhere in the file.
        columns = str(MdsLayout(self.path, False, *self.columns).columns)
        place = () if is_packed(self.path) else (span.start, span.stop)
        return [Piece(self.path, f"{self.path.name} {columns}", *place)]

    def read(self, span: Span) -> Iterator[tuple[str, Row | RowError]]:
        layout = MdsLayout(self.path, self.has_control, *self.columns)
        first = int(np.searchsorted(layout.starts, span.start))
        with open_samples(self.path) as file:
            file.seek(span.start)
            for number in range(first, first + span.rows):
                data = file.read(int(layout.starts[number + 1] - layout.starts[number]))
                row = or_error(layout.decode, data, f"{self.path.name} row {number}")
                key = None if isinstance(row, RowError) else row.meta.get("key")
                yield str(key or f"{number:0{KEY_DIGITS}}"), row


@dataclass(frozen=True)
class PackedUnit(Unit):
    """Folders of pictures in parts of a chosen size; the `folder` in a row's metadata says which one it is from.
    `pieces`: the folders, relative to `path`, the folder of the whole source; and the span of each."""

    pieces: tuple[tuple[str, Span], ...] = ()

    def _places(self) -> Iterable[tuple[int, int]]:
        return pairwise(range(sum(span.rows for _, span in self.pieces) + 1))

    def input_pieces(self, span: Span) -> list[Piece]:
        return [
            replace(piece, name=f"{name}/{piece.name}")
            for name, rows in self.pieces
            for piece in FolderUnit(self.path / name, self.has_control).input_pieces(rows)
        ]

    def read(self, span: Span) -> Iterator[tuple[str, Row | RowError]]:
        for name, piece in self.pieces:
            for key, row in FolderUnit(self.path / name, self.has_control).read(piece):
                is_plain = name == "." or isinstance(row, RowError)
                yield key, row if is_plain else replace(row, meta=row.meta | {"folder": name})


class _TableUnit(Unit):
    """Spans of bytes, cut between records; `_records` gives the place and the values, or the error, of each."""

    @property
    def known(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of the columns of pictures and of captions."""
        image, caption = self.columns
        return (image,) if image else _IMAGE_COLUMNS, (caption,) if caption else csv_table.CAPTION_COLUMNS

    def input_pieces(self, span: Span) -> list[Piece]:
        with open(self.path, "rb") as file:
            head = len(file.readline())
            kinds = (self.known[0], CONTROL_COLUMNS) if self.has_control else self.known[:1]
            images = [self._image(values, kind) for _, values in self._records(file, span) for kind in kinds]
        table = [Piece(self.path, self.path.name, 0, head), Piece(self.path, self.path.name, span.start, span.stop)]
        return table + [Piece(image, image.name) for image in images if image]

    def read(self, span: Span) -> Iterator[tuple[str, Row | RowError]]:
        with open(self.path, "rb") as file:
            for place, values in self._records(file, span):
                if isinstance(values, RowError):
                    yield place, values
                    continue
                image = self._image(values, self.known[0])
                own = values, self.path, f"{self.path.name}, {place}", self.known, self.has_control
                yield str(values.get("key") or (image.stem if image else place)), or_error(csv_table.make_row, *own)

    def _image(self, values: dict | RowError, names: tuple[str, ...]) -> Path | None:
        name = None if isinstance(values, RowError) else csv_table.find_image(values, names)
        return self.path.parent / name if name and not csv_table.leads_out(self.path, name) else None


class CsvUnit(_TableUnit):
    """A CSV file, quoted as RFC 4180 says, whose first line names the columns; `part_1.csv` of `ppldm annotate`."""

    def _places(self) -> Iterator[tuple[int, int]]:
        with open(self.path, "rb") as file:
            records = csv_table.read_table(file, self.path, self.has_control, self.known)[1]
            yield from ((start, start + length) for start, length, _ in records)

    def _records(self, file, span: Span) -> Iterator[tuple[str, dict | RowError]]:
        file.seek(0)
        header, _ = csv_table.read_table(file, self.path, known=self.known)
        file.seek(span.start)
        for offset, _, fields in islice(csv_table.read_records(file, self.path), span.rows):
            place = f"byte {span.start + offset}"
            yield place, or_error(csv_table.parse_record, header, fields, place, self.known)


class JsonLinesUnit(_TableUnit):
    """A JSON object a line, as `metadata.jsonl` of an imagefolder: `{"file_name": "0001.png", "text": "a dog"}`."""

    def _places(self) -> Iterator[tuple[int, int]]:
        with open(self.path, "rb") as file:
            yield from ((start, start + len(line)) for start, line in self._lines(file, 0))

    def _records(self, file, span: Span) -> Iterator[tuple[str, dict | RowError]]:
        for offset, line in islice(self._lines(file, span.start), span.rows):
            yield f"byte {offset}", or_error(decode_meta, line, f"the line at byte {offset}")

    def _lines(self, file, offset: int) -> Iterator[tuple[int, bytes]]:
        """(offset, line) of the lines from there on that are not blank."""
        file.seek(offset)
        for line in file:
            if line.strip():
                yield offset, line
            offset += len(line)


def pack(cut: Sequence[tuple[Unit, Span]], root: Path, rows: int) -> list[tuple[Unit, Span]]:
    """Units and their spans, those of folders below `root` joined to `rows` rows each where they follow each other."""
    packed: list[tuple[Unit, Span]] = []
    for are_folders, own in groupby(cut, key=lambda one: isinstance(one[0], FolderUnit)):
        filled: list[list[tuple[str, Span]]] = []  # pieces of each unit
        room = 0  # rows that the last one lacks
        for unit, span in own if are_folders else ():
            start = span.start
            while start < span.stop:
                if not room:
                    filled, room = [*filled, []], rows
                stop = min(span.stop, start + room)
                filled[-1].append((unit.path.relative_to(root).as_posix(), Span(start, stop, stop - start)))
                start, room = stop, room - (stop - start)
        units = [PackedUnit(root, cut[0][0].has_control, pieces=tuple(pieces)) for pieces in filled]
        packed += [(unit, span) for unit in units for span in unit.spans(rows)] if are_folders else own
    return packed


def _load_record(
    key: str, values: dict | None, image_column: str, caption_column: str, control_column: str | None
) -> Row:
    """Raises RowError, NOT_DOWNLOADED where the table says so."""
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


def or_error(function: Callable[..., T], *arguments) -> T | RowError:
    """What a function gives, or the RowError that it raises."""
    try:
        return function(*arguments)
    except RowError as error:
        return error


_FILE_KINDS: dict[str, type[Unit]] = {
    ".tar": TarUnit,
    ".parquet": ParquetUnit,
    ".mds": MdsUnit,
    ".csv": CsvUnit,
    ".jsonl": JsonLinesUnit,
    ".ndjson": JsonLinesUnit,
}
# Whose pictures are files of their own.
_NAMING_KINDS = (".csv", ".jsonl", ".ndjson")


def find_units(
    path, has_control: bool = False, idx_to_prompt: Path | None = None, columns: tuple[str, str] = ("", "")
) -> list[Unit]:
    """What a path holds, by its content, units sorted by the numbers in their names.

    Of a folder: with metadata.jsonl or metadata.csv, the table of a Hugging Face imagefolder; else its pictures, one
    unit, or its tars (img2dataset writes parquet files beside them), and what each of its folders holds; else files of
    the other kinds. Of pictures without captions beside them: the table that `write_table` makes of another table, or
    of their names. At an address: tars and parquet files; all else is refused. `idx_to_prompt`: a file of captions by
    class, for tars with `.cls`, or pictures in folders by class. `columns`: as a Unit's. Raises ConfigError, DataError.
    """
    if idx_to_prompt:
        read_class_prompts(str(idx_to_prompt))  # what is wrong with it is said first
    units = _find_units(as_path(path), has_control, idx_to_prompt)
    if any(columns):
        if not all(isinstance(unit, ParquetUnit | MdsUnit) or _is_own_table(unit, path) for unit in units):
            raise ConfigError(
                f"--image-col and --caption-col are for tables and MDS, and {path} is none; name the file"
            )
        units = [replace(unit, columns=columns) for unit in units]
    if not idx_to_prompt:
        return units
    if not all(isinstance(unit, TarUnit | CsvUnit) for unit in units):
        raise ConfigError(f"--idx-to-prompt is for tars with .cls, and pictures in folders by class; {path} is neither")
    return [replace(unit, idx_to_prompt=idx_to_prompt) if isinstance(unit, TarUnit) else unit for unit in units]


def _is_own_table(unit: Unit, path) -> bool:
    """Whether a table is of the source, and not one that `write_table` has made of it."""
    return isinstance(unit, _TableUnit) and unit.path.is_relative_to(path)


def _find_units(path, has_control: bool, idx_to_prompt: Path | None) -> list[Unit]:
    if isinstance(path, Path) and path.is_file():
        if _suffix(path.name) not in _FILE_KINDS:
            raise ConfigError(f"{path} is not a known source; name a folder, or a file {', '.join(_FILE_KINDS)}")
        return [_unit_of_file(path, has_control)]
    passed: list[tuple[Path, list[str]]] = []
    units = list(_units_of_folder(path, passed)) if isinstance(path, Path) else _units_at(path)
    folders = [unit.path for unit in units if isinstance(unit, FolderUnit)]
    if not has_control and len(units) == len(folders) > 0 and not has_captions_beside(folders):
        return [CsvUnit(write_class_table(path, idx_to_prompt) if idx_to_prompt else write_table(path))]
    for folder, names in passed:
        get_logger().warning(
            "%s: %d files such as %s are not read beside pictures, tars or folders; name them to read them",
            folder, len(names), names[0],
        )  # fmt: skip
    units = [replace(unit, has_control=has_control) for unit in units]
    if not units:
        raise DataError(
            f"no images in {path}; it should hold files {', '.join(IMAGE_SUFFIXES)}, each with a caption in a .txt of "
            f"the same base name, folders of them, or files {', '.join(_FILE_KINDS)}"
        )
    return units


def _units_of_folder(folder: Path, passed: list[tuple[Path, list[str]]]) -> Iterator[Unit]:
    """passed: is added the folders with files that are not read, and their names."""
    files, folders, has_images = [], [], False
    try:
        for name, is_folder in entries_of(folder):
            if is_folder:
                folders.append(name)
            elif _suffix(name) in _FILE_KINDS:
                files.append(name)
            else:
                has_images |= split_name(name)[1] in PICTURE_SUFFIXES
    except OSError as error:
        fix = meant_path(folder, "name a folder of pictures and captions, such as 0.jpg and 0.txt")
        raise ConfigError(f"cannot read the folder {folder} ({error.strerror}); {fix}") from error
    files, folders = sorted(sorted(files), key=natural_key), sorted(sorted(folders), key=natural_key)
    if tables := [name for name in files if name in csv_table.IMAGEFOLDER_TABLES]:
        yield _unit_of_file(folder / tables[0])  # which may name pictures of subfolders
        return
    tars = [name for name in files if _suffix(name) == ".tar"]
    own: list[Unit] = [FolderUnit(folder)] if has_images else [_unit_of_file(folder / name) for name in tars]
    own += [unit for name in folders for unit in _units_of_folder(folder / name, passed)]
    yield from own or (_unit_of_file(folder / name) for name in files)
    read = [] if has_images else tars
    described = {split_name(name)[0] for name in read} | set(folders)  # by a table of the same name
    if own and (unread := [name for name in files if name not in read and split_name(name)[0] not in described]):
        passed.append((folder, unread))


def _units_at(path: AddressPath) -> list[Unit]:
    entries = [entry for entry in path.list() if not entry.path.name.startswith(".")]
    folder, files = path if path.is_dir() else path.parent, [entry.path.name for entry in entries if not entry.is_dir]
    if foreign := [name for name in files if _suffix(name) in _NAMING_KINDS or split_name(name)[1] in IMAGE_SUFFIXES]:
        raise ConfigError(
            f"{folder / foreign[0]} is not read at an address, where tars and parquet files are; copy its folder to a "
            "disk, or download with --output-format webdataset"
        )
    tars, tables = ([name for name in files if _suffix(name) == kind] for kind in (".tar", ".parquet"))
    units = [_unit_of_file(folder / name) for name in tars]
    units += [unit for entry in entries if entry.is_dir for unit in _units_at(entry.path)]
    return units or [_unit_of_file(folder / name) for name in tables]


def _suffix(name: str) -> str:
    return f".{split_name(unpacked_name(name))[1]}"


def _unit_of_file(path: Path, has_control: bool = False) -> Unit:
    return _FILE_KINDS[_suffix(path.name)](path, has_control)

"""Where rows come from: what a path holds, as units that are each read on their own.

A unit is a folder of pictures, a tar, a parquet file or a table of names. It says into which spans its rows fall (of a
given number of rows, the last may have fewer), names the files or bytes that a span is made from, and reads the rows of
a span one by one, so that memory does not grow with the source. Every row that a unit knows of comes out, the
incomplete ones too: `load` says by a named `RowError` why a row cannot be used, so that the converter can count it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ...data.formats.folder_names import FolderNames, list_once, split_name
from ...data.formats.row import Row
from ...data.formats.sample_files import decode_caption, decode_meta
from ...utils.errors import ConfigError, DataError, RowError
from ...utils.jobs import Piece

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
_IMAGE_SUFFIXES = frozenset(suffix[1:] for suffix in IMAGE_SUFFIXES)
_SUFFIXES = _IMAGE_SUFFIXES | {"txt", "json"}
KEY_DIGITS = 9  # as img2dataset writes keys
# The reason of rows of img2dataset's parquet files that are there to say that their download failed.
NOT_DOWNLOADED = "not_downloaded"


@dataclass(frozen=True)
class Span:
    """Some consecutive rows of a unit. `start` and `stop`: rows, or bytes in the unit's file, as the unit has it."""

    start: int
    stop: int
    rows: int


class LoadableRow(Protocol):
    """`key`: the row's name in its source."""

    key: str

    def load(self) -> Row:
        """The row; its image is not looked into. Raises RowError."""


class Unit(Protocol):
    """Rows that are read together. It can be pickled: a worker process, or a Spark executor, reads its spans."""

    path: Path

    def spans(self, rows: int) -> list[Span]:
        """Spans of at most that many rows, in order. Raises DataError where the unit cannot be read at all."""

    def input_pieces(self, span: Span) -> list[Piece]:
        """The files, or bytes of them, that the rows of a span are made from."""

    def read(self, span: Span) -> Iterator[LoadableRow]:
        """The rows of a span."""


@dataclass(frozen=True)
class SourceRow:
    """One base name of a folder and the files that share it. `None`, or no image at all: there is no such file."""

    key: str
    images: tuple[Path, ...]
    caption: Path | None
    meta: Path | None

    @property
    def files(self) -> tuple[Path, ...]:
        """All files of the row."""
        return (*self.images, *filter(None, (self.caption, self.meta)))

    def load(self) -> Row:
        """The row as the files say it, runs of white space in the caption as one space; the image is not looked into.

        Raises RowError "no_image", "two_images", "no_caption", "empty_caption", "encoding", "metadata", "unreadable".
        """
        if not self.images:
            raise RowError("no_image", f"{self.caption.name} has no image of its base name beside it")
        if len(self.images) > 1:
            raise RowError("two_images", f"{' and '.join(path.name for path in self.images)} share one base name")
        if self.caption is None:
            raise RowError("no_caption", f"{self.images[0].name} has no .txt of its base name beside it")
        caption = decode_caption(read_bytes(self.caption), self.caption.name)
        return Row(
            caption,
            read_bytes(self.images[0]),
            decode_meta(read_bytes(self.meta), self.meta.name) if self.meta else {},
        )


@dataclass(frozen=True)
class FolderUnit:
    """A folder of pictures with captions, as `read_folder` reads it."""

    path: Path

    def spans(self, rows: int) -> list[Span]:
        total = len(_list_folder(self.path))
        return [Span(start, min(start + rows, total), min(rows, total - start)) for start in range(0, total, rows)]

    def input_pieces(self, span: Span) -> list[Piece]:
        return [Piece(path, path.name) for row in self.read(span) for path in row.files]

    def read(self, span: Span) -> Iterator[SourceRow]:
        names = _list_folder(self.path)
        for number in range(span.start, min(span.stop, len(names))):
            yield _make_row(self.path, names[number])


def find_units(path) -> list[Unit]:
    """What a path holds, by its content, units sorted by the numbers in their names.

    A file: a tar, a parquet file, a CSV file, JSON lines. A folder: with pictures, one unit; with metadata.jsonl or
    metadata.csv, the table of a Hugging Face imagefolder; with tars, these (img2dataset writes parquet files beside
    them); with folders, what each of them holds; with parquet files, CSV files or JSON lines, these. Raises
    ConfigError, and DataError where nothing of this kind is there.
    """
    path = Path(path)
    if path.is_file():
        unit = _unit_of_file(path)
        if unit is None:
            raise ConfigError(f"{path} is no known source; name a folder, or a file {', '.join(_FILE_KINDS)}")
        return [unit]
    units = list(_units_of_folder(path))
    if not units:
        raise DataError(
            f"no images in {path}; it should hold {', '.join(IMAGE_SUFFIXES)} files, each with a caption in a .txt of "
            f"the same base name, folders of them, or files {', '.join(_FILE_KINDS)}"
        )
    return units


def read_folder(folder) -> Iterator[SourceRow]:
    """The rows of a plain folder: `0000.jpg` + `0000.txt` (+ `0000.json`), files of one base name being one row.

    The base name is all before the last dot, suffixes are known in either case. Hidden files, subfolders and other
    suffixes are no part of the format; a `.json` alone is no row.

    Raises ConfigError for a folder that is missing, DataError for one without images.
    """
    folder = Path(folder)
    yield from (_make_row(folder, names) for names in _list_folder(folder))


def _list_folder(folder: Path) -> FolderNames:
    """Raises as `read_folder`."""
    try:
        names = list_once(folder, _SUFFIXES, _IMAGE_SUFFIXES, _is_no_folder)
    except OSError as error:
        raise _unreadable(folder, error) from error
    if not names.has_images:
        raise DataError(
            f"no images in {folder}; it should hold {', '.join(IMAGE_SUFFIXES)} files, each with a caption in a .txt "
            "of the same base name (subfolders are not searched)"
        )
    return names


def _make_row(folder: Path, names: list[str]) -> SourceRow:
    """The row of files of one base name."""
    files = {name: split_name(name)[1] for name in names}
    images = tuple(folder / name for name, suffix in files.items() if suffix in _IMAGE_SUFFIXES)
    caption, meta = (
        next((folder / name for name in reversed(names) if files[name] == suffix), None) for suffix in ("txt", "json")
    )
    return SourceRow(split_name(names[0])[0], images, caption, meta)


def _is_no_folder(entry: os.DirEntry) -> bool:
    return not entry.is_dir()


def _unreadable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot read the folder {folder} ({error.strerror}); name one that holds 0000.jpg + 0000.txt, ..."
    )


def read_bytes(path: Path) -> bytes:
    """The content of a file. Raises RowError "unreadable"."""
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise RowError("unreadable", f"{path.name}: {getattr(error, 'strerror', None) or error}") from error


def _units_of_folder(folder: Path) -> Iterator[Unit]:
    from ..download.metadata import natural_key
    from .source_tables import IMAGEFOLDER_TABLES

    files, folders, has_images = [], [], False
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                suffix = split_name(entry.name)[1]
                if entry.name.startswith("."):
                    continue
                if f".{suffix}" in _FILE_KINDS and not entry.is_dir():
                    files.append(entry.name)
                elif entry.is_dir():
                    folders.append(entry.name)
                elif suffix in _IMAGE_SUFFIXES:
                    has_images = True
    except OSError as error:
        raise _unreadable(folder, error) from error
    files, folders = sorted(sorted(files), key=natural_key), sorted(sorted(folders), key=natural_key)
    if tables := [name for name in files if name in IMAGEFOLDER_TABLES]:
        yield _unit_of_file(folder / tables[0])
        return
    if has_images:
        yield FolderUnit(folder)
        return
    if tars := [name for name in files if name.lower().endswith(".tar")]:
        yield from (_unit_of_file(folder / name) for name in tars)
        return
    units = [unit for name in folders for unit in _units_of_folder(folder / name)]
    yield from units or filter(None, (_unit_of_file(folder / name) for name in files))


def _unit_of_file(path: Path) -> Unit | None:
    """None for a file of no known suffix."""
    from .source_shards import ParquetUnit, TarUnit
    from .source_tables import CsvUnit, JsonLinesUnit

    kinds = dict(zip(_FILE_KINDS, (TarUnit, ParquetUnit, CsvUnit, JsonLinesUnit, JsonLinesUnit), strict=True))
    kind = kinds.get(path.suffix.lower())
    return kind(path) if kind else None


_FILE_KINDS = (".tar", ".parquet", ".csv", ".jsonl", ".ndjson")

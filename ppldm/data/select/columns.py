"""Captions and metadata of a part by column, so that a condition reads the fields that it names and no row.

`<part>.columns` lies where the part's index does. It holds the caption, as "caption", and every field but width and
height, which the index has; rows that cannot be read are in it with their reason. It is made with an index, and anew
where one does not fit its part or is damaged.

Little endian: `_MAGIC`; buffers, compressed by zlib where that makes them smaller; a JSON object that says where they
are; its length and CRC-32, u32 each; `_MAGIC`. Rows come in blocks of `_BLOCK_ROWS`. A column of a block is the numbers
of the rows that have a value (u32, left out where all have), and their values: float32 or float64 where those hold
every one exactly, or else the different values, as a JSON list, and the place of each row's in it. Every buffer is
stated as [offset, length, CRC-32, 1 if compressed or 0].
"""

import json
import math
import os
import struct
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from isal import isal_zlib

from ...utils.errors import OutputError, RowError
from ...utils.files import atomic_write, make_output_dir
from ...utils.log import get_logger, progress
from ..filelist import Source
from ..formats.index import COLUMNS, READ_ONLY, Misfit
from ..formats.layouts import DEFAULT_LAYOUT, index_layout

# Part of every file: a change of what is in it must change it.
_VERSION = 1
_MAGIC = b"PPLDMCOL"
_TAIL = struct.Struct("<II8s")
_BLOCK_ROWS = 1 << 16
_LARGEST_EXACT = 1 << 53  # of integers, in float64

# Answered by the index.
INDEX_FIELDS = {"width", "height"}
_CAPTION = "caption"
_ERRORS = ""  # no field has this name in an expression


@dataclass(frozen=True)
class Distinct:
    """A column of few different values: row i has `values[places[i]]`."""

    values: list
    places: np.ndarray


# (rows, columns by name as `judge` takes them, reasons of the rows that cannot be read, None where all can)
Block = tuple[int, dict[str, np.ndarray | Distinct], Distinct | None]


class ColumnsWriter:
    """Writes rows as columns into a file, a block at a time. `finish` comes last; rows before it cannot be read."""

    def __init__(self, file):
        self._file, self._offset = file, len(_MAGIC)
        self._blocks, self._columns, self._rows = [], {}, 0
        file.write(_MAGIC)

    def add(self, caption: str, meta: dict) -> None:
        """The next row."""
        for name, value in meta.items():
            if name not in INDEX_FIELDS and name not in (_CAPTION, _ERRORS):
                self._note(name, value)
        self._note(_CAPTION, caption)
        self._next()

    def add_bad(self, reason: str) -> None:
        """The next row, which cannot be read."""
        self._note(_ERRORS, reason)
        self._next()

    def finish(self, key: list) -> None:
        """Say what is in the file. `key`: what the columns were made of, JSON-ready."""
        self._end_block()
        contents = json.dumps({"key": [_VERSION, *key], "blocks": self._blocks}).encode()
        self._file.write(contents + _TAIL.pack(len(contents), zlib.crc32(contents), _MAGIC))

    def _note(self, name: str, value) -> None:
        if value is None or (isinstance(value, float) and math.isnan(value)):
            return
        rows, values = self._columns.setdefault(name, ([], []))
        rows.append(self._rows)
        values.append([] if isinstance(value, list | dict) else value)  # of which nothing is compared

    def _next(self) -> None:
        self._rows += 1
        if self._rows == _BLOCK_ROWS:
            self._end_block()

    def _end_block(self) -> None:
        if self._rows:
            columns = {name: self._write_column(*column) for name, column in sorted(self._columns.items())}
            self._blocks.append({"rows": self._rows, "columns": columns})
        self._columns, self._rows = {}, 0

    def _write_column(self, rows: list[int], values: list) -> dict:
        column: dict = {} if len(rows) == self._rows else {"rows": self._put(np.array(rows, dtype="<u4").tobytes())}
        stored, places = _as_floats(values), dict[tuple, int]()
        if stored is None:
            # 1, 1.0 and true are different values.
            keys = [(type(value), None if isinstance(value, list) else value) for value in values]
            of_rows = [places.setdefault(key, len(places)) for key in keys]
            stored = np.array(of_rows, np.min_scalar_type(len(places)).newbyteorder("<"))
        column |= {"dtype": stored.dtype.str, "values": self._put(stored.tobytes())}
        if places:
            distinct = [[] if kind is list else value for kind, value in places]
            column["distinct"] = self._put(json.dumps(distinct).encode())
        return column

    def _put(self, data: bytes) -> list[int]:
        packed = zlib.compress(data, 1)  # isal's bytes for short data are not always the same
        is_smaller = len(packed) < 0.75 * len(data)
        stored = packed if is_smaller else data
        stated = [self._offset, len(stored), zlib.crc32(stored), int(is_smaller)]
        self._file.write(stored)
        self._offset += len(stored)
        return stated


def _as_floats(values: list) -> np.ndarray | None:
    """Numbers as float32, else float64, where each is held exactly; None where one is not, or is not a number."""
    for value in values:
        if type(value) is int:
            if not -_LARGEST_EXACT <= value <= _LARGEST_EXACT:
                return None
        elif type(value) is not float:
            return None
    numbers = np.array(values, dtype="<f8")
    with np.errstate(over="ignore"):
        short = numbers.astype("<f4")
    return short if np.array_equal(short, numbers) else numbers


def read_blocks(path: Path, key: list, names: Iterable[str]) -> list[Block]:
    """The columns of these names of a file that was written for `key`; one that no row of a block has is not among
    them. Raises Misfit where it was written for another one or is damaged, FileNotFoundError."""
    with open(path, "rb", buffering=0) as file:
        read, found = partial(os.pread, file.fileno()), list[Block]()
        for block in _read_contents(read, os.fstat(file.fileno()).st_size, key):
            num_rows, stated = block["rows"], block["columns"]
            columns = {name: _read_column(read, stated[name], num_rows) for name in sorted(names) if name in stated}
            errors: Any = _read_column(read, stated[_ERRORS], num_rows) if _ERRORS in stated else None
            found.append((num_rows, columns, errors))
    return found


def _read_contents(read: Callable, size: int, key: list) -> list[dict]:
    tail = read(_TAIL.size, max(0, size - _TAIL.size))
    length, crc32, magic = _TAIL.unpack(tail) if len(tail) == _TAIL.size else (0, 0, b"")
    contents = read(length, max(0, size - _TAIL.size - length))
    if magic != _MAGIC or zlib.crc32(contents) != crc32:
        raise Misfit("it is damaged or cut short")
    contents = json.loads(contents)
    if contents["key"] != [_VERSION, *key]:
        raise Misfit("it was made of another part")
    return contents["blocks"]


def _read_column(read: Callable, stated: dict, num_rows: int) -> np.ndarray | Distinct:
    values = np.frombuffer(_read_buffer(read, stated["values"]), dtype=stated["dtype"])
    rows = np.frombuffer(_read_buffer(read, stated["rows"]), dtype="<u4") if "rows" in stated else slice(None)
    if "distinct" not in stated:
        if isinstance(rows, slice):
            return values
        numbers = np.full(num_rows, np.nan, dtype=values.dtype)
        numbers[rows] = values
        return numbers
    distinct = json.loads(_read_buffer(read, stated["distinct"]))
    places = np.full(num_rows, len(distinct), dtype=np.uint32)
    places[rows] = values
    return Distinct([*distinct, None], places)


def _read_buffer(read: Callable, stated: list[int]) -> bytes:
    offset, length, crc32, is_packed = stated
    stored = read(length, offset)
    if zlib.crc32(stored) != crc32:
        raise Misfit("it is damaged (checksum)")
    return isal_zlib.decompress(stored) if is_packed else stored


def columns_key(identity: tuple[int, ...], rows: int, format: str = "part", layout: str = DEFAULT_LAYOUT) -> list:
    """What the columns of a part depend on."""
    return [list(identity), rows, format, layout]


def read_columns(part, source: Source, names: Iterable[str]) -> list[Block]:
    """The columns of these names of an open part (`formats.row.Rows`), block by block; made where there are none that
    fit. Raises OutputError."""
    places, key = _find_places(part, source)
    for is_new in (False, True):
        if is_new:
            build_columns(part, source)
        for path in places:
            try:
                return read_blocks(path, key, names)
            except FileNotFoundError:
                continue
            except Misfit as error:
                get_logger().info("%s is not used: %s", path, error)
    raise OutputError(f"what was written of {part.path} cannot be read back; check the disk, or set PPLDM_CACHE_DIR")


def build_columns(part, source: Source) -> None:
    """Read the caption and metadata of every row of an open part, once, and store them. Raises OutputError."""
    get_logger().info("reading the metadata of %s, once", part.path)
    places, key = _find_places(part, source)
    for target in places:
        if target == places[-1]:
            make_output_dir(target.parent)
        shown = progress(total=len(part), desc=part.path.name, unit="row", unit_scale=True, delay=3)
        try:
            with atomic_write(target) as file, shown as bar:
                writer = ColumnsWriter(file)
                for row in range(len(part)):
                    try:
                        writer.add(*part.read_fields(row))
                    except RowError as error:
                        writer.add_bad(error.reason)
                    bar.update()
                writer.finish(key)
            return
        except OSError as error:
            if target == places[-1] or error.errno not in READ_ONLY:
                words = f"{error.strerror or error}; free some space or set PPLDM_CACHE_DIR"
                raise OutputError(f"cannot write {target}: {words}") from error


def _find_places(part, source: Source) -> tuple[list[Path], list]:
    """(where the columns of a part may lie, their key)."""
    layout = index_layout(source.layout, source.format)
    spec = COLUMNS.of_layout(layout)
    beside = [] if source.format == "folder" else [spec.index_path(part.path)]
    return [*beside, spec.cached_index_path(part.path)], columns_key(part.identity, len(part), source.format, layout)

"""Captions and metadata of a part by column, and for which rows a condition on them holds, without reading a row.

`<part>.columns` lies where the part's index does. It holds the caption, as "caption", and every field but width and
height, which the index has; rows that cannot be read are in it with their reason. It is made with an index, and anew
where one does not fit its part or is damaged.

Little endian: `_MAGIC`; buffers, compressed by zlib where that makes them smaller; a JSON object that says where they
are; its length and CRC-32, u32 each; `_MAGIC`. Rows come in blocks of `_BLOCK_ROWS`. A column of a block is the numbers
of the rows that have a value (u32, left out where all have), and their values: float32 or float64 where those hold
every one exactly, or else the different values, as a JSON list, and the place of each row's in it. Every buffer is
stated as [offset, length, CRC-32, 1 if compressed or 0].

Truth has three values. A comparison whose field a row does not have (or null, or NaN), or has as something that has no
order with the other side, is neither true nor false but unknown; `and`, `or` and `not` follow Kleene's logic, as in
SQL. Text that reads as a number is one wherever it meets a number. Equality of different things is plainly false.
Columns of numbers are judged as a whole, as float64 where that is exact; any others once for each distinct value.
"""

import json
import math
import operator
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
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
from ..formats.row import Rows
from .expression import ORDER_SIGNS, All, Compare, Expression, Field, Literal, Member, Not, field_names

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


FALSE = "where: false"

_OPERATORS: dict[str, Callable] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_INTEGER = re.compile(r"[+-]?[0-9]{1,300}")

# What a value can be compared with.
_MISSING, _NUMERIC, _TEXT, _TRUTH, _OTHER = range(5)
_KIND_NAMES = {_NUMERIC: "a number", _TEXT: "text"}


def judge(
    expression: Expression, columns: Mapping[str, Sequence | np.ndarray | Distinct], num_rows: int
) -> tuple[np.ndarray, list[str]]:
    """(codes, uint16 [num_rows]; reasons): code 0 is a row for which the expression is true, any other says why it is
    not: `reasons[code - 1]`. columns: by field the value of each row, None where it has none. Integer arrays are sizes
    in pixels, 0 where unknown; arrays of float32 or float64 are numbers, NaN where there is none."""
    judgement = _Judgement({name: _classify(values) for name, values in columns.items()}, num_rows, [FALSE])
    return judgement.of(expression), judgement.reasons


# Codes of rows: what is true, what is false; all above say why it is not known.
_TRUE, _FALSE = 0, 1


def _negate(codes: np.ndarray) -> np.ndarray:
    return codes ^ (codes <= _FALSE)


def _and(codes: np.ndarray, others: np.ndarray) -> np.ndarray:
    """What is false is so whatever else is not known, and of that the first counts."""
    stays = (codes == _FALSE) | ((codes > _FALSE) & (others != _FALSE))
    return np.where(stays, codes, others)


@dataclass(frozen=True)
class _Judgement:
    """One evaluation over the rows of some columns."""

    columns: dict[str, np.ndarray | Distinct]
    num_rows: int
    reasons: list[str]

    def of(self, expression: Expression) -> np.ndarray:
        """The code of each row, uint16."""
        if isinstance(expression, Compare | Member):
            missing = Distinct([None], np.zeros(self.num_rows, np.uint8))
            columns = {name: self.columns.get(name, missing) for name in sorted(field_names(expression))}
            codes = self._of_numbers(expression, columns)
            return self._of_values(expression, columns) if codes is None else codes
        if isinstance(expression, Not):
            return _negate(self.of(expression.term))
        if isinstance(expression, All):
            return reduce(_and, map(self.of, expression.terms))
        return _negate(reduce(_and, (_negate(self.of(term)) for term in expression.terms)))

    def _of_numbers(self, expression: Compare | Member, columns: dict) -> np.ndarray | None:
        """Where all columns are numbers, and float64 holds what they are compared with."""
        if any(isinstance(column, Distinct) for column in columns.values()):
            return None
        fields = [expression.item] if isinstance(expression, Member) else [expression.left, expression.right]
        sides = [columns[one.name] if isinstance(one, Field) else _exact_number(one) for one in fields]
        if any(side is None for side in sides):
            return None
        if isinstance(expression, Member):
            listed = [number for one in expression.values if (number := _exact_number(one)) is not None]
            holds = np.isin(sides[0], listed)
        else:
            holds = _OPERATORS[expression.sign](*sides)
        codes = np.where(holds, _TRUE, _FALSE).astype(np.uint16)
        for field, side in zip(fields[::-1], sides[::-1], strict=True):  # of both, the first is named
            if (missing := np.isnan(side)).any():
                codes[missing] = self._code(_missing(field))
        return codes

    def _of_values(self, expression: Compare | Member, columns: dict) -> np.ndarray:
        """Value by value, or pair of values by pair, each once."""
        (values, places), *others = map(_list_values, columns.values())
        combined = [(value,) for value in values]
        for more, own in others:  # of a comparison of two fields
            pairs, places = np.unique(places.astype(np.int64) * len(more) + own, return_inverse=True)
            combined = [(values[pair // len(more)], more[pair % len(more)]) for pair in pairs.tolist()]
        if isinstance(expression, Member):
            found = _are_listed(expression, [value for (value,) in combined])
        else:
            found = [_compare(expression, dict(zip(columns, one, strict=True))) for one in combined]
        return np.array([self._code(one) for one in found], np.uint16)[places]

    def _code(self, found: bool | str) -> int:
        """Of a truth value, or of the reason why that is not known."""
        if not isinstance(found, str):
            return _TRUE if found else _FALSE
        if found not in self.reasons:
            self.reasons.append(found)
        return self.reasons.index(found) + 1


def _classify(values: Sequence | np.ndarray | Distinct) -> np.ndarray | Distinct:
    """Numbers as float64, NaN where there is none; all else as distinct values."""
    if isinstance(values, Distinct):
        return values
    if not isinstance(values, np.ndarray):
        return Distinct(list(values), np.arange(len(values)))
    return np.where(values > 0, values, np.nan) if values.dtype.kind in "ui" else values.astype(np.float64)


def _list_values(column: np.ndarray | Distinct) -> tuple[list, np.ndarray]:
    if isinstance(column, Distinct):
        return column.values, column.places
    values, places = np.unique(column, return_inverse=True)
    return values.tolist(), places


def _compare(expression: Compare, values: Mapping) -> bool | str:
    """Of values by the names of fields: true, false, or the reason why that is not known."""
    operands = expression.left, expression.right
    left, right = (values[one.name] if isinstance(one, Field) else one.value for one in operands)
    kinds = _kind(left), _kind(right)
    if _MISSING in kinds:
        return _missing(operands[kinds.index(_MISSING)])
    if {*kinds} == {_TEXT, _NUMERIC}:
        numbers = [read_number(one) if isinstance(one, str) else one for one in (left, right)]
        if None not in numbers:
            (left, right), kinds = numbers, (_NUMERIC, _NUMERIC)
    is_ordered = expression.sign in ORDER_SIGNS
    if kinds in ((_NUMERIC, _NUMERIC), (_TEXT, _TEXT)) or (kinds == (_TRUTH, _TRUTH) and not is_ordered):
        return _OPERATORS[expression.sign](left, right)
    return _no_order(*operands) if is_ordered else expression.sign == "!="


def _are_listed(expression: Member, values: list) -> list[bool | str]:
    """As `_compare`, of the values of one field."""
    kinds = (_NUMERIC, _TEXT, _TRUTH)
    listed = {kind: {one.value for one in expression.values if _kind(one.value) == kind} for kind in kinds}
    numbers = listed[_NUMERIC]
    listed[_NUMERIC] = numbers | {read_number(text) for text in listed[_TEXT]}
    found: list[bool | str] = []
    for value in values:
        kind = _kind(value)
        is_there = value in listed.get(kind, ()) or (kind == _TEXT and read_number(value) in numbers)
        found.append(_missing(expression.item) if kind == _MISSING else is_there)
    return found


def _missing(field: Field) -> str:
    return f"where: no field {field}"


def _no_order(left: Field | Literal, right: Field | Literal) -> str:
    if isinstance(left, Field) and isinstance(right, Field):
        return f"where: {left} and {right} have no order"
    field, literal = (left, right) if isinstance(left, Field) else (right, left)
    return f"where: {field} is not {_KIND_NAMES[_kind(literal.value)]}"


def _exact_number(literal: Literal) -> float | None:
    """The number that a literal is or spells, if float64 holds it exactly; else None."""
    number = read_number(literal.value) if isinstance(literal.value, str) else literal.value
    try:
        return float(number) if _kind(number) == _NUMERIC and float(number) == number else None
    except OverflowError:
        return None


def _kind(value) -> int:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return _MISSING
    if isinstance(value, bool):
        return _TRUTH
    if isinstance(value, int | float):
        return _NUMERIC
    return _TEXT if isinstance(value, str) else _OTHER


def read_number(text: str) -> int | float | None:
    """The number that a text spells, as expressions do, with spaces around it; None where it spells none."""
    text = text.strip()
    if not _NUMBER.fullmatch(text):
        return None
    return int(text) if _INTEGER.fullmatch(text) else float(text)


def judge_blocks(part: Rows, source: Source, where: Expression, sizes: dict) -> Iterator[tuple[np.ndarray, list[str]]]:
    """(code of each row, reasons), as `judge` gives them, of runs of rows, one after the other."""
    names, start = field_names(where) - INDEX_FIELDS, 0
    for num_rows, found, errors in read_columns(part, source, names) if names else [(len(part), {}, None)]:
        own_sizes = {name: values[start : start + num_rows] for name, values in sizes.items()}
        codes, reasons = judge(where, {**found, **own_sizes}, num_rows)
        if errors is not None:
            # Of rows that cannot be read, what the sizes decide stays decided.
            by_size, _ = judge(where, own_sizes, num_rows)
            is_bad = errors.places < len(errors.values) - 1
            codes = np.where(by_size > 1, np.where(is_bad, len(reasons) + 1 + errors.places, codes), codes)
            reasons = reasons + errors.values[:-1]
        yield codes, reasons
        start += num_rows

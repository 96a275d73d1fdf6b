"""Which rows an expression holds for: columns of values in, a code for each row out.

Truth has three values. A comparison whose field a row does not have (or null, or NaN), or has as something that has no
order with the other side, is neither true nor false but unknown; `and`, `or` and `not` follow Kleene's logic, as in
SQL. Text that reads as a number is one wherever it meets a number. Equality of different things is plainly false.

Columns are judged as a whole: numbers as float64 where that is exact, any other values once for each distinct one.
"""

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..filelist import Source
from ..formats.rows import Rows
from .columns import INDEX_FIELDS, Block, Distinct, read_columns
from .expression import ORDER_SIGNS, All, Compare, Expression, Field, Literal, Member, Not, field_names

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
_COMPARABLE = (_NUMERIC, _TEXT, _TRUTH)
_KIND_NAMES = {_NUMERIC: "a number", _TEXT: "text"}


def judge(
    expression: Expression, columns: Mapping[str, Sequence | np.ndarray | Distinct], num_rows: int
) -> tuple[np.ndarray, list[str]]:
    """(codes, uint16 [num_rows]; reasons): code 0 is a row for which the expression is true, any other says why it is
    not: `reasons[code - 1]`.

    columns: by field the value of each row, None where it has none; a field without a column is in no row. Integer
    arrays are sizes in pixels, 0 where unknown; arrays of float32 or float64 are numbers, NaN where there is none. Both
    are compared as a whole, a `Distinct` value by value, other sequences row by row.
    """
    judgement = _Judgement({name: _classify(values) for name, values in columns.items()}, num_rows)
    truth = judgement.of(expression)
    codes = np.where(truth.true, 0, np.where(truth.unknown > 0, truth.unknown, 1)).astype(np.uint16)
    return codes, [FALSE, *judgement.reasons]


@dataclass(frozen=True)
class _Column:
    """Values and their kinds, [rows]; or [distinct values], of which row i has that at `places[i]`."""

    values: np.ndarray
    kinds: np.ndarray
    places: np.ndarray | None = None

    def of_rows(self) -> tuple[np.ndarray, np.ndarray]:
        if self.places is None:
            return self.values, self.kinds
        return self.values[self.places], self.kinds[self.places]


@dataclass(frozen=True)
class _Truth:
    """`true`: bool [rows]. `unknown`: uint16 [rows], 0 where known, else the code of the reason. Never both."""

    true: np.ndarray
    unknown: np.ndarray

    def negated(self) -> "_Truth":
        return _Truth(~self.true & (self.unknown == 0), self.unknown)

    def at(self, places: np.ndarray) -> "_Truth":
        return _Truth(self.true[places], self.unknown[places])


class _Judgement:
    """One evaluation over the rows of some columns; reasons are added to those given."""

    def __init__(self, columns: dict[str, _Column], num_rows: int, reasons: list[str] | None = None):
        self._num_rows, self._columns = num_rows, columns
        self.reasons = [] if reasons is None else reasons

    def of(self, expression: Expression) -> _Truth:
        if isinstance(expression, Compare | Member):
            return self._of_values(expression) or self._of_rows(expression)
        if isinstance(expression, Not):
            return self.of(expression.term).negated()
        if isinstance(expression, All):
            return self._all([self.of(term) for term in expression.terms])
        return self._all([self.of(term).negated() for term in expression.terms]).negated()

    def _of_values(self, expression: Compare | Member) -> _Truth | None:
        """Of one field with distinct values: judged once for each."""
        names = field_names(expression)
        column = self._columns.get(*names) if len(names) == 1 else None
        if column is None or column.places is None:
            return None
        values = {name: _Column(column.values, column.kinds) for name in names}
        return _Judgement(values, len(column.values), self.reasons).of(expression).at(column.places)

    def _of_rows(self, expression: Compare | Member) -> _Truth:
        if isinstance(expression, Compare):
            return self._compare(expression)
        return self._member(expression)

    def _all(self, truths: list[_Truth]) -> _Truth:
        true = np.logical_and.reduce([truth.true for truth in truths])
        false = np.logical_or.reduce([truth.negated().true for truth in truths])
        unknown = np.zeros(self._num_rows, dtype=np.uint16)
        for truth in truths:
            unknown = np.where(unknown == 0, truth.unknown, unknown)
        return _Truth(true, np.where(false, 0, unknown).astype(np.uint16))

    def _compare(self, expression: Compare) -> _Truth:
        left, right = expression.left, expression.right
        (left_values, left_kinds), (right_values, right_kinds) = self._operand(left, right), self._operand(right, left)
        left_values, left_kinds = _as_numbers(left_values, left_kinds, right_kinds)
        right_values, right_kinds = _as_numbers(right_values, right_kinds, left_kinds)
        unknown = self._missing((left, left_kinds), (right, right_kinds))
        comparable = (unknown == 0) & (left_kinds == right_kinds) & (left_kinds != _OTHER)
        if expression.sign in ORDER_SIGNS:
            comparable &= left_kinds != _TRUTH
            odd = (unknown == 0) & ~comparable
            if odd.any():
                unknown[odd] = self._code(_no_order(left, right))
        operate = _OPERATORS[expression.sign]
        if comparable.all():
            return _Truth(operate(left_values, right_values).astype(bool), unknown)
        true = (unknown == 0) & (expression.sign == "!=")
        true[comparable] = operate(left_values[comparable], right_values[comparable]).astype(bool)
        return _Truth(true, unknown)

    def _member(self, expression: Member) -> _Truth:
        values, kinds = self._operand(expression.item, None)
        unknown = self._missing((expression.item, kinds))
        listed = {kind: {v.value for v in expression.values if _kind(v.value) == kind} for kind in _COMPARABLE}
        numbers = listed[_NUMERIC]
        listed[_NUMERIC] = numbers | {read_number(text) for text in listed[_TEXT]}
        if values.dtype == np.float64:
            exact = [float(number) for number in listed[_NUMERIC] if number is not None and _is_float(number)]
            return _Truth(np.isin(values, exact) & (unknown == 0), unknown)
        true = np.zeros(self._num_rows, dtype=bool)
        for i in np.flatnonzero((unknown == 0) & (kinds != _OTHER)):
            true[i] = values[i] in listed[kinds[i]] or (kinds[i] == _TEXT and read_number(values[i]) in numbers)
        return _Truth(true, unknown)

    def _operand(self, operand: Field | Literal, beside: Field | Literal | None) -> tuple[np.ndarray, np.ndarray]:
        """(values, their kinds), each of shape [rows]. Beside a column of float64, so is a number that is one."""
        if isinstance(operand, Field):
            if operand.name in self._columns:
                return self._columns[operand.name].of_rows()
            return np.full(self._num_rows, None), np.full(self._num_rows, _MISSING, dtype=np.uint8)
        kind = _kind(operand.value)
        column = self._columns.get(beside.name) if isinstance(beside, Field) else None
        as_float = column is not None and column.values.dtype == np.float64 and kind == _NUMERIC
        values = np.empty(self._num_rows, np.float64 if as_float and _is_float(operand.value) else object)
        values.fill(operand.value)  # `np.full` would drop NULs at the end of a text
        return values, np.full(self._num_rows, kind, dtype=np.uint8)

    def _missing(self, *operands: tuple[Field | Literal, np.ndarray]) -> np.ndarray:
        unknown = np.zeros(self._num_rows, dtype=np.uint16)
        for operand, kinds in operands:
            missing = (kinds == _MISSING) & (unknown == 0)
            if missing.any():
                unknown[missing] = self._code(f"where: no field {operand}")
        return unknown

    def _code(self, reason: str) -> int:
        """Codes are counted on from that of FALSE."""
        if reason not in self.reasons:
            self.reasons.append(reason)
        return self.reasons.index(reason) + 2


def _no_order(left: Field | Literal, right: Field | Literal) -> str:
    if isinstance(left, Field) and isinstance(right, Field):
        return f"where: {left} and {right} have no order"
    field, literal = (left, right) if isinstance(left, Field) else (right, left)
    return f"where: {field} is not {_KIND_NAMES[_kind(literal.value)]}"


def _classify(values: Sequence | Distinct) -> _Column:
    if isinstance(values, Distinct):
        column = _classify(values.values)
        return _Column(column.values, column.kinds, values.places)
    if isinstance(values, np.ndarray):
        known = values > 0 if values.dtype.kind in "ui" else ~np.isnan(values)
        return _Column(values.astype(np.float64), np.where(known, _NUMERIC, _MISSING).astype(np.uint8))
    kinds = np.fromiter(map(_kind, values), dtype=np.uint8, count=len(values))
    return _Column(np.fromiter(values, dtype=object, count=len(values)), kinds)


def _is_float(number: int | float) -> bool:
    """Whether float64 holds a number exactly, so that comparing it there is comparing it."""
    try:
        return float(number) == number
    except OverflowError:
        return False


def _kind(value) -> int:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return _MISSING
    if isinstance(value, bool):
        return _TRUTH
    if isinstance(value, int | float):
        return _NUMERIC
    return _TEXT if isinstance(value, str) else _OTHER


def _as_numbers(values: np.ndarray, kinds: np.ndarray, other_kinds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Text that meets a number, and reads as one, as that number."""
    meeting = np.flatnonzero((kinds == _TEXT) & (other_kinds == _NUMERIC))
    if not len(meeting):
        return values, kinds
    values, kinds = values.copy(), kinds.copy()
    for i in meeting:
        number = read_number(values[i])
        if number is not None:
            values[i], kinds[i] = number, _NUMERIC
    return values, kinds


def read_number(text: str) -> int | float | None:
    """The number that a text spells, as expressions do, with spaces around it; None where it spells none."""
    text = text.strip()
    if not _NUMBER.fullmatch(text):
        return None
    return int(text) if _INTEGER.fullmatch(text) else float(text)


def columns_of(where: Expression) -> set[str]:
    """The fields of a condition that the index does not answer."""
    return field_names(where) - INDEX_FIELDS


def judge_blocks(part: Rows, source: Source, where: Expression, sizes: dict) -> list[tuple[np.ndarray, list[str]]]:
    """(code of each row, reasons), as `judge` gives them, of runs of rows, one after the other."""
    names = columns_of(where)
    if not names:
        return [judge(where, sizes, len(part))]
    return list(_judge_columns(read_columns(part, source, names), where, sizes))


def _judge_columns(blocks: list[Block], where: Expression, sizes: dict) -> Iterator[tuple[np.ndarray, list[str]]]:
    start = 0
    for num_rows, found, errors in blocks:
        own_sizes = {name: values[start : start + num_rows] for name, values in sizes.items()}
        codes, reasons = judge(where, {**found, **own_sizes}, num_rows)
        if errors is not None:
            # Of rows that cannot be read, what the sizes decide stays decided.
            by_size, _ = judge(where, own_sizes, num_rows)
            first = len(reasons) + 1
            codes = np.where(
                by_size > 1, np.where(errors.places < len(errors.values) - 1, first + errors.places, codes), codes
            )
            reasons = reasons + errors.values[:-1]
        yield codes, reasons
        start += num_rows

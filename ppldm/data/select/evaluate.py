"""Which rows an expression holds for: columns of values in, a code for each row out.

Truth has three values. A comparison whose field a row does not have (or null, or NaN), or has as something that has no
order with the other side, is neither true nor false but unknown; `and`, `or` and `not` follow Kleene's logic, as in
SQL. Text that reads as a number is one wherever it meets a number. Equality of different things is plainly false.

Columns of numbers are judged as a whole, as float64 where that is exact; any others once for each distinct value.
"""

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from ..filelist import Source
from ..formats.row import Rows
from .columns import INDEX_FIELDS, Distinct, read_columns
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

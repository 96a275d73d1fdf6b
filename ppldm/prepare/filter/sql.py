"""Expressions as SQL that DuckDB and Spark understand alike, so that both choose the same rows.

Numbers are compared as they are stored: integers with integers exactly, all else as float64, so that a float32 column
is widened and never the bound rounded. NaN is NULL here, as it is unknown in `select.evaluate`. Text is compared byte
by byte. What has no order with the other side is refused before a row is read.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...data.select.expression import All, Any, Compare, Expression, Field, Literal, Member, Not
from ...utils.errors import ConfigError
from ...utils.machine.duckdb import quote_text
from .columns import INTEGER, NUMBER, OTHER, TEXT, TRUTH, Columns

# Names that the queries add to a table's own.
KEY, FILE, ROW, PART = "ppldm_key", "ppldm_file", "ppldm_row", "ppldm_part"
BLOCKED = "ppldm_blocked"

_INT64 = range(-(2**63), 2**63)
_NUMERIC = (INTEGER, NUMBER)
# So many digits of a key, which have so many values, decide about its part.
KEY_DIGITS = 8
NUM_KEYS = 16**KEY_DIGITS


@dataclass(frozen=True)
class Dialect:
    """How an engine quotes names and text."""

    quote_name: Callable[[str], str]
    quote_text: Callable[[str], str]


DUCKDB = Dialect(
    quote_name=lambda name: '"' + name.replace('"', '""') + '"',
    quote_text=quote_text,
)
SPARK = Dialect(
    quote_name=lambda name: "`" + name.replace("`", "``") + "`",
    quote_text=lambda text: "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'",
)


def compile_condition(expression: Expression, columns: Columns, dialect: Dialect) -> str:
    """The SQL of an expression, TRUE, FALSE or NULL of each row. Raises ConfigError: a column that is not there, or
    that cannot be compared with the other side."""
    return _Compiler(columns, dialect).of(expression)


def first_failure(conditions: Sequence[str]) -> str:
    """SQL: 0 where all conditions hold, else 2 i + 1 where condition i (from 0) is the first not to be true and is
    false, 2 i + 2 where it is NULL."""
    cases = " ".join(
        f"WHEN ({condition}) IS NULL THEN {2 * i + 2} WHEN NOT ({condition}) THEN {2 * i + 1}"
        for i, condition in enumerate(conditions)
    )
    return f"CASE {cases} ELSE 0 END" if cases else "0"


def all_hold(conditions: Sequence[str]) -> str:
    """SQL: whether every condition is true."""
    return " AND ".join(f"({condition})" for condition in conditions) or "TRUE"


def shuffle_key(seed: int, url: str, text: str) -> str:
    """SQL: 32 hexadecimal digits that depend only on the seed and the row's URL and text. url, text: SQL."""
    return f"md5(concat('{seed}', chr(10), coalesce({url}, ''), chr(10), coalesce({text}, '')))"


def first_key(part: int, num_parts: int) -> str:
    """The least key of part `part`, from 0: its first digits. Parts divide the range of keys evenly, in order."""
    return f"{-(-part * NUM_KEYS // num_parts):0{KEY_DIGITS}x}"


def number_sql(column: str, columns: Columns, dialect: Dialect) -> str:
    """SQL: a column of numbers as float64, NaN as NULL. Raises ConfigError where it has no numbers."""
    if columns.kinds[column] not in _NUMERIC:
        raise ConfigError(f"column {column!r} holds no numbers ({columns.kinds[column]})")
    return _Compiler(columns, dialect).field(column, as_double=True)


class _Compiler:
    def __init__(self, columns: Columns, dialect: Dialect):
        self._columns, self._dialect = columns, dialect

    def of(self, expression: Expression) -> str:
        if isinstance(expression, Compare):
            return self._compare(expression)
        if isinstance(expression, Member):
            return self._member(expression)
        if isinstance(expression, Not):
            return f"NOT ({self.of(expression.term)})"
        sign = " AND " if isinstance(expression, All) else " OR "
        assert isinstance(expression, All | Any)
        return sign.join(f"({self.of(term)})" for term in expression.terms)

    def _compare(self, expression: Compare) -> str:
        sides = expression.left, expression.right
        as_double = self._check(expression, sides)
        left, right = (self._side(side, as_double) for side in sides)
        return f"{left} {'=' if expression.sign == '==' else expression.sign.replace('!=', '<>')} {right}"

    def _member(self, expression: Member) -> str:
        sides = expression.item, *expression.values
        as_double = self._check(expression, sides)
        item, *values = (self._side(side, as_double) for side in sides)
        return f"{item} IN ({', '.join(values)})"

    def _check(self, expression: Expression, sides: Sequence[Field | Literal]) -> bool:
        """Whether the sides meet as float64. Raises ConfigError where they do not meet."""
        kinds = [self._kind(side) for side in sides]
        if OTHER in kinds or len({NUMBER if kind in _NUMERIC else kind for kind in kinds}) > 1:
            has = ", ".join(f"{side} is {kind}" for side, kind in zip(sides, kinds, strict=True))
            raise ConfigError(f"`{expression}` cannot be answered: {has}; compare numbers with numbers, text with text")
        return NUMBER in kinds

    def _kind(self, side: Field | Literal) -> str:
        if isinstance(side, Field):
            return self._columns.kinds[self._columns.need(side.name)]
        if isinstance(side.value, bool):
            return TRUTH
        if isinstance(side.value, str):
            return TEXT
        return INTEGER if isinstance(side.value, int) and side.value in _INT64 else NUMBER

    def _side(self, side: Field | Literal, as_double: bool) -> str:
        if isinstance(side, Field):
            return self.field(self._columns.need(side.name), as_double)
        if isinstance(side.value, bool):
            return str(side.value).upper()
        if isinstance(side.value, str):
            if side.value != side.value.encode(errors="replace").decode():
                raise ConfigError(f"the text {side.value!r} of a condition is not UTF-8; write it in UTF-8")
            return self._dialect.quote_text(side.value)
        return f"CAST('{float(side.value)!r}' AS DOUBLE)" if as_double else str(side.value)

    def field(self, column: str, as_double: bool) -> str:
        name = self._dialect.quote_name(column)
        if self._columns.kinds[column] == NUMBER:
            return f"nullif(CAST({name} AS DOUBLE), CAST('NaN' AS DOUBLE))"
        return f"CAST({name} AS DOUBLE)" if as_double else name

"""What a filter does, as one plan that every engine carries out by the same queries, and so with the same result.

An engine makes a relation of all rows, the table's columns and two more: FILE, the number of a row's file from 0, and
ROW, the row's number in it; with a block list also BLOCKED. With a seed, rows are ordered by a hash of (seed, URL,
text), cut into parts of equal ranges; rows of equal hash, and all rows without a seed, keep the order of the files.
Without a seed a file makes a part.

Expressions become SQL that DuckDB and Spark understand alike. Integers are compared with integers exactly, all other
numbers as float64, so that a float32 column is widened and never the bound rounded. NaN is NULL. Text is compared byte
by byte. What has no order with the other side is refused.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...data.select.expression import All, Any, Compare, Expression, Field, Literal, Member, Not
from ...utils.errors import ConfigError
from ...utils.machine.duckdb import quote_text
from ...utils.text import hide
from ..block_list import NOTHING, BlockList
from ..metadata import INTEGER, NUMBER, OTHER, TEXT, TRUTH, Columns, Tables

# Names that the queries add to a table's own.
KEY, FILE, ROW, PART = "ppldm_key", "ppldm_file", "ppldm_row", "ppldm_part"
BLOCKED, _COPY = "ppldm_blocked", "ppldm_copy"
_INT64 = range(-(2**63), 2**63)
_NUMERIC = (INTEGER, NUMBER)
KEY_DIGITS = 8  # of a key, which decide about its part
NUM_KEYS = 16**KEY_DIGITS


@dataclass(frozen=True)
class Dialect:
    """How an engine quotes names and text."""

    quote_name: Callable[[str], str]
    quote_text: Callable[[str], str]


DUCKDB = Dialect(lambda name: '"' + name.replace('"', '""') + '"', quote_text)
SPARK = Dialect(
    lambda name: "`" + name.replace("`", "``") + "`",
    lambda text: "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'",
)


@dataclass(frozen=True)
class Plan:
    """`dedup`: the column of which each value is kept once, or None. `seed`: of the shuffle, None for no shuffle.
    `blocked`: URLs only, as rows of a table have no files."""

    tables: Tables
    conditions: tuple[Expression, ...]
    dedup: str | None
    seed: int | None
    num_parts: int
    blocked: BlockList = NOTHING

    @property
    def reasons(self) -> list[str]:
        """What a row can be dropped by, in the order in which it is asked for."""
        blocked = [f"not on block list {digest[:12]}" for digest in self.blocked.settings.values()]
        unique = [f"unique {self.dedup}"] if self.dedup else []
        return [*blocked, *(hide(str(one)) for one in self.conditions), *unique]

    def count_query(self, relation: str, dialect: Dialect) -> str:
        """(code, rows) by the first of `reasons` that does not hold, as `first_failure` codes them."""
        return f"SELECT {self.failure_sql(dialect)} AS code, count(*) AS n FROM {relation} GROUP BY 1"

    def failure_sql(self, dialect: Dialect) -> str:
        """SQL: the code of a row, 0 where it is kept, but for copies of another row."""
        return first_failure(self._terms(dialect))

    def kept_query(self, relation: str, dialect: Dialect, are_kept: bool = False) -> str:
        """The rows kept: all columns, FILE, ROW and, with a seed, KEY. `are_kept`: the relation has no others."""
        columns = ", ".join(map(dialect.quote_name, self.tables.columns.kinds))
        query = f"SELECT {columns}, {FILE}, {ROW} FROM {relation}"
        if not are_kept:
            query += f" WHERE {all_hold(self._terms(dialect))}"
        if self.dedup:
            field = dialect.quote_name(self.dedup)
            copies = f"SELECT *, row_number() OVER (PARTITION BY {field} ORDER BY {FILE}, {ROW}) AS {_COPY} FROM"
            query = f"SELECT {columns}, {FILE}, {ROW} FROM ({copies} ({query})) WHERE {_COPY} = 1"
        if self.seed is None:
            return query
        # 32 hexadecimal digits that depend only on the seed and the row's URL and text.
        names = (dialect.quote_name(self.tables.columns.need(name)) for name in ("URL", "TEXT"))
        parts = "".join(f", chr(10), coalesce({name}, '')" for name in names)
        return f"SELECT *, md5(concat('{self.seed}'{parts})) AS {KEY} FROM ({query})"

    @property
    def order(self) -> tuple[str, ...]:
        """The columns of the kept rows that say their order."""
        return (FILE, ROW) if self.seed is None else (KEY, FILE, ROW)

    def output_columns(self, dialect: Dialect) -> str:
        """SQL: the columns that are written, under their published names."""
        names = self.tables.columns.published_names()
        return ", ".join(f"{dialect.quote_name(old)} AS {dialect.quote_name(new)}" for old, new in names.items())

    def _terms(self, dialect: Dialect) -> list[str]:
        terms = [f"NOT {BLOCKED}"] if self.blocked.urls else []
        terms += [compile_condition(condition, self.tables.columns, dialect) for condition in self.conditions]
        if self.dedup:
            terms.append(f"CASE WHEN {dialect.quote_name(self.dedup)} IS NOT NULL THEN TRUE END")
        return terms


def compile_condition(expression: Expression, columns: Columns, dialect: Dialect) -> str:
    """SQL: TRUE, FALSE or NULL of each row. Raises ConfigError for columns that are missing or cannot be compared."""
    return _Compiler(columns, dialect).of(expression)


def part_path(folder, part: int):
    """The file of part `part`, from 0, in the folder of a result."""
    return folder / f"part_{part + 1}.parquet"


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
        if isinstance(expression, Compare | Member):
            return self._compare(expression)
        if isinstance(expression, Not):
            return f"NOT ({self.of(expression.term)})"
        sign = " AND " if isinstance(expression, All) else " OR "
        assert isinstance(expression, All | Any)
        return sign.join(f"({self.of(term)})" for term in expression.terms)

    def _compare(self, expression: Compare | Member) -> str:
        is_member = isinstance(expression, Member)
        sides = (expression.item, *expression.values) if is_member else (expression.left, expression.right)
        as_double = self._check(expression, sides)
        first, *others = (self._side(side, as_double) for side in sides)
        if is_member:
            return f"{first} IN ({', '.join(others)})"
        sign = {"==": "=", "!=": "<>"}.get(expression.sign, expression.sign)
        return f"{first} {sign} {others[0]}"

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

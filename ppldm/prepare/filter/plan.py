"""What a filter does, as one plan that every engine carries out by the same queries, and so with the same result.

An engine makes a relation of all rows, the table's columns and two more: FILE, the number of a row's file from 0, and
ROW, the row's number in it; with a block list, a third: BLOCKED, whether the row's URL is on it. With a seed, rows are
ordered by a hash of (seed, URL, text), which is cut into parts of equal ranges; rows of equal hash, and all rows
without a seed, keep the order of the files. Without a seed a file makes a part. Of rows with the same URL or hash, the
first of the files is kept.
"""

from dataclasses import dataclass

from ...data.select.expression import Expression
from ...utils.hidden import hide
from ..block_list import NOTHING, BlockList
from ..metadata import Tables
from .sql import (
    BLOCKED,
    FILE,
    KEY,
    ROW,
    Dialect,
    all_hold,
    compile_condition,
    first_failure,
    shuffle_key,
)

_COPY = "ppldm_copy"


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
        return [
            *blocked,
            *(hide(str(one)) for one in self.conditions),
            *([f"unique {self.dedup}"] if self.dedup else []),
        ]

    def count_query(self, relation: str, dialect: Dialect) -> str:
        """(code, rows) by the first of `reasons` that does not hold, as `sql.first_failure` codes them."""
        return f"SELECT {self.failure_sql(dialect)} AS code, count(*) AS n FROM {relation} GROUP BY 1"

    def failure_sql(self, dialect: Dialect) -> str:
        """SQL: the code of a row, 0 where it is kept, but for copies of another row."""
        return first_failure(self._terms(dialect))

    def kept_query(self, relation: str, dialect: Dialect, are_kept: bool = False) -> str:
        """The rows that are kept: all columns, FILE, ROW and, with a seed, KEY. `are_kept`: the relation has no
        others."""
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
        url, text = (dialect.quote_name(self.tables.columns.need(name)) for name in ("URL", "TEXT"))
        return f"SELECT *, {shuffle_key(self.seed, url, text)} AS {KEY} FROM ({query})"

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

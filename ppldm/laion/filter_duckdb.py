"""The filter on DuckDB: one machine, no Java. What does not fit into the memory given goes to the disk."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..utils.errors import DataError, EnvironmentProblem, OutputError
from ..utils.log import get_logger, progress
from ..utils.machine import count_usable_cores
from .filter_plan import Plan
from .metadata import Tables
from .sql import DUCKDB, FILE, KEY, KEY_DIGITS, PART, ROW, first_key

_ROWS, _KEPT = "ppldm_rows", "ppldm_kept"
_SPILL = ".spill"

dialect = DUCKDB


def filter_tables(plan: Plan, folder: Path, memory_gb: float) -> dict[int, int]:
    """Write `part_1.parquet`, ... into the folder; rows by the code of what dropped them (`Plan.count_query`).

    Raises EnvironmentProblem, DataError, OutputError.
    """
    with _open(plan.tables, memory_gb, folder / _SPILL) as connection:
        get_logger().info("counting %s rows by condition", f"{plan.tables.rows:,}")
        counts = dict(connection.execute(plan.count_query(_ROWS, DUCKDB)).fetchall())
        get_logger().info("taking %s rows", f"{counts.get(0, 0):,}")
        # Sorted, the first digits of a key are enough to find a part.
        place = FILE if plan.seed is None else f"substr({KEY}, 1, {KEY_DIGITS})"
        columns = f"{plan.output_columns(DUCKDB)}, {place} AS {PART}"
        kept = f"SELECT {columns} FROM ({plan.kept_query(_ROWS, DUCKDB)}) ORDER BY {', '.join(plan.order)}"
        connection.execute(f"CREATE TEMP TABLE {_KEPT} AS {kept}")
        for part in progress(range(plan.num_parts), desc="writing parts", unit="part"):
            target = DUCKDB.quote_text(str(folder / f"part_{part + 1}.parquet"))
            query = f"SELECT * EXCLUDE ({PART}) FROM {_KEPT} WHERE {_in_part(plan, part)}"
            connection.execute(f"COPY ({query}) TO {target} (FORMAT parquet)")
    return counts


def run_query(tables: Tables, query, memory_gb: float, folder: Path | None = None) -> list[tuple]:
    """The rows of a query, `query` being a function of the name of the relation of all rows."""
    with _open(tables, memory_gb, folder) as connection:
        return connection.execute(query(_ROWS)).fetchall()


def _in_part(plan: Plan, part: int) -> str:
    if plan.seed is None:
        return f"{PART} = {part}"
    low = f"{PART} >= '{first_key(part, plan.num_parts)}'"
    return low if part + 1 == plan.num_parts else f"{low} AND {PART} < '{first_key(part + 1, plan.num_parts)}'"


@contextmanager
def _open(tables: Tables, memory_gb: float, spill: Path | None) -> Iterator:
    """A connection with the relation of all rows, its errors as ours."""
    try:
        import duckdb
    except ImportError as error:
        raise EnvironmentProblem(f"DuckDB cannot be imported ({error}); pip install duckdb") from error
    config = {
        "memory_limit": f"{memory_gb * 1000:.0f}MB",
        "threads": count_usable_cores(),
        "temp_directory": str(spill or ""),
    }
    files = ", ".join(DUCKDB.quote_text(_escape_glob(str(path))) for path in tables.paths)
    try:
        with duckdb.connect(":memory:", config=config) as connection:
            connection.execute("SET enable_progress_bar = false")
            connection.execute(
                f"CREATE TEMP VIEW {_ROWS} AS SELECT *, file_index AS {FILE}, file_row_number AS {ROW} "
                f"FROM read_parquet([{files}])"
            )
            yield connection
    except duckdb.OutOfMemoryException as error:
        raise OutputError(
            f"{memory_gb:.1f} GB of memory, or the disk, do not suffice ({_one_line(error)}); give more by --memory-gb "
            "or make room beside --output"
        ) from error
    except duckdb.IOException as error:
        raise OutputError(
            f"DuckDB cannot read or write ({_one_line(error)}); make room and see to the files"
        ) from error
    except duckdb.Error as error:
        raise DataError(
            f"DuckDB cannot read the tables ({_one_line(error)}); get them again or leave them out"
        ) from error


def _escape_glob(path: str) -> str:
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in path)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]

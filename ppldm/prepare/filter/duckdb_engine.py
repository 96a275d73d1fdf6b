"""The filter on DuckDB: one machine, no Java. What does not fit into the memory given goes to the disk."""

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path

from ...utils.errors import DataError, OutputError
from ...utils.files import finish_file, read_json, write_json
from ...utils.log import following, get_logger, progress
from ...utils.machine.duckdb import connect, execute, load_duckdb, parquet_sql
from ...utils.machine.resources import count_usable_cores
from ...utils.text import one_line
from ..block_list import NOTHING, BlockList
from ..metadata import Tables
from .plan import BLOCKED, DUCKDB, FILE, KEY, KEY_DIGITS, PART, ROW, Plan, first_key, part_path

_ROWS, _KEPT, _BLOCK_LIST = "ppldm_rows", "ppldm_kept", "ppldm_block_list"
_SPILL, _COUNTS = ".spill", ".counts.json"
_ROW_GROUP_ROWS = 122_880  # DuckDB's
_MAX_WRITERS = 8  # each holds a row group or two
# Columns worth a dictionary in the files; for all others it takes as long again and is given up.
_FEW_VALUES = {"WIDTH", "HEIGHT", "LANGUAGE"}

dialect = DUCKDB


def filter_tables(plan: Plan, folder: Path, memory_gb: float) -> dict[int, int]:
    """Write `part_1.parquet`, ... into the folder; rows by the code of what dropped them (`Plan.count_query`). What an
    interrupted run has finished there is kept. Raises EnvironmentProblem, DataError, OutputError."""
    spill, counts_path = folder / _SPILL, folder / _COUNTS
    shutil.rmtree(spill, ignore_errors=True)
    with _open(plan.tables, memory_gb, spill, plan.blocked) as connection:
        counts = read_json(counts_path)
        if counts is None:
            rows = _execute(connection, plan.count_query(_ROWS, DUCKDB), "counting", plan.tables.rows)
            counts = {str(code): number for code, number in rows}
            write_json(counts_path, counts)
        missing = [part for part in range(plan.num_parts) if not part_path(folder, part).exists()]
        if len(missing) < plan.num_parts:
            get_logger().info("%d of %d parts were finished already", plan.num_parts - len(missing), plan.num_parts)
        if missing:
            _write_parts(connection, plan, folder, missing)
    shutil.rmtree(spill, ignore_errors=True)
    counts_path.unlink()
    return {int(code): number for code, number in counts.items()}


def _write_parts(connection, plan: Plan, folder: Path, missing: list[int]) -> None:
    """The parts of these numbers. Sorted, the first digits of a key are enough to find a part."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from ..download.part import regroup

    place = FILE if plan.seed is None else f"substr({KEY}, 1, {KEY_DIGITS})"
    columns = f"{plan.output_columns(DUCKDB)}, {place} AS {PART}"
    kept = f"SELECT {columns} FROM ({plan.kept_query(_ROWS, DUCKDB)})"
    if missing[0] > 0:
        kept += f" WHERE {PART} >= {_first_place(plan, missing[0])}"
    query = f"CREATE TABLE {_KEPT} AS {kept} ORDER BY {', '.join(plan.order)}"
    _execute(connection, query, "sorting" if plan.seed is not None else "taking rows", plan.tables.rows)

    def write(cursor, part: int) -> None:
        """By pyarrow, row groups of equal length: DuckDB's own depend on where in the table the part lies."""
        path = part_path(folder, part)
        temporary = path.with_name(f".{path.name}.tmp")
        with cursor:
            query = f"SELECT * EXCLUDE ({PART}) FROM {_KEPT} WHERE {PART} >= {_first_place(plan, part)}"
            if part + 1 < plan.num_parts:
                query += f" AND {PART} < {_first_place(plan, part + 1)}"
            reader = cursor.execute(query).to_arrow_reader(_ROW_GROUP_ROWS)
            few_values = [name for name in reader.schema.names if name in _FEW_VALUES]
            with pq.ParquetWriter(temporary, reader.schema, use_dictionary=few_values) as writer:
                for table in regroup((pa.Table.from_batches([batch]) for batch in reader), _ROW_GROUP_ROWS):
                    writer.write_table(table, row_group_size=_ROW_GROUP_ROWS)
        finish_file(temporary, path)

    with (
        ThreadPoolExecutor(min(count_usable_cores(), _MAX_WRITERS)) as executor,
        progress(total=plan.num_parts, initial=plan.num_parts - len(missing), desc="writing parts", unit="part") as bar,
    ):
        written = [executor.submit(write, connection.cursor(), part) for part in missing]
        try:
            for future in as_completed(written):
                future.result()
                bar.update()
        finally:
            executor.shutdown(cancel_futures=True)


def _execute(connection, query: str, name: str, num_rows: int) -> list[tuple]:
    """The rows of a query over all rows, run under a progress bar."""

    def measure() -> tuple[float, float]:
        return int(num_rows * max(0.0, connection.query_progress()) / 100), num_rows

    with following(measure, desc=name, unit="row", unit_scale=True):
        return execute(connection, query)


def run_query(tables: Tables, query, memory_gb: float, folder: Path | None = None) -> list[tuple]:
    """The rows of a query, `query` being a function of the name of the relation of all rows."""
    with _open(tables, memory_gb, folder) as connection:
        return execute(connection, query(_ROWS))


def _first_place(plan: Plan, part: int) -> str:
    """SQL: the least value of PART, as the table of kept rows has it, in part `part`."""
    return str(part) if plan.seed is None else f"'{first_key(part, plan.num_parts)}'"


@contextmanager
def _open(tables: Tables, memory_gb: float, spill: Path | None, blocked: BlockList = NOTHING) -> Iterator:
    """A connection with the relation of all rows, its errors as ours."""
    import pyarrow as pa

    duckdb, columns = load_duckdb(), []
    for name in tables.columns.kinds:  # as in the first file; other files may spell a name differently
        names = [name, *sorted(tables.spellings.get(name, ()))]
        spelled = ", ".join(map(DUCKDB.quote_name, names))
        columns.append(f"coalesce({spelled}) AS {DUCKDB.quote_name(name)}" if len(names) > 1 else spelled)
    select = ", ".join(columns) if tables.spellings else "*"
    try:
        with connect(memory_gb, spill) as connection:
            # Measured for our own bars, and not printed.
            connection.execute("SET enable_progress_bar_print = false")
            connection.execute("SET enable_progress_bar = true")
            source = parquet_sql(tables.paths, f", union_by_name = {bool(tables.spellings or tables.mixed)}")
            rows = f"SELECT {select}, file_index AS {FILE}, file_row_number AS {ROW} FROM {source}"
            if blocked.urls:
                connection.register("ppldm_urls", pa.table({"url": sorted(blocked.urls)}))
                execute(connection, f"CREATE TEMP TABLE {_BLOCK_LIST} AS SELECT url FROM ppldm_urls")
                connection.unregister("ppldm_urls")
                is_blocked = f"{DUCKDB.quote_name(tables.columns.need('URL'))} IN (FROM {_BLOCK_LIST})"
                rows = f"SELECT *, coalesce({is_blocked}, FALSE) AS {BLOCKED} FROM ({rows})"
            execute(connection, f"CREATE TEMP VIEW {_ROWS} AS {rows}")
            yield connection
    except duckdb.Error as error:
        why = one_line(str(error), 300)
        if isinstance(error, duckdb.OutOfMemoryException):
            problem = f"{memory_gb:.1f} GB of memory, or the disk, do not suffice ({why}); give more by --memory-gb "
            raise OutputError(f"{problem}or make room beside --output") from error
        if isinstance(error, duckdb.IOException):
            raise OutputError(f"DuckDB cannot read or write ({why}); make room and see to the files") from error
        if damaged := _find_damaged(tables):
            raise DataError(f"{damaged} cannot be read ({why}); get it again or omit it") from error
        raise DataError(f"DuckDB cannot answer the conditions ({why}); see to --where") from error


def _find_damaged(tables: Tables):
    """The first file of which not all columns can be read, which DuckDB's errors do not name; None if all can."""
    import duckdb

    with duckdb.connect(":memory:") as connection:
        for path in tables.paths:
            try:
                execute(connection, f"SELECT max(hash(COLUMNS(*))) FROM {parquet_sql([path])}")
            except duckdb.Error:
                return path
    return None

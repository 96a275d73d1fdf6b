"""The filter on Spark: this machine or any cluster whose nodes see the same folders."""

import shutil
from pathlib import Path
from urllib.parse import unquote, urlparse

from ..utils.errors import ConfigError, DataError
from .filter_plan import Plan
from .metadata import Tables
from .spark import following_tasks, spark_session
from .sql import FILE, KEY, KEY_DIGITS, NUM_KEYS, PART, ROW, SPARK

_TABLES, _ROWS, _KEPT = "ppldm_tables", "ppldm_rows", "ppldm_kept"
_STAGING = ".spark"

dialect = SPARK


def filter_tables(plan: Plan, folder: Path, memory_gb: float, master: str | None = None) -> dict[int, int]:
    """Write `part_1.parquet`, ... into the folder; rows by the code of what dropped them (`Plan.count_query`).

    Raises EnvironmentProblem, DataError.
    """
    with spark_session(master, memory_gb) as spark:
        _make_relations(spark, plan.tables)
        with following_tasks(spark, "counting", 1):
            counts = {row.code: row.n for row in spark.sql(plan.count_query(_TABLES, SPARK)).collect()}
        spark.sql(plan.kept_query(_ROWS, SPARK)).createOrReplaceTempView(_KEPT)
        order = ", ".join(plan.order)
        rows = spark.sql(f"SELECT {plan.output_columns(SPARK)}, {order}, {_part_sql(plan)} AS {PART} FROM {_KEPT}")
        sorted_rows = rows.repartition(plan.num_parts, PART).sortWithinPartitions(PART, *plan.order)
        staging = folder / _STAGING
        with following_tasks(spark, "sorting and writing", plan.num_parts):
            sorted_rows.drop(*plan.order).write.partitionBy(PART).parquet(staging.absolute().as_uri())
    _collect_parts(staging, folder, plan.num_parts)
    return counts


def run_query(tables: Tables, query, memory_gb: float, master: str | None = None) -> list[tuple]:
    """The rows of a query, `query` being a function of the name of a relation of the tables' own columns."""
    with spark_session(master, memory_gb) as spark:
        _make_relations(spark, tables)
        return [tuple(row) for row in spark.sql(query(_TABLES)).collect()]


def _make_relations(spark, tables: Tables) -> None:
    """The tables as they are, and with FILE and ROW, which take a join."""
    from pyspark.sql.functions import expr

    if tables.spellings:
        name, others = min(tables.spellings.items())
        raise ConfigError(
            f"column {name!r} is named {min(others)!r} in some files, which only --engine duckdb reads together; filter"
            " them one by one"
        )
    frame = spark.read.parquet(*(f"file://{_escape_glob(str(path))}" for path in tables.paths))
    numbers = {str(path): number for number, path in enumerate(tables.paths)}
    frame.createOrReplaceTempView(_TABLES)
    # Spark writes the same file with one slash or three.
    encoded = [urlparse(name).path for name in frame.inputFiles()]
    values = ", ".join(
        f"({SPARK.quote_text(start + path)}, {numbers[unquote(path)]})"
        for path in encoded
        for start in ("file:", "file://")
    )
    files = spark.sql(f"SELECT * FROM VALUES {values} AS t(ppldm_path, {FILE})")
    rows = frame.selectExpr("*", "_metadata.file_path AS ppldm_place", f"_metadata.row_index AS {ROW}").join(
        files.hint("broadcast"), expr("ppldm_path = ppldm_place")
    )
    rows.drop("ppldm_path", "ppldm_place").createOrReplaceTempView(_ROWS)


def _part_sql(plan: Plan) -> str:
    """SQL: the part of a kept row, from 0; the same cuts as `sql.first_key` makes."""
    if plan.seed is None:
        return FILE
    return (
        f"CAST(CAST(conv(substr({KEY}, 1, {KEY_DIGITS}), 16, 10) AS BIGINT) * {plan.num_parts} DIV {NUM_KEYS} AS INT)"
    )


def _collect_parts(staging: Path, folder: Path, num_parts: int) -> None:
    """Give the file of each part its name. A part without rows, of which Spark writes nothing, becomes an empty table.

    Raises DataError where Spark wrote into a folder that is not the one seen here, or a part in several files.
    """
    import pyarrow.parquet as pq

    if not (staging / "_SUCCESS").is_file():
        raise DataError(
            f"Spark wrote nothing that is seen in {staging}; --output must be a folder that all nodes share"
        )
    written = {}
    for part in range(num_parts):
        files = list((staging / f"{PART}={part}").glob("*.parquet"))
        if len(files) > 1:
            raise DataError(f"Spark wrote part {part + 1} in {len(files)} files; run the same command again")
        if files:
            written[part] = files[0].rename(folder / f"part_{part + 1}.parquet")
    if written:
        empty = pq.read_schema(next(iter(written.values()))).empty_table()
        for part in set(range(num_parts)) - set(written):
            pq.write_table(empty, folder / f"part_{part + 1}.parquet")
    shutil.rmtree(staging)


def _escape_glob(path: str) -> str:
    return "".join(f"\\{letter}" if letter in "*?[]{}\\" else letter for letter in path)

"""The filter on Spark: this machine or any cluster that sees the folders, or what Hadoop's file systems name.

One pass counts what is dropped, beneath the shuffle, and writes what is kept. Each task writes one part and commits it
at once, by Hadoop's second algorithm: a killed run leaves whole parts in the staging folder, and the next one sorts and
writes the others.
"""

import io
from pathlib import Path
from urllib.parse import unquote

from ...utils.errors import ConfigError, DataError, OutputError
from ...utils.files import read_json, write_json
from ...utils.log import get_logger
from ...utils.machine.spark import escape_glob, following_tasks, spark_session
from ..metadata import Tables
from ..place import AddressPath, Hadoop, split_address
from .plan import BLOCKED, FILE, KEY, KEY_DIGITS, NUM_KEYS, PART, ROW, SPARK, Plan, part_path

_TABLES, _ROWS, _KEPT = "ppldm_tables", "ppldm_rows", "ppldm_kept"
_CODE, _PLACE, _URL = "ppldm_code", "ppldm_place", "ppldm_url"
_STAGING, _COUNTS = ".spark", ".counts.json"

dialect = SPARK


def filter_tables(
    plan: Plan, folder: Path | AddressPath, memory_gb: float, master: str | None = None
) -> dict[int, int]:
    """As `duckdb_engine.filter_tables`."""
    if "${" in str(folder):
        raise OutputError(f"Hadoop takes ${{...}} in {folder} for a variable; name another folder by --output")
    with spark_session(master, memory_gb) as spark:
        if isinstance(folder, Path):
            folder = AddressPath(f"file://{folder.absolute()}", Hadoop.of(spark))
        counts_path = folder / _COUNTS
        counts = read_json(counts_path)
        if missing := _find_missing(folder, plan.num_parts):
            counts = _write_missing(spark, plan, str(folder / _STAGING), missing)
        if counts is None or sum(counts.values()) != plan.tables.rows:
            # Another run has written, or Spark had to do some tasks twice.
            _mark_blocked(spark, _read_files(spark, plan.tables), plan).createOrReplaceTempView(_TABLES)
            with following_tasks(spark, "counting", 1):
                counts = {row.code: row.n for row in spark.sql(plan.count_query(_TABLES, SPARK)).collect()}
        write_json(counts_path, counts)
        _collect_parts(folder, plan.num_parts)
        counts_path.remove()
    return {int(code): rows for code, rows in counts.items()}


def run_query(tables: Tables, query, memory_gb: float, master: str | None = None) -> list[tuple]:
    """The rows of a query, `query` being a function of the name of a relation of the tables' own columns."""
    with spark_session(master, memory_gb) as spark:
        _read_files(spark, tables).createOrReplaceTempView(_TABLES)
        return [tuple(row) for row in spark.sql(query(_TABLES)).collect()]


def _write_missing(spark, plan: Plan, staging: str, missing: list[int]) -> dict[int, int]:
    """Write the parts of these numbers, each by a task of its own; return what `filter_tables` does."""
    from pyspark.sql import Observation
    from pyspark.sql.functions import expr

    frame = _read_files(spark, plan.tables)
    place = ("_metadata.file_path AS " + _PLACE, f"_metadata.row_index AS {ROW}")
    placed = _mark_blocked(spark, frame.selectExpr("*", *place), plan)
    coded = placed.selectExpr("*", f"{plan.failure_sql(SPARK)} AS {_CODE}")
    codes, counted = range(2 * len(plan.reasons) + 1), Observation("ppldm_counts")
    coded = coded.observe(counted, *(expr(f"count_if({_CODE} = {code})").alias(f"n{code}") for code in codes))
    kept = coded.where(f"{_CODE} = 0").drop(_CODE)
    numbers, values = {split_address(address): number for number, address in enumerate(plan.tables.addresses)}, []
    for encoded in frame.inputFiles():
        host, path = split_address(encoded)
        # Spark writes the same local file with one slash or three.
        spellings = [f"file:{path}", f"file://{path}"] if encoded.startswith("file:") else [encoded]
        values += [f"({SPARK.quote_text(one)}, {numbers[host, unquote(path)]})" for one in spellings]
    files = spark.sql(f"SELECT * FROM VALUES {', '.join(values)} AS t(ppldm_path, {FILE})")
    rows = kept.join(files.hint("broadcast"), expr(f"ppldm_path = {_PLACE}")).drop("ppldm_path", _PLACE)
    rows.createOrReplaceTempView(_ROWS)
    spark.sql(plan.kept_query(_ROWS, SPARK, are_kept=True)).createOrReplaceTempView(_KEPT)
    order, part = ", ".join(plan.order), FILE
    if plan.seed is not None:  # the same cuts as `plan.first_key` makes
        number = f"CAST(conv(substr({KEY}, 1, {KEY_DIGITS}), 16, 10) AS BIGINT)"
        part = f"CAST({number} * {plan.num_parts} DIV {NUM_KEYS} AS INT)"
    rows = spark.sql(f"SELECT {plan.output_columns(SPARK)}, {order}, {part} AS {PART} FROM {_KEPT}")
    if len(missing) < plan.num_parts:
        get_logger().info("%d of %d parts were finished already", plan.num_parts - len(missing), plan.num_parts)
        rows = rows.where(f"{PART} IN ({', '.join(map(str, missing))})")
    # By the part first, although each task has one: Spark would sort again by it, and lose the order.
    rows = rows.repartitionById(plan.num_parts, PART).sortWithinPartitions(PART, *plan.order)
    writer = rows.drop(*plan.order).write
    writer = writer.mode("append").option("mapreduce.fileoutputcommitter.algorithm.version", "2")
    with following_tasks(spark, "filtering", plan.num_parts):
        writer.partitionBy(PART).parquet(staging)
    return {code: counted.get[f"n{code}"] for code in codes if counted.get[f"n{code}"]}


def _mark_blocked(spark, frame, plan: Plan):
    """The rows with BLOCKED, where there is a list. It goes to every node, so that rows stay where they are."""
    if not plan.blocked.urls:
        return frame
    import pyarrow as pa
    from pyspark.sql.functions import col

    listed = spark.createDataFrame(pa.table({_URL: sorted(plan.blocked.urls)})).hint("broadcast")
    url = col(SPARK.quote_name(plan.tables.columns.need("URL")))
    return frame.join(listed, url == col(_URL), "left").withColumn(BLOCKED, col(_URL).isNotNull()).drop(_URL)


def check_names(tables: Tables) -> None:
    """Raises ConfigError for names or kinds of columns that Spark's reader, or Hadoop's settings, would mistake."""
    if variables := [name for name in tables.columns.kinds if "${" in name]:
        raise ConfigError(f"Spark takes ${{...}} in column {variables[0]!r} for a variable; use --engine duckdb")
    if tables.mixed:
        raise ConfigError(
            f"column {tables.mixed!r} is wider in some files than in others, which only --engine duckdb reads together"
        )
    if tables.spellings:
        name, others = min(tables.spellings.items())
        raise ConfigError(
            f"column {name!r} is named {min(others)!r} in some files, which only --engine duckdb reads together; filter"
            " them one by one"
        )


def _read_files(spark, tables: Tables):
    check_names(tables)
    return spark.read.parquet(*map(escape_glob, tables.addresses))


def _written(folder: AddressPath, part: int) -> list[AddressPath]:
    """The files that Spark wrote of a part."""
    return list((folder / _STAGING / f"{PART}={part}").glob("[!.]*.parquet"))


def _find_missing(folder: AddressPath, num_parts: int) -> list[int]:
    """The parts that are to be written; what an interrupted run left of them is removed. Where one came to its end,
    parts of which there is nothing have no rows."""
    staging = folder / _STAGING
    (staging / "_temporary").remove()
    all_written, missing = (staging / "_SUCCESS").exists(), []
    for part in range(num_parts):
        if part_path(folder, part).exists():
            continue
        files = len(_written(folder, part))
        if files > 1 or not (files or all_written):
            (staging / f"{PART}={part}").remove()
            missing.append(part)
    if missing:
        (staging / "_SUCCESS").remove()
    return missing


def _collect_parts(folder: AddressPath, num_parts: int) -> None:
    """Give the file of each part its name; one without rows, of which Spark writes nothing, becomes an empty table."""
    import pyarrow.parquet as pq

    staging = folder / _STAGING
    left = [part for part in range(num_parts) if not part_path(folder, part).exists()]
    if left and not (staging / "_SUCCESS").exists():
        raise DataError(
            f"Spark wrote nothing that is seen in {staging}; --output must be a folder that all nodes share"
        )
    written = {}
    for part in left:
        files = _written(folder, part)
        if len(files) > 1:
            raise DataError(f"Spark wrote part {part + 1} in {len(files)} files; run the same command again")
        if files:
            written[part] = files[0]
    if written and len(written) < len(left):  # before the first is renamed, so that there is one to be like
        buffer = io.BytesIO()
        with next(iter(written.values())).open() as file:
            pq.write_table(pq.read_schema(file).empty_table(), buffer)
        for part in set(left) - set(written):
            part_path(folder, part).write_bytes(buffer.getvalue())
    for part, path in written.items():
        path.rename(part_path(folder, part))
    staging.remove()

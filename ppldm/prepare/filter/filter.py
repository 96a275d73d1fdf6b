"""`ppldm filter`: LAION's metadata tables become the tables of the rows that are wanted.

Laws. Rows in = rows out + rows dropped, by condition. The result is a function of the tables, the conditions and the
seed: DuckDB and Spark write the same rows into the same parts in the same order. The output folder is finished or
absent; finished parts of an interrupted run wait in `.OUT.unfinished`, and the same command goes on. Tables whose
content has changed are filtered again (`ppldm.utils.finished`).

    OUT/part_1.parquet, part_2.parquet, ...   all columns, known ones under their published names
    OUT/manifest.json                         what was asked for, rows in, out and dropped by condition
"""

import re
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from ...data.select.expression import All, Compare, Expression, Field, Literal, Member, parse_where
from ...utils.errors import ConfigError, DataError, OutputError
from ...utils.files import claimed_dir, read_json, write_json
from ...utils.log import get_logger
from ...utils.machine.resources import usable_memory_bytes
from ...utils.machine.spark import check_java, is_submitted, spark_session_if
from ...utils.text import find_changes, hide, hide_all, print_report
from .. import place
from ..block_list import NOTHING, BlockList, BlockLists, read_block_list
from ..metadata import Tables, read_footer, read_tables
from ..place import AddressPath, Hadoop, fingerprint_of, is_address, path_of
from . import duckdb_engine as filter_duckdb
from . import spark_engine as filter_spark
from .plan import Plan, number_sql, part_path

DEDUP_COLUMNS = ("url", "hash")
MIN_MEMORY_GB = 0.5

# The conditions of the published recipes. LAION2B-en is English by itself, and has no column that says so.
PRESETS: dict[str, dict[str, float | str]] = {
    "laion2b-en": {"min_width": 512, "min_height": 512, "max_punsafe": 0.98, "min_aesthetic": 4.5},
    "laion-art": {"language": "en", "min_width": 512, "min_height": 512},
}
_SIGNS = {"min": ">=", "max": "<="}  # bounds are inclusive
# In December 2023 LAION-5B and all made from it were taken back, as thousands of their links led to illegal pictures;
# Re-LAION-5B (August 2024) is the successor without those. Old metadata are known by their path or their columns.
_NAMES = re.compile(r"laion[-_ ]?(art|400m|5b|2b|1b|high|aesthetic)|improved_aesthetics|2B-en-4\.5_", re.IGNORECASE)
_SUCCESSOR = re.compile(r"re[-_]?laion", re.IGNORECASE)
_COLUMNS = {"URL", "TEXT", "WIDTH", "HEIGHT", "similarity", "hash", "punsafe", "pwatermark"}
REMEDY = (
    "LAION withdrew it in December 2023, as it has links to illegal pictures: take its successor Re-LAION-5B "
    "(`ppldm dataset show relaion-5b-research-safe`), or remove the rows that are not in it"
)
_Tables = Annotated[str, {"opt": True, "required": True, "nargs": "+"}]
# Of `--check`: name, column, SQL over `{x}`, a number or NULL.
_STATISTICS = (
    ("min aesthetic", "aesthetic", "min({x})"),
    ("max punsafe", "punsafe", "max({x})"),
    ("share punsafe > 0.5", "punsafe", "avg(CASE WHEN {x} > 0.5 THEN 1e0 ELSE 0e0 END)"),
    ("min similarity", "similarity", "min({x})"),
    ("share similarity < 0.28", "similarity", "avg(CASE WHEN {x} < CAST('0.28' AS DOUBLE) THEN 1e0 ELSE 0e0 END)"),
    ("max pwatermark", "pwatermark", "max({x})"),
    ("share pwatermark > 0.8", "pwatermark", "avg(CASE WHEN {x} > CAST('0.8' AS DOUBLE) THEN 1e0 ELSE 0e0 END)"),
)


def filter(
    input: _Tables,  # parquet, csv, tsv, jsonl or json files, or folders of them; for Spark, addresses of parquet too
    output: str = None,  # new folder for part_1.parquet, ...; for Spark, an address such as hdfs://name/folder too
    preset: str = None,  # conditions of a published recipe: laion2b-en or laion-art. Flags below replace its bounds
    where: str = None,  # a further condition, such as 'pwatermark <= 0.8 and not (TEXT in ("", "untitled"))'; or @FILE
    min_width: int = None,  # pixels, inclusive, as all bounds
    min_height: int = None,  # pixels
    max_width: int = None,  # pixels
    max_height: int = None,  # pixels
    max_punsafe: float = None,  # probability of unsafe content, 0 to 1
    max_pwatermark: float = None,  # probability of a watermark, 0 to 1
    min_aesthetic: float = None,  # aesthetic score, about 1 to 10
    min_similarity: float = None,  # cosine of CLIP's embeddings of picture and text
    language: str = None,  # code of the LANGUAGE column, such as en, or several: en,nolang
    block_list: BlockLists = None,  # files of URLs, one a line, whose rows go
    dedup: str = None,  # keep one row of each url or hash, the first of the input
    seed: int = 0,  # of the shuffle
    no_shuffle: bool = False,  # keep the order of the input, one part for each file
    num_partitions: int = 0,  # parts to write; 0 means as many as there are input files
    engine: str = "auto",  # duckdb (one machine) or spark; auto takes spark with --master or under spark-submit
    master: str = None,  # address of a Spark cluster, such as spark://host:7077 or yarn
    memory_gb: float = 0.0,  # memory of the engine on this machine; 0 means half of what there is
    redo: bool = False,  # replace the result of another filter that --output holds
    check: bool = False,  # only print statistics of the input
    dry_run: bool = False,  # say what would be done and write nothing
    json: bool = False,  # print the manifest as JSON instead of a table
):
    """Filter LAION metadata: parquet to parquet, by conditions, shuffled by a seed.

    Rows whose value is missing (null or NaN) do not meet a condition on it. Each dropped row is
    counted under the first condition that it does not meet.
    """
    flags = dict(locals())
    engine = choose_engine(engine, master, [*input, output])
    memory_gb = check_memory(memory_gb)
    with spark_session_if(engine == "spark" and any(map(is_address, [*input, output])), master, memory_gb) as spark:
        if check:
            tables = read_tables(input, Hadoop.of(spark) if spark else None)
            print_report(check_tables(tables, engine, memory_gb, master), describe_check, json)
            return
        plan = plan_filter(**flags, spark=spark)
        if engine == "spark":
            filter_spark.check_names(plan.tables)
        if dry_run:
            if engine == "spark" and not is_submitted():
                check_java()
            manifest = describe_plan(plan) | {"engine": engine}
            if output:
                find_result(plan, path_of(output, spark), redo)
        elif not output:
            raise ConfigError("--output is missing; name a new folder for the filtered tables")
        else:
            if warning := find_withdrawn(plan.tables.sources, plan.tables.columns.kinds):
                get_logger().warning("%s", warning)
            manifest = filter_tables(plan, path_of(output, spark), engine, memory_gb, master, redo)
    print_report(manifest, describe, json)


def plan_filter(
    input, preset=None, where=None, dedup=None, seed=0, no_shuffle=False, num_partitions=0, spark=None, **flags
) -> Plan:
    """The plan of the arguments of `filter`; only footers are read. Raises ConfigError, DataError."""
    # Files are known by their hashes once they are there.
    blocked = BlockList(read_block_list(flags.get("block_list")).urls)
    own = {name: value for name, value in flags.items() if name.startswith(("min_", "max_", "language"))}
    bounds = merge_bounds(preset, own)
    tables = read_tables(input, Hadoop.of(spark) if spark else None)
    return make_plan(tables, bounds, where, dedup, None if no_shuffle else seed, num_partitions, blocked)


def choose_engine(engine: str, master: str | None, names: Iterable[str | None] = ()) -> str:
    """The engine that is meant by --engine, --master and the places named. Raises ConfigError."""
    if engine not in ("auto", "duckdb", "spark"):
        raise ConfigError(f"--engine {engine} is not known; choose duckdb, spark or auto")
    if engine == "duckdb" and master:
        raise ConfigError("--master is only for Spark; omit it, or use --engine spark")
    if engine == "auto":
        return "spark" if master or any(map(place.is_remote, names)) or is_submitted() else "duckdb"
    return engine


def check_memory(memory_gb: float) -> float:
    """The memory of the engine in GB, 0 meaning half of the machine's. Raises ConfigError."""
    if memory_gb == 0:
        return max(MIN_MEMORY_GB, (usable_memory_bytes() or 4e9) / 2e9)
    if memory_gb < MIN_MEMORY_GB:
        raise ConfigError(f"--memory-gb is {memory_gb}; it must be at least {MIN_MEMORY_GB}, or 0 for half of all")
    return memory_gb


def merge_bounds(preset: str | None, bounds: dict) -> dict:
    """The bounds of a preset, and over them those of `bounds` that are not None. Raises ConfigError."""
    if preset is not None and preset not in PRESETS:
        raise ConfigError(f"--preset {preset} is not known; choose one of {', '.join(PRESETS)}")
    own = PRESETS[preset] if preset else {}
    return {**own, **{name: value for name, value in bounds.items() if value is not None}}


def make_conditions(bounds: dict, where: str | None) -> tuple[Expression, ...]:
    """The conditions of bounds (`min_FIELD` and `max_FIELD` numbers, `language` a code or several with commas between)
    and of `--where`, whose outermost `and` divides it into several. Raises ConfigError."""
    conditions: list[Expression] = []
    for name, value in bounds.items():
        side, _, column = name.partition("_")
        if column:
            number = Literal(int(value) if float(value).is_integer() else value)
            conditions.append(Compare(Field(column), _SIGNS[side], number))
        else:
            first, *others = (Literal(code.strip()) for code in value.split(","))
            field = Field(name)
            conditions.append(Member(field, (first, *others)) if others else Compare(field, "==", first))
    if where:
        expression = parse_where(where)
        conditions += expression.terms if isinstance(expression, All) else [expression]
    return tuple(dict.fromkeys(conditions))


def make_plan(
    tables: Tables,
    bounds: dict,
    where: str | None,
    dedup: str | None,
    seed: int | None,
    num_parts: int,
    blocked: BlockList = NOTHING,
) -> Plan:
    """The plan of flags. Without a LANGUAGE column tables are of the language asked for. Raises ConfigError."""
    columns = tables.columns
    if dedup not in (None, *DEDUP_COLUMNS):
        raise ConfigError(f"--dedup {dedup} is not known; choose {' or '.join(DEDUP_COLUMNS)}")
    if num_parts < 0 or (seed is None and num_parts not in (0, len(tables.files))):
        raise ConfigError(
            f"--num-partitions is {num_parts}; it must be at least 1, and with --no-shuffle each file makes one part"
        )
    if "language" in bounds and columns.find("language") is None:
        get_logger().warning("no LANGUAGE column: all rows are taken to be of language %r", bounds["language"])
        bounds = {name: bound for name, bound in bounds.items() if name != "language"}
    for name in ("URL", "TEXT") if seed is not None else ():  # by which rows are shuffled
        columns.need(name)
    if blocked.urls:
        columns.need("URL")
    dedup, num_parts = columns.need(dedup) if dedup else None, num_parts or len(tables.files)
    plan = Plan(tables, make_conditions(bounds, where), dedup, seed, num_parts, blocked)
    plan.count_query("rows", filter_duckdb.dialect)  # which finds conditions that cannot be asked of these columns
    return plan


def describe_plan(plan: Plan) -> dict:
    """What a plan says, and on which files: equal for equal plans on unchanged files."""
    found, missing = plan.tables.columns.report()
    return {
        "rows_in": plan.tables.rows,
        "conditions": plan.reasons,
        "seed": plan.seed,
        "num_partitions": plan.num_parts,
        "columns_found": found,
        "columns_missing": missing,
        "input": hide_all(list(plan.tables.names)),
        "inputs": [{"path": hide(str(one.source)), "rows": one.rows, "bytes": one.bytes} for one in plan.tables.files],
    }


def find_withdrawn(paths: Iterable, columns: Iterable[str]) -> str | None:
    """Why tables seem to be of a withdrawn release, and what to do; None where nothing says so."""
    names = [str(path) for path in paths]
    if any(map(_SUCCESSOR.search, names)):
        return None
    named = next((name for name in names if _NAMES.search(name)), None)
    if named is None and not set(columns) >= _COLUMNS:
        return None
    return f"{named or names[0]} looks like metadata of LAION-5B: {REMEDY}"


def find_result(plan: Plan, output: Path | AddressPath, redo: bool = False) -> dict | None:
    """The manifest in a folder, or None. Raises OutputError for other files, and another result unless `redo`."""
    found = read_json(output / "manifest.json")
    if not isinstance(found, dict) or "num_partitions" not in found:
        if not place.is_vacant(output):
            raise OutputError(f"--output {output} holds files of unknown origin; name a new folder, or delete that one")
        return None
    if (changes := _find_changes(found, describe_plan(plan))) and not redo:
        raise OutputError(
            f"--output {output} holds another filter's result ({'; '.join(changes)}); name a new folder, or make it "
            "again with --redo"
        )
    return found


def filter_tables(
    plan: Plan, output: Path | AddressPath, engine: str, memory_gb: float, master: str | None = None, redo=False
) -> dict:
    """Carry out a plan and return the manifest; the one that is there where the same plan was finished before. Raises
    OutputError as `find_result`, DataError, EnvironmentProblem."""
    start, found = time.monotonic(), find_result(plan, output, redo)
    wanted, earlier = describe_plan(plan), (found or {}).get("fingerprint")
    fingerprint = fingerprint_of(plan.tables.sources, earlier)
    content = {"content": fingerprint["content"]}
    if found:
        changes = _find_changes(found, wanted)
        same = not changes and earlier and earlier["content"] == fingerprint["content"]
        if same and _list_parts(output, plan.num_parts) == found["parts"]:
            get_logger().info("%s was finished before", output)
            return found
        why = "; ".join(changes) or ("parts are missing" if same else "the tables have other content than then")
        get_logger().info("%s is made again: %s", output, why)
    claimed = place.claimed_at if isinstance(output, AddressPath) else claimed_dir
    with claimed(output, wanted | content | {"engine": engine}, bool(found)) as folder:
        run = partial(filter_spark.filter_tables, master=master) if engine == "spark" else filter_duckdb.filter_tables
        counts = run(plan, folder, memory_gb)
        manifest = wanted | _count_rows(plan, counts, _list_parts(folder, plan.num_parts))
        seconds = round(time.monotonic() - start, 2)
        manifest |= {"fingerprint": fingerprint, "engine": engine, "seconds": seconds}
        manifest["rows_in_per_sec"] = round(plan.tables.rows / seconds)
        write_json(folder / "manifest.json", manifest)
    return manifest


def describe(manifest: dict) -> str:
    columns = manifest["columns_found"].items()
    found = ", ".join(f"{name}{'' if name == column else f' ({column})'}" for name, column in columns)
    lines = [f"columns found: {found}", f"columns missing: {', '.join(manifest['columns_missing']) or 'none'}"]
    if "rows_out" not in manifest:
        conditions = " and ".join(manifest["conditions"]) or "none"
        lines.append(f"{manifest['rows_in']:,} rows in {len(manifest['inputs'])} file(s); conditions: {conditions}")
        return "\n".join([*lines, f"{manifest['num_partitions']} part(s) by {manifest['engine']}; nothing was written"])
    rows = [("rows in", manifest["rows_in"], "")]
    for entry in manifest["dropped"]:
        missing = f"{entry['missing']:,} of them without a value" if entry["missing"] else ""
        rows.append((f"  dropped by {entry['condition']}", entry["rows"], missing))
    rows.append(("rows out", manifest["rows_out"], f"in {len(manifest['parts'])} part(s)"))
    width = max(len(name) for name, *_ in rows)
    lines += [f"{name:<{width}} {count:>15,}  {note}".rstrip() for name, count, note in rows]
    speed = f"{manifest['seconds']} s, {manifest['rows_in_per_sec']:,} rows/s by {manifest['engine']}"
    return "\n".join([*lines, speed])


def check_tables(tables: Tables, engine: str, memory_gb: float, master: str | None = None) -> dict:
    """Rows, and the statistics of the columns that are there; null where a column is not."""
    run = filter_spark if engine == "spark" else filter_duckdb
    report, terms = {"rows": None}, {"rows": "count(*)"}
    for name, field, formula in _STATISTICS:
        report[name] = None
        if column := tables.columns.find(field):
            terms[name] = formula.format(x=number_sql(column, tables.columns, run.dialect))
    options = {"master": master} if engine == "spark" else {}
    select = ", ".join(terms.values())
    (values,) = run.run_query(tables, lambda rows: f"SELECT {select} FROM {rows}", memory_gb, **options)
    return report | dict(zip(terms, values, strict=True))


def describe_check(report: dict) -> str:
    told = {name: "no such column" if value is None else f"{value:.6g}" for name, value in report.items()}
    told["rows"] = f"{report['rows']:,}"
    width = max(map(len, told))
    return "\n".join(f"{name:<{width}}  {text}" for name, text in told.items())


def _find_changes(found: dict, wanted: dict) -> list[str]:
    """Which settings of a manifest differ from a plan's. Older ones name files for what was asked for."""
    sides = []
    for manifest in (found, wanted):
        files = [entry["path"] for entry in manifest["inputs"]]
        side = {"input": manifest["input"] if "input" in found else files}
        side |= {name: manifest[name] for name in ("conditions", "seed", "num_partitions")}
        sides.append(side | ({"num_partitions": 0} if side["num_partitions"] == len(files) else {}))
    return find_changes(*sides)


def _count_rows(plan: Plan, counts: dict[int, int], parts: list[dict]) -> dict:
    """Rows out, dropped by condition, and parts. Raises DataError where a row is not accounted for."""
    rows_out = sum(part["rows"] for part in parts)
    dropped: list[dict[str, Any]] = []
    for i, reason in enumerate(plan.reasons):
        missing = counts.get(2 * i + 2, 0)
        dropped.append({"condition": reason, "rows": counts.get(2 * i + 1, 0) + missing, "missing": missing})
    if plan.dedup:
        dropped[-1]["rows"] += counts.get(0, 0) - rows_out
    num_dropped = sum(entry["rows"] for entry in dropped)
    if sum(counts.values()) != plan.tables.rows or plan.tables.rows != rows_out + num_dropped:
        raise DataError(
            f"{plan.tables.rows} rows went in, {rows_out} came out and {num_dropped} were dropped: the tables changed "
            "meanwhile; run the same command again"
        )
    if not plan.tables.rows:
        raise DataError("the tables of --input hold no rows; name others")
    if not rows_out:
        worst = max(dropped, key=lambda entry: entry["rows"], default={"condition": "nothing", "rows": 0})
        raise DataError(
            f"no row is left; {worst['rows']:,} were dropped by `{worst['condition']}`; see to the conditions"
        )
    return {"rows_out": rows_out, "dropped": dropped, "parts": parts}


def _list_parts(folder: Path | AddressPath, num_parts: int) -> list[dict]:
    """Path, rows and bytes of the parts that are there."""
    paths = (part_path(folder, part) for part in range(num_parts))
    parts = [read_footer(path) for path in paths if path.exists()]
    return [{"path": part.path.name, "rows": part.rows, "bytes": part.bytes} for part in parts]

"""`ppldm lineage`: from the key of a row back to its URL, its source and its row of LAION's metadata; and on to the
updates of runs that read it."""

from collections.abc import Iterator
from json import dumps
from pathlib import Path
from typing import Annotated

from ...utils.errors import ConfigError, DataError
from ...utils.files import local_path
from ...utils.processes.workers import check_workers
from ...utils.text import print_report
from ..filter import duckdb_engine as filter_duckdb
from ..filter.filter import check_memory
from ..filter.plan import DUCKDB, FILE, ROW
from ..metadata import read_tables
from .forgotten import Forgotten, find_rows, place_of, read_manifest

_Keys = Annotated[str, {"opt": True, "nargs": "+"}]


def lineage(
    data: Annotated[str, {"opt": False, "nargs": "?"}] = None,  # folder that `ppldm convert` has written
    key: _Keys = None,  # keys of rows, as in their metadata; part_1/KEY is that of one folder
    row: int = None,  # in place of folder and key: the number of a row in --runs, as `ppldm replay` prints it
    metadata: Annotated[str, {"opt": True, "nargs": "+"}] = None,  # parquet files, or folders of them, to look in
    runs: Annotated[str, {"opt": True, "nargs": "+"}] = None,  # of trainings, or above: which updates read the rows
    num_workers: int = 0,  # processes; 0 means one per core
    json: bool = False,  # print JSON
):
    """Say where rows come from: part, source, URL, and their rows of the metadata tables; and which updates read them.

    `key` is in the metadata column of each row; `ppldm head --json` and `ppldm show` print it. What runs have read is
    computed from their folders and data.
    """
    if row is not None:
        if data or key or metadata or not runs:
            raise ConfigError("--row is a row's number in runs; name these by --runs, and neither a folder nor --key")
        print_report([past.see([row]) for past in _open_pasts(runs)], _describe_number, json)
        return
    if not (data and key):
        raise ConfigError("name a folder of `ppldm convert` and rows in it by --key, or --runs and a --row of theirs")
    folder = local_path(data).resolve()
    found = trace_rows(folder, key, metadata, check_workers(num_workers))
    for past in _open_pasts(runs or []):
        for one in found:
            seen = past.see(past.rows_of(folder / one["part"], [one["row"]]))
            one["runs"] = [*one.get("runs", ()), seen]
    print_report(found, describe, json)


def trace_rows(data: Path, keys: list[str], metadata: list[str] | None = None, num_workers: int = 1) -> list[dict]:
    """{key, part, row, source, meta, captions (where `ppldm recaption` had them from), tables: [{file, row, values} of
    metadata with its URL]} of each row of these keys. Raises DataError where a key is nowhere."""
    manifest = read_manifest(data)
    sources = {part["path"]: part.get("source") for part in manifest["parts"]}
    traced, missing = [], set(keys)
    for path, found in find_rows(data, manifest, Forgotten(keys=frozenset(keys)), num_workers).items():
        for row, (entries, meta) in found.items():
            missing.difference_update(entries)
            place = {"key": meta["key"], "part": path, "row": row, "source": place_of(meta, sources[path])}
            captions = {name: told for name, told in manifest.get("captions", {}).items() if name in meta}
            traced.append(place | {"meta": meta, "captions": captions, "tables": []})
    if missing := sorted(missing):
        raise DataError(f"no row of {data} has the key {', '.join(missing[:5])}; `ppldm head --json` prints keys")
    traced.sort(key=lambda row: (row["part"], row["row"]))
    if metadata:
        _look_up(traced, metadata)
    return traced


def _open_pasts(runs: list[str]) -> Iterator:
    from ...runs.past import opened_past, runs_with_checkpoints

    for run in runs_with_checkpoints(runs):
        with opened_past(run) as past:
            yield past


def _describe_number(reports: list[dict]) -> str:
    from ...runs.past import describe_past

    return "\n".join(line for report in reports for line in describe_past(report))


def describe(found: list[dict]) -> str:
    lines = []
    for row in found:
        lines.append(f"{row['key']}: {row['part']} row {row['row']}, from {row['source']}")
        lines += [f"  {name}: {value}" for name, value in row["meta"].items()]
        for name, told in row["captions"].items():
            is_file = "command" not in told
            origin = f"{told['file']}, SHA-256 {told['sha256']}" if is_file else f"the command {told['command']}"
            lines.append(f"  {name} comes from {origin}, {told['time']}")
        for table in row["tables"]:
            values = dumps(table["values"], ensure_ascii=False, default=str)
            lines.append(f"  {table['file']} row {table['row']}: {values}")
        lines += [f"  {line}" for line in _describe_number(row.get("runs", [])).splitlines()]
    return "\n".join(lines)


def _look_up(traced: list[dict], metadata: list[str]) -> None:
    urls = sorted({row["meta"]["url"] for row in traced if isinstance(row["meta"].get("url"), str)})
    if not urls:
        raise ConfigError("these rows have no `url` in their metadata, by which --metadata could be searched")
    tables = read_tables(metadata)
    url_column = tables.columns.need("URL")
    columns = ", ".join(map(DUCKDB.quote_name, tables.columns.kinds))
    condition = f"{DUCKDB.quote_name(url_column)} IN ({', '.join(map(DUCKDB.quote_text, urls))})"

    def query(rows: str) -> str:
        return f"SELECT {FILE}, {ROW}, {columns} FROM {rows} WHERE {condition} ORDER BY 1, 2"

    for file, number, *values in filter_duckdb.run_query(tables, query, check_memory(0)):
        named = dict(zip(tables.columns.kinds, values, strict=True))
        entry = {"file": str(tables.paths[file]), "row": number, "values": named}
        for row in traced:
            if row["meta"].get("url") == named[url_column]:
                row["tables"].append(entry)

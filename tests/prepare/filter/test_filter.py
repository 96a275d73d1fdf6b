"""Laws: rows in = rows out + dropped; both engines write the same rows into the same parts in the same order; the
output is finished or absent."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from forking import kill_group_when

from ppldm.prepare.block_list import NOTHING, BlockList
from ppldm.prepare.filter import spark_engine as filter_spark
from ppldm.prepare.filter.duckdb_engine import run_query
from ppldm.prepare.filter.filter import (
    check_tables,
    choose_engine,
    describe,
    filter,
    filter_tables,
    make_plan,
    merge_bounds,
)
from ppldm.prepare.filter.plan import Plan
from ppldm.prepare.metadata import read_tables
from ppldm.utils.errors import ConfigError, DataError, EnvironmentProblem, OutputError, StoreError
from ppldm.utils.machine import spark

MEMORY_GB = 1.0
ROOT = str(Path(__file__).resolve().parents[3])


def laion2b(num_rows, seed=0, first=0) -> pa.Table:
    """Rows of LAION2B-en's columns with nulls, NaN, values on the bounds, and doubles of URL and hash."""
    rng = np.random.default_rng(seed)
    pick = lambda *values: [values[i] for i in rng.integers(0, len(values), num_rows)]  # noqa: E731
    ids = (first + rng.integers(0, max(1, num_rows * 3 // 4), num_rows)).tolist()
    nan = float("nan")
    return pa.table(
        {
            "URL": pa.array([None if i % 97 == 0 else f"http://x/{i}.jpg?a='ü'" for i in ids], pa.string()),
            "TEXT": pa.array([None if i % 89 == 0 else f'text {i % 50}, "心"' for i in ids], pa.string()),
            "WIDTH": pa.array(pick(511.0, 512.0, 513.0, 2000.0, 700.0, None, nan), pa.float64(), from_pandas=False),
            "HEIGHT": pa.array(pick(511.0, 512.0, 900.0, 1200.0), pa.float64()),
            "similarity": pa.array(rng.random(num_rows).astype("f4")),
            "punsafe": pa.array(pick(0.98, np.nextafter(0.98, 1), 0.0, 1e-5, 0.5, None), pa.float64()),
            "pwatermark": pa.array(rng.random(num_rows)),
            "AESTHETIC_SCORE": pa.array(pick(4.5, 4.499999, 6.0, 7.5, nan), pa.float64(), from_pandas=False),
            "hash": pa.array([i * 7919 - 2**62 for i in ids], pa.int64()),
        }
    )


@pytest.fixture
def tables(tmp_path):
    folder = tmp_path / "me ta+ü[1]"
    folder.mkdir()
    for number, rows in ((2, 400), (10, 1), (1, 300)):
        pq.write_table(laion2b(rows, number, number * 50), folder / f"2B-en-4.5_{number}.parquet", row_group_size=70)
    return folder


def plan_of(folder, where=None, dedup=None, seed=0, parts=0, preset="laion2b-en", blocked=NOTHING, **bounds):
    return make_plan(read_tables([str(folder)]), merge_bounds(preset, bounds), where, dedup, seed, parts, blocked)


def run(folder, out, engine="duckdb", **options):
    return filter_tables(plan_of(folder, **options), out, engine, MEMORY_GB)


def read_parts(out) -> list[pa.Table]:
    names = [part["path"] for part in json.loads((out / "manifest.json").read_text())["parts"]]
    assert names == [f"part_{i + 1}.parquet" for i in range(len(names))]
    return [pq.read_table(out / name) for name in names]


def wanted_rows(folder) -> list[dict]:
    """By plain Python, of the preset laion2b-en, in the order of the files."""
    rows = [row for number in (1, 2, 10) for row in pq.read_table(folder / f"2B-en-4.5_{number}.parquet").to_pylist()]
    meets = lambda value, test: value is not None and value == value and test(value)  # noqa: E731
    return [
        row
        for row in rows
        if meets(row["WIDTH"], lambda v: v >= 512)
        and meets(row["HEIGHT"], lambda v: v >= 512)
        and meets(row["punsafe"], lambda v: v <= 0.98)
        and meets(row["AESTHETIC_SCORE"], lambda v: v >= 4.5)
    ]


def as_text(rows) -> list[str]:
    return [repr(sorted(row.items())) for row in rows]


def test_bounds_are_inclusive_and_rows_without_a_value_are_dropped_and_counted(tables, tmp_path):
    manifest = run(tables, tmp_path / "out", seed=None)
    assert as_text(row for part in read_parts(tmp_path / "out") for row in part.to_pylist()) == as_text(
        wanted_rows(tables)
    )
    assert manifest["rows_in"] == 701 == manifest["rows_out"] + sum(entry["rows"] for entry in manifest["dropped"])
    assert [entry["condition"] for entry in manifest["dropped"]] == manifest["conditions"]
    width = pa.concat_tables(pq.read_table(path) for path in sorted(tables.iterdir()))["WIDTH"].to_pylist()
    missing = sum(value is None or value != value for value in width)
    small = sum(value == 511 for value in width)
    assert manifest["dropped"][0] == {"condition": "width >= 512", "rows": small + missing, "missing": missing}
    assert (
        manifest["columns_missing"] == ["LANGUAGE"]
        and manifest["columns_found"]["AESTHETIC_SCORE"] == "AESTHETIC_SCORE"
    )
    assert [part["rows"] for part in manifest["parts"]] == [part.num_rows for part in read_parts(tmp_path / "out")]


def test_the_shuffle_changes_the_order_alone_and_only_with_the_seed(tables, tmp_path):
    orders = []
    for name, seed, parts in (("a", 0, 1), ("b", 0, 1), ("c", 1, 1), ("d", 0, 5)):
        run(tables, tmp_path / name, seed=seed, parts=parts)
        orders.append(as_text(row for part in read_parts(tmp_path / name) for row in part.to_pylist()))
    assert orders[0] == orders[1] == orders[3] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2]) == sorted(as_text(wanted_rows(tables)))
    assert len(read_parts(tmp_path / "d")) == 5


def write_small(folder, *files):
    """Files of (url, text, hash) rows; `place` tells each row from all others."""
    folder.mkdir()
    place = iter(range(100))
    for number, rows in enumerate(files):
        urls, texts, hashes = zip(*rows, strict=True)
        table = pa.table(
            {
                "URL": pa.array(urls, pa.string()),
                "TEXT": pa.array(texts, pa.string()),
                "hash": pa.array(hashes, pa.int64()),
                "place": pa.array([next(place) for _ in rows], pa.int64()),
            }
        )
        pq.write_table(table, folder / f"part_{number}.parquet")
    return folder


def places(out) -> list[int]:
    return [row for part in read_parts(out) for row in part["place"].to_pylist()]


@pytest.mark.parametrize("column", ["url", "hash"])
def test_dedup_keeps_the_first_of_each(tmp_path, column):
    """Across files and within one; rows without a value are no copies of each other, and dropped as missing."""
    files = [
        [("a", "t", 1), (None, "t", None), ("b", "t", 2), ("a", "t", 1)],
        [("b", "t", 2), (None, "t", None), ("c", "t", 3), ("c", "u", 3)],
    ]
    folder = write_small(tmp_path / "tables", *files)
    manifest = run(folder, tmp_path / "out", dedup=column, seed=None, preset=None)
    assert places(tmp_path / "out") == [0, 2, 6]
    name = {"url": "URL", "hash": "hash"}[column]
    assert manifest["dropped"] == [{"condition": f"unique {name}", "rows": 5, "missing": 2}]
    assert manifest["rows_in"] == 8 == manifest["rows_out"] + 5


@pytest.mark.parametrize("seed", range(5))
def test_rows_of_one_shuffle_key_keep_the_order_of_the_files(tmp_path, seed):
    copies = [("a", "t", number) for number in range(6)] + [("b", "u", 9)]
    folder = write_small(tmp_path / "tables", copies, copies, [*reversed(copies)])
    run(folder, tmp_path / "out", seed=seed, preset=None, parts=1)
    found = places(tmp_path / "out")
    urls = [row for part in read_parts(tmp_path / "out") for row in part["URL"].to_pylist()]
    for url in "ab":
        own = [place for place, other in zip(found, urls, strict=True) if other == url]
        assert own == sorted(own) and len(own) == {"a": 18, "b": 3}[url]


@pytest.mark.parametrize(
    "where, kept",
    [
        ("hash <= 9223372036854775807", [0, 1, 2, 3]),
        ("hash < 9223372036854775807", [0, 1, 2]),
        ("hash < 9223372036854775808", [0, 1, 2]),  # as float64, which 2**63 - 1 is rounded to
        ("hash <= 9223372036854775808", [0, 1, 2, 3]),
        ("hash > 18446744073709551616", []),
        ("hash >= -9223372036854775808", [0, 1, 2, 3]),
        ("hash > -9223372036854775808", [1, 2, 3]),
        ("hash > -9223372036854775809", [1, 2, 3]),  # as float64, which is the least int64
        ("hash in (-9223372036854775808, 99999999999999999999)", [0]),
        ("hash != 9223372036854775806", [0, 1, 3]),
    ],
)
def test_literals_at_and_beyond_the_range_of_64_bits(tmp_path, where, kept):
    values = [-(2**63), 0, 2**63 - 2, 2**63 - 1]
    if where == "hash < 9223372036854775808":
        values[2] = 2**53
    folder = write_small(tmp_path / "tables", [("a", "t", value) for value in values])
    if not kept:
        with pytest.raises(DataError, match="no row is left"):
            run(folder, tmp_path / "out", where=where, seed=None, preset=None)
        return
    run(folder, tmp_path / "out", where=where, seed=None, preset=None)
    assert places(tmp_path / "out") == kept


def test_laion_art_by_other_names_is_written_under_the_published_ones(tmp_path):
    table = laion2b(200).rename_columns(
        ["url", "caption", "width", "height", "similarity", "punsafe", "pwatermark", "aesthetic", "hash"]
    )
    table = table.append_column("LANGUAGE", pa.array(["en", "de", None, "nolang"] * 50))
    pq.write_table(table, tmp_path / "laion-art.parquet")
    manifest = run(tmp_path / "laion-art.parquet", tmp_path / "out", preset="laion-art")
    (part,) = read_parts(tmp_path / "out")
    assert set(part["LANGUAGE"].to_pylist()) == {"en"}
    assert part.column_names[:4] == ["URL", "TEXT", "WIDTH", "HEIGHT"] and "aesthetic" in part.column_names
    assert manifest["columns_found"]["TEXT"] == "caption"
    assert manifest["dropped"][0] == {"condition": 'language == "en"', "rows": 150, "missing": 50}
    assert 'dropped by language == "en"' in describe(manifest)


@pytest.mark.parametrize("wide_first", [False, True])
@pytest.mark.parametrize(
    "narrow, wide",
    [("int32", "int64"), ("int8", "int32"), ("uint8", "uint32"), ("float32", "float64"), ("string", "large_string")],
)
def test_a_column_may_be_wider_in_some_files(tmp_path, narrow, wide, wide_first):
    """No value is cut or refused for the type of the first file."""
    number = "string" not in narrow
    small, large = ([1, 2], [3, 100_000 if wide != "uint8" else 200]) if number else (["a", "b"], ["c", "d" * 300])
    for place, (kind, values) in enumerate([(wide, large), (narrow, small)][:: 1 if wide_first else -1]):
        columns = {"URL": pa.array([f"http://h/{place}{row}" for row in range(2)]), "n": pa.array(values, kind)}
        pq.write_table(pa.table(columns), tmp_path / f"{place}.parquet")
    tables = read_tables([str(tmp_path)])
    assert tables.mixed == "n"
    rows = run_query(tables, lambda name: f"SELECT n FROM {name} ORDER BY n", 1.0)
    assert [row[0] for row in rows] == sorted(small + large)
    with pytest.raises(ConfigError, match="'n' is wider in some files .* --engine duckdb"):
        filter_spark.check_names(tables)


@pytest.mark.parametrize("other", ["string", "float64", "bool", "timestamp[s]", "uint32"])
def test_a_column_of_another_kind_is_refused(tmp_path, other):
    pq.write_table(pa.table({"n": pa.array([1], "int32")}), tmp_path / "0.parquet")
    pq.write_table(
        pa.table({"n": pa.array([None], pa.timestamp("s") if "time" in other else other)}), tmp_path / "1.parquet"
    )
    with pytest.raises(ConfigError, match="column 'n' is int32 in .* filter them one by one"):
        read_tables([str(tmp_path)])


def test_a_column_may_have_another_name_in_each_file(tables, tmp_path):
    """The same rows as from files of one naming."""
    run(tables, tmp_path / "one", dedup="hash")
    path = tables / "2B-en-4.5_2.parquet"
    table = pq.read_table(path)
    others = {"AESTHETIC_SCORE": "aesthetic", "URL": "image_url", "WIDTH": "Width", "punsafe": "p_unsafe"}
    table = table.rename_columns([others.get(name, name) for name in table.column_names])
    pq.write_table(table.select(table.column_names[::-1]), path, row_group_size=70)
    assert read_tables([str(tables)]).spellings == {
        "AESTHETIC_SCORE": {"aesthetic"}, "URL": {"image_url"}, "punsafe": {"p_unsafe"}
    }  # fmt: skip
    run(tables, tmp_path / "other", dedup="hash")
    assert read_parts(tmp_path / "other") == read_parts(tmp_path / "one")
    with pytest.raises(ConfigError, match="'AESTHETIC_SCORE' is named 'aesthetic' in some files"):
        filter_spark.check_names(read_tables([str(tables)]))
    with pytest.raises(ConfigError, match="'punsafe' is double in .* and missing in"):
        pq.write_table(table.drop_columns(["p_unsafe"]), path)
        read_tables([str(tables)])
    with pytest.raises(ConfigError, match="'AESTHETIC_SCORE' .* filter them one by one"):
        pq.write_table(table.append_column("aesthetic_score", table["aesthetic"]), path)
        read_tables([str(tables)])


@pytest.mark.slow
def test_ctrl_c_is_one_line_and_leaves_what_is_finished(tmp_path):
    """In the middle of a query of DuckDB."""
    tables = tmp_path / "tables"
    tables.mkdir()
    for number in range(4):
        pq.write_table(laion2b(250_000, number), tables / f"{number}.parquet")
    code = (
        "import ppldm.cli.main, ppldm.prepare.filter.duckdb_engine as f\n"
        "import os, signal, threading\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # it may be inherited as ignored
        "run = f._execute\n"
        "def execute(connection, query, name, rows):\n"
        "    if name == 'sorting':\n"
        "        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "    return run(connection, query, name, rows)\n"
        "f._execute = execute\n"
        "ppldm.cli.main.main()"
    )
    command = [sys.executable, "-c", code, "filter", "--input", str(tables), "--output", str(tmp_path / "out")]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": ROOT}, capture_output=True, text=True)
    assert done.returncode == 130 and done.stderr.splitlines()[-1].startswith("stopped by Ctrl-C")
    assert (tmp_path / ".out.unfinished/.counts.json").exists() and not (tmp_path / "out").exists()


def test_an_unknown_language_column_is_said_and_taken_to_be_right(tables, tmp_path, caplog):
    plan = plan_of(tables, language="en")
    assert plan.reasons == ["width >= 512", "height >= 512", "punsafe <= 0.98", "aesthetic >= 4.5"]
    assert "all rows are taken to be of language 'en'" in caplog.text


def test_a_finished_output_is_kept_and_anything_else_refused(tables, tmp_path):
    out = tmp_path / "out"
    first = run(tables, out)
    inode = (out / "part_1.parquet").stat().st_ino
    assert run(tables, out) == first and (out / "part_1.parquet").stat().st_ino == inode
    with pytest.raises(OutputError, match="another filter's result"):
        run(tables, out, seed=1)
    (out / "manifest.json").unlink()
    with pytest.raises(OutputError, match="unknown origin"):
        run(tables, out)
    with pytest.raises(OutputError, match="unknown origin"):
        run(tables, out / "part_1.parquet")


def test_a_killed_run_leaves_nothing_and_the_same_command_finishes(tables, tmp_path):
    out = tmp_path / "out"
    code = (
        "import os, ppldm.cli.main, ppldm.prepare.filter.filter as f\n"
        "f.write_json = lambda *arguments: os.kill(os.getpid(), 9)\n"
        "ppldm.cli.main.main()"
    )
    command = [
        "filter",
        "--input",
        str(tables),
        "--output",
        str(out),
        "--preset",
        "laion2b-en",
        "--num-partitions",
        "2",
    ]
    done = subprocess.run([sys.executable, "-c", code, *command], env={**os.environ, "PYTHONPATH": ROOT})
    assert done.returncode == -9 and not out.exists() and (tmp_path / ".out.unfinished/part_1.parquet").exists()
    filter(input=[str(tables)], output=str(out), preset="laion2b-en", num_partitions=2)
    assert sorted(path.name for path in out.iterdir()) == ["manifest.json", "part_1.parquet", "part_2.parquet"]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def part_files(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("part_*.parquet")}


@pytest.mark.parametrize("options", [{"parts": 5}, {"parts": 4, "dedup": "url", "seed": 3}, {"seed": None}], ids=str)
def test_interrupted_at_any_point_the_same_command_comes_to_the_same_bytes(tables, tmp_path, options):
    whole = run(tables, tmp_path / "whole", **options)
    replace, stop, manifest = os.replace, 0, None
    while not manifest:
        calls = iter(range(100))

        def dying(*arguments, calls=calls, stop=stop):
            if next(calls) >= stop:
                raise KeyboardInterrupt
            replace(*arguments)

        # By an error where the kill would be: what runs after it removes the file at hand alone.
        out = tmp_path / str(stop)
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(os, "replace", dying)
            manifest = run(tables, out, **options)
        unfinished = tmp_path / f".{stop}.unfinished"
        # Between the removal of its plan and the last rename, all is made anew.
        finished = part_files(unfinished) if (unfinished / ".plan.json").exists() else {}
        times = {name: (unfinished / name).stat().st_mtime_ns for name in finished}
        again = run(tables, out, **options)
        assert {name: (out / name).stat().st_mtime_ns for name in finished} == times
        assert part_files(out) == part_files(tmp_path / "whole")
        assert {name: again[name] for name in ("rows_in", "rows_out", "dropped", "parts")} == {
            name: whole[name] for name in ("rows_in", "rows_out", "dropped", "parts")
        }
        assert sorted(path.name for path in out.iterdir()) == sorted(["manifest.json", *part_files(out)])
        stop += 1
    assert stop > whole["num_partitions"] + 3


def replace_content(path):
    """Other rows in a file of the same size and number of rows, by other captions of the same length."""
    table = pq.read_table(path)
    captions = pa.array([text and text.replace("text", "lost") for text in table["TEXT"].to_pylist()])
    size = path.stat().st_size
    pq.write_table(table.set_column(1, "TEXT", captions), path, row_group_size=70)
    assert path.stat().st_size == size


@pytest.mark.parametrize("changed", ["nothing", "time", "plan", "input"])
def test_an_unfinished_output_of_another_plan_or_input_is_made_anew(tables, tmp_path, changed):
    def interrupt(*_):
        raise KeyboardInterrupt

    def times(folder):
        return {(path.name, path.stat().st_mtime_ns) for path in folder.glob("part_*.parquet")}

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("ppldm.prepare.filter.filter.write_json", interrupt)
        run(tables, tmp_path / "out", parts=2, seed=1 if changed == "plan" else 0)
    before = times(tmp_path / ".out.unfinished")
    if changed == "time":
        os.utime(tables / "2B-en-4.5_1.parquet")
    if changed == "input":
        replace_content(tables / "2B-en-4.5_1.parquet")
    run(tables, tmp_path / "out", parts=2)
    assert len(before) == 2 and len(before & times(tmp_path / "out")) == (2 if changed in ("nothing", "time") else 0)


def test_what_cannot_work_is_one_line(tables, tmp_path):
    with pytest.raises(DataError, match="no row is left.*width >= 9999"):
        run(tables, tmp_path / "out", min_width=9999)
    assert not (tmp_path / "out").exists()
    for options, words in (
        ({"dedup": "text"}, "url or hash"),
        ({"parts": -1}, "at least 1"),
        ({"seed": None, "parts": 2}, "each file makes one part"),
        ({"where": "nosuch > 1"}, "no column is 'nosuch'"),
        ({"where": "URL > 1"}, "URL is text"),
    ):
        with pytest.raises(ConfigError, match=words):
            plan_of(tables, **options)
    (tables / "3.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match="3.parquet is not a parquet"):
        read_tables([str(tables)])
    damaged = bytearray((tables / "2B-en-4.5_2.parquet").read_bytes())
    damaged[10:400] = b"\xff" * 390
    (tables / "3.parquet").write_bytes(damaged)
    with pytest.raises(DataError, match="/3.parquet cannot be read .*get it again"):
        run(tables, tmp_path / "out")
    pq.write_table(laion2b(0), tmp_path / "empty.parquet")
    with pytest.raises(DataError, match="hold no rows"):
        run(tmp_path / "empty.parquet", tmp_path / "out")
    pq.write_table(laion2b(3).drop_columns(["hash"]), tables / "3.parquet")
    with pytest.raises(ConfigError, match="'hash'.*missing"):
        read_tables([str(tables)])
    with pytest.raises(ConfigError, match="is not there"):
        read_tables([str(tmp_path / "nowhere")])
    with pytest.raises(StoreError, match="hdfs://name/folder needs Hadoop's libraries.*or mount it"):
        read_tables(["hdfs://name/folder"])
    with pytest.raises(ConfigError, match="s3a://name/folder is an address.*mount it"):
        filter(input=[(tables / "2B-en-4.5_1.parquet").as_uri()], output="s3a://name/folder", engine="duckdb")
    with pytest.raises(ConfigError, match="twice"):
        read_tables([str(tables / "2B-en-4.5_1.parquet")] * 2)
    with pytest.raises(ConfigError, match="--output is missing"):
        filter(input=[str(tables / "2B-en-4.5_1.parquet")])
    with pytest.raises(ConfigError, match="only for Spark"):
        choose_engine("duckdb", "yarn")


def test_the_command_prints_a_table_a_plan_and_statistics(tables, tmp_path, capsys):
    arguments = {"input": [str(tables)], "output": str(tmp_path / "out"), "preset": "laion2b-en", "where": "@no"}
    with pytest.raises(ConfigError, match="cannot read"):
        filter(**arguments)
    arguments["where"] = "pwatermark <= 0.8 and not (TEXT in ('', 'untitled'))"
    filter(**arguments, dry_run=True)
    assert "701 rows in 3 file(s)" in capsys.readouterr().out and not (tmp_path / "out").exists()
    filter(**arguments)
    out = capsys.readouterr().out
    assert "dropped by pwatermark <= 0.8" in out and "rows out" in out and "by duckdb" in out
    filter(input=[str(tmp_path / "out")], check=True)
    out = capsys.readouterr().out
    assert "max punsafe              0.98" in out and "share pwatermark > 0.8   0\n" in out


def test_the_statistics_are_those_of_the_columns(tables):
    report = check_tables(read_tables([str(tables)]), "duckdb", MEMORY_GB)
    table = pa.concat_tables(pq.read_table(path) for path in tables.iterdir()).to_pandas()
    assert report["rows"] == 701 and report["min aesthetic"] == 4.499999
    assert report["max punsafe"] == np.nextafter(0.98, 1)
    assert report["share punsafe > 0.5"] == pytest.approx((table.punsafe > 0.5).mean())
    assert report["share similarity < 0.28"] == pytest.approx((table.similarity.astype("f8") < 0.28).mean())


def test_without_java_the_error_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(EnvironmentProblem) as raised:
        spark.check_java()
    for words in ("apt-get install openjdk-17", "dnf install", "brew install", "conda install"):
        assert words in str(raised.value)


def test_a_dry_run_looks_for_java_unless_spark_has_begun(tables, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    flags = {"input": [str(tables)], "preset": "laion2b-en", "engine": "spark", "dry_run": True}
    with pytest.raises(EnvironmentProblem, match="openjdk-17"):
        filter(**flags)
    monkeypatch.setattr("ppldm.prepare.filter.filter.is_submitted", lambda: True)
    filter(**flags)
    assert "701 rows in 3 file(s)" in capsys.readouterr().out


@pytest.mark.turn("Spark does what one process does", 2)
@pytest.mark.slow
@pytest.mark.needs("java")
def test_spark_submit_runs_the_same_command(tables, tmp_path):
    import pyspark

    words = ["filter", "--input", tables, "--output", tmp_path / "submitted", "--preset", "laion2b-en"]
    done = subprocess.run(
        [
            Path(pyspark.__file__).parent / "bin/spark-submit",
            "--master",
            "local[2]",
            f"{ROOT}/run_scripts/spark_ppldm.py",
            *words,
        ],
        env={**os.environ, "PYTHONPATH": ROOT, "PYSPARK_PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "by spark" in done.stdout, done.stderr
    run(tables, tmp_path / "here")
    submitted, here = (read_parts(tmp_path / name) for name in ("submitted", "here"))
    assert [as_text(part.to_pylist()) for part in submitted] == [as_text(part.to_pylist()) for part in here]


@pytest.mark.turn("Spark does what one process does", 2)
@pytest.mark.slow
@pytest.mark.needs("java")
def test_what_ctrl_c_breaks_in_spark_is_no_error_of_spark(session):
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), spark.spark_session(None, MEMORY_GB) as same:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        same.sql("SELECT no_such_column")
    assert signal.getsignal(signal.SIGINT) is handler
    with pytest.raises(DataError, match="Spark failed"), spark.spark_session(None, MEMORY_GB) as same:
        same.sql("SELECT no_such_column")


@pytest.mark.turn("Spark does what one process does", 2)
@pytest.mark.slow
@pytest.mark.needs("java")
def test_addresses_are_read_and_written_by_hadoops_file_systems(tables, tmp_path, session, capsys):
    flags = {"preset": "laion2b-en", "num_partitions": 40, "where": "punsafe < 0.5", "engine": "spark", "json": True}
    flags |= {"input": [tables.as_uri()], "output": (tmp_path / "out").as_uri()}
    filter(**flags, dry_run=True)
    assert not (tmp_path / "out").exists()
    capsys.readouterr()
    filter(**flags)
    manifest = json.loads(capsys.readouterr().out)
    here = run(tables, tmp_path / "here", parts=40, where="punsafe < 0.5")
    for name in ("rows_in", "rows_out", "dropped", "conditions", "columns_found", "columns_missing", "seed"):
        assert manifest[name] == here[name]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(
        path.name for path in (tmp_path / "here").iterdir()
    )
    for ours, other in zip(read_parts(tmp_path / "here"), read_parts(tmp_path / "out"), strict=True):
        assert ours.schema.remove_metadata() == other.schema.remove_metadata()
        assert as_text(ours.to_pylist()) == as_text(other.to_pylist())
    inodes = {path.name: path.stat().st_ino for path in (tmp_path / "out").iterdir()}
    filter(**flags)
    assert {path.name: path.stat().st_ino for path in (tmp_path / "out").iterdir()} == inodes
    with pytest.raises(OutputError, match="num_partitions was 40 and is 7.*--redo"):
        filter(**flags | {"num_partitions": 7})
    filter(**flags | {"num_partitions": 7, "redo": True})
    assert len(read_parts(tmp_path / "out")) == 7
    replace_content(tables / "2B-en-4.5_1.parquet")
    filter(**flags | {"num_partitions": 7})
    texts = [row["TEXT"] for part in read_parts(tmp_path / "out") for row in part.to_pylist()]
    assert any(text and text.startswith("lost") for text in texts)
    (tmp_path / "out/manifest.json").unlink()
    with pytest.raises(OutputError, match="unknown origin"):
        filter(**flags)
    with pytest.raises(ConfigError, match="not there"):
        filter(**flags | {"input": [(tmp_path / "none").as_uri()]})
    for address in ("s3a://bucket/folder", "nosuch://host/folder"):  # whose classes are not on this machine
        with pytest.raises(DataError, match="Spark failed: .*(S3AFileSystem|nosuch)") as error:
            filter(**flags | {"input": [address]})
        assert "\n" not in str(error.value)
    capsys.readouterr()
    filter(input=[tables.as_uri()], engine="spark", check=True)
    assert "max punsafe" in capsys.readouterr().out


@pytest.mark.turn("Spark does what one process does", 2)
@pytest.mark.slow
@pytest.mark.needs("java")
def test_spark_counts_and_writes_in_one_pass_and_goes_on_where_it_stopped(tables, tmp_path, session, monkeypatch):
    options = {"parts": 5, "seed": 2}
    whole, out = run(tables, tmp_path / "whole", "spark", **options), tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(filter_spark, "_collect_parts", lambda *_: signal.raise_signal(signal.SIGINT))
        run(tables, out, "spark", **options)
    staging = tmp_path / ".out.unfinished/.spark"
    places = {part: staging / f"ppldm_part={part}" for part in range(5)}
    # As a kill leaves it: one part not there, another one twice, and what a task had not committed.
    inodes = {part: next(places[part].glob("*.parquet")).stat().st_ino for part in (0, 1, 4)}
    shutil.rmtree(places[2])
    shutil.copy(next(places[3].glob("*.parquet")), places[3] / "part-twice.parquet")
    (staging / "_temporary/0").mkdir(parents=True)
    (staging / "_SUCCESS").unlink()
    plan = plan_of(tables, **options)
    monkeypatch.setattr(Plan, "count_query", lambda *_: pytest.fail("a second pass"))
    again = filter_tables(plan, out, "spark", MEMORY_GB)
    assert {part: (out / f"part_{part + 1}.parquet").stat().st_ino for part in inodes} == inodes
    assert {name: again[name] for name in ("rows_out", "dropped")} == {
        name: whole[name] for name in ("rows_out", "dropped")
    }
    for ours, other in zip(read_parts(tmp_path / "whole"), read_parts(out), strict=True):
        assert as_text(ours.to_pylist()) == as_text(other.to_pylist())
    assert {path.name.split("_")[0] for path in out.iterdir()} == {"part", "manifest.json"}


@pytest.mark.turn("a killed command goes on", 1)
@pytest.mark.slow
@pytest.mark.needs("java")
@pytest.mark.parametrize("where", ["within writes", "between renames"])
def test_spark_killed_goes_on_where_it_stopped(tables, tmp_path, session, where):
    words = ["filter", "--input", tables, "--output", tmp_path / "out", "--preset", "laion2b-en", "--engine", "spark"]
    words += ["--master", "local[2]", "--num-partitions", 40, "--seed", 2]
    command = [sys.executable, "-m", "ppldm", *map(str, words)]
    unfinished = tmp_path / ".out.unfinished"

    def inodes():
        found = [*unfinished.glob(".spark/ppldm_part=*/part-*.parquet"), *unfinished.glob("part_*.parquet")]
        return {path.stat().st_ino for path in found}

    def reached():
        return len(inodes()) >= 8 if where == "within writes" else len([*unfinished.glob("part_*.parquet")]) >= 5

    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert kill_group_when(process, reached)
    kept = inodes()
    assert not (tmp_path / "out").exists() and len(kept) >= 8
    filter(
        input=[str(tables)],
        output=str(tmp_path / "out"),
        preset="laion2b-en",
        engine="spark",
        num_partitions=40,
        seed=2,
    )
    # What was there was not written again.
    assert kept <= {path.stat().st_ino for path in (tmp_path / "out").glob("part_*.parquet")}
    whole = run(tables, tmp_path / "whole", parts=40, seed=2)
    done = json.loads((tmp_path / "out/manifest.json").read_text())
    assert {name: done[name] for name in ("rows_in", "rows_out", "dropped")} == {
        name: whole[name] for name in ("rows_in", "rows_out", "dropped")
    }
    for ours, other in zip(read_parts(tmp_path / "whole"), read_parts(tmp_path / "out"), strict=True):
        assert as_text(ours.to_pylist()) == as_text(other.to_pylist())
    assert {path.name.split("_")[0] for path in (tmp_path / "out").iterdir()} == {"part", "manifest.json"}


@pytest.mark.turn("Spark does what one process does", 2)
@pytest.mark.slow
@pytest.mark.needs("java")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"parts": 1},
        {"parts": 7, "seed": 3, "dedup": "url"},
        {"seed": None, "dedup": "hash"},
        {
            "preset": None,
            "where": "not (punsafe > 0.5) and TEXT != 'text 3, \"心\"' or width != 512 and hash in (-1, 2)",
        },
        {"preset": None, "dedup": "url", "blocked": BlockList(frozenset(f"http://x/{i}.jpg?a='ü'" for i in range(90)))},
        {"preset": None, "parts": 40, "where": "URL == \"http://x/77.jpg?a='ü'\""},
    ],
    ids=lambda options: ",".join(options) or "preset",
)
def test_both_engines_write_the_same(tables, tmp_path, session, options):
    manifests = [run(tables, tmp_path / engine, engine, **options) for engine in ("duckdb", "spark")]
    same = manifests[0].keys() - {"engine", "seconds", "rows_in_per_sec", "parts"}
    assert {name: manifests[0][name] for name in same} == {name: manifests[1][name] for name in same}
    parts = [read_parts(tmp_path / engine) for engine in ("duckdb", "spark")]
    assert len(parts[0]) == len(parts[1]) == manifests[0]["num_partitions"]
    for ours, other in zip(*parts, strict=True):
        assert ours.schema.remove_metadata() == other.schema.remove_metadata()
        assert as_text(ours.to_pylist()) == as_text(other.to_pylist())
    assert check_tables(read_tables([str(tables)]), "spark", MEMORY_GB) == pytest.approx(
        check_tables(read_tables([str(tables)]), "duckdb", MEMORY_GB)
    )

"""Laws: a table of text has the rows, in their order, that its parquet file has; it is read once for each content."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ppldm.prepare.metadata import read_tables
from ppldm.prepare.tables import FORMATS, as_parquet, find_tables
from ppldm.utils.errors import ConfigError, DataError

ROWS = [
    {"URL": "http://a.test/1.jpg?x=1,2", "TEXT": 'a "red", heart\nand 猫', "WIDTH": 640, "score": 4.751741409301758},
    {"URL": "http://a.test/2.jpg", "TEXT": "007", "WIDTH": 512, "score": 5.5},
    {"URL": "http://a.test/3.jpg", "TEXT": " NA\t", "WIDTH": None, "score": None},
]
PLAIN = [row | {"TEXT": row["TEXT"].replace("\n", " ").replace("\t", "").replace('"', "'")} for row in ROWS]


def quoted(value, quotes: bool) -> str:
    text = "" if value is None else str(value)
    return '"' + text.replace('"', '""') + '"' if quotes and any(mark in text for mark in ',"\n') else text


def text_of(rows: list[dict], kind: str) -> str:
    if kind == "json":
        return json.dumps(rows)
    if kind == "jsonl":
        said = [{name: value for name, value in row.items() if value is not None} for row in rows]
        return "".join(json.dumps(row) + "\n" for row in said)
    if kind == "txt":
        return "".join(row["URL"] + "\n" for row in rows)
    mark = "," if kind == "csv" else "\t"
    lines = [[*rows[0]], *([quoted(value, kind == "csv") for value in row.values()] for row in rows)]
    return "".join(mark.join(line) + "\n" for line in lines)


def write(path, text: str):
    path.write_bytes(gzip.compress(text.encode()) if path.name.endswith(".gz") else text.encode())
    return path


def rows_of(path) -> list[dict]:
    return pq.read_table(as_parquet(path)).to_pylist()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PPLDM_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize("kind", FORMATS[1:])
def test_every_format_has_the_same_rows(tmp_path, kind):
    name = kind.removesuffix(".gz")
    rows = PLAIN if name == "tsv" else ROWS
    expected = [{"URL": row["URL"], "TEXT": None} for row in rows] if name == "txt" else rows
    path = write(tmp_path / f"part_1.{kind}", text_of(rows, name))
    assert rows_of(path) == expected
    if name == "txt":  # which has nothing to filter by
        with pytest.raises(DataError, match="is not a parquet file"):
            read_tables([str(path)])
        return
    table = read_tables([str(path)])
    assert table.rows == len(rows) and table.sources == [path] and table.columns.find("URL") == "URL"


def test_parquet_stays_where_it_is(tmp_path):
    assert as_parquet(tmp_path / "a.parquet") == tmp_path / "a.parquet" and as_parquet(tmp_path / "b") == tmp_path / "b"


def test_a_content_is_read_once_and_another_anew(tmp_path):
    path = write(tmp_path / "a.csv", text_of(ROWS, "csv"))
    first = as_parquet(path)
    time = first.stat().st_mtime_ns
    assert as_parquet(path) == first and first.stat().st_mtime_ns == time
    write(path, text_of(ROWS[:2], "csv"))
    assert as_parquet(path) != first and rows_of(path) == ROWS[:2] and pq.read_table(first).to_pylist() == ROWS


@pytest.mark.parametrize(
    "texts, found",
    [
        (["1", "-20", ""], [1, -20, None]), (["1", "2.5"], [1.0, 2.5]), (["007", "8"], ["007", "8"]),
        (["18446744073709551615", "1"], [2**64 - 1, 1]), (["-1", str(2**64 - 1)], ["-1", str(2**64 - 1)]),
        (["NaN", "x"], ["NaN", "x"]), (["", ""], ["", ""]), (["2020-01-01"], ["2020-01-01"]), (["true"], ["true"]),
        (["12345678901234567", "0.5"], ["12345678901234567", "0.5"]), (["+1"], [1.0]), (["1e3"], [1000.0]),
    ],
)  # fmt: skip
def test_columns_of_csv_are_numbers_where_each_value_is_one_and_is_kept(tmp_path, texts, found):
    lines = "".join(f"u{number},{text}\n" for number, text in enumerate(texts))
    rows = rows_of(write(tmp_path / "a.csv", "URL,hash\n" + lines))
    assert [row["hash"] for row in rows] == found and [row["URL"] for row in rows] == ["u0", "u1", "u2"][: len(texts)]


@pytest.mark.parametrize("wrap", [list, lambda texts: dict(enumerate(texts))])
def test_json_may_be_columns(tmp_path, wrap):
    columns = {"URL": wrap(["a", "b"]), "TEXT": wrap(["c", "d"])}
    assert rows_of(write(tmp_path / "a.json", json.dumps(columns))) == [
        {"URL": "a", "TEXT": "c"},
        {"URL": "b", "TEXT": "d"},
    ]


@pytest.mark.parametrize(
    "name, content",
    [
        ("a.csv", b""), ("a.csv", b"URL,TEXT\na\n"), ("a.csv", b"URL,URL\na,b\n"), ("a.csv", b"URL,TEXT\na,\xff\n"),
        ("a.json", b"{"), ("a.json", b"[1]"), ("a.jsonl", b'{"URL": "a"}\n{"URL": 1}\n'), ("a.jsonl", b"{}x\n"),
        ("a.txt", b"\xff\n"), ("a.csv.gz", b"URL\na\n"), ("a.json", b'{"URL": ["a"], "TEXT": []}'),
        ("a.json", b'[{"URL": "\\ud800"}]'), ("a.jsonl", b'{"n": 99999999999999999999}\n'),
    ],
)  # fmt: skip
def test_what_is_no_such_table_is_one_line(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"{name} cannot be read as .*make it parquet"):
        as_parquet(tmp_path / name)
    assert not list((tmp_path / "cache").rglob("*.parquet"))


def test_a_folder_has_its_parquet_files_or_else_one_other_format(tmp_path):
    for name in ("part_10.csv", "part_2.csv", ".part_1.csv", "_part_1.csv", "part_1.jsonl", "part_1.txt"):
        write(tmp_path / name, "URL\na\n")
    (tmp_path / "part_3.csv").mkdir()
    assert [path.name for path in find_tables(tmp_path)] == ["part_2.csv", "part_10.csv"]
    assert [path.name for path in find_tables(tmp_path, ["jsonl"])] == ["part_1.jsonl"]
    assert [path.name for path in find_tables(tmp_path, ["txt"])] == ["part_1.txt"]
    pq.write_table(pa.table({"URL": ["a"]}), tmp_path / "x.parquet")
    assert [path.name for path in find_tables(tmp_path)] == ["x.parquet"]
    with pytest.raises(ConfigError, match=r"no \*.parquet files"):
        (tmp_path / "none").mkdir()
        read_tables([str(tmp_path / "none")])

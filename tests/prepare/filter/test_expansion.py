"""Laws: nothing of a condition, a path or a column's name is a pattern or a variable to an engine; what a text says is
what is compared, in `judge`, DuckDB and Spark alike."""

import getpass
import os

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ppldm.data.select.evaluate import judge
from ppldm.data.select.expression import Compare, Field, Literal, Member, parse_expression
from ppldm.inspect.duplicates.dedup import duckdb_engine
from ppldm.prepare.datasets.extract import find_captions, make_captions
from ppldm.prepare.filter import duckdb_engine as filter_duckdb
from ppldm.prepare.filter import spark_engine as filter_spark
from ppldm.prepare.filter.filter import filter_tables, make_plan
from ppldm.prepare.filter.plan import compile_condition
from ppldm.prepare.metadata import read_tables
from ppldm.utils.errors import ConfigError, DataError, OutputError

MEMORY_GB = 1.0
USER = getpass.getuser()
# What some engine, shell or library reads as something else.
HOSTILE = [
    "${system:user.name}", "${user.name}", USER, "${env:HOME}", "$HOME", os.environ.get("HOME", ""), "${oc.env:HOME}",
    "${spark.app.name}", "${a:-b}", "%(a)s", "{a,b}", "{0}", ":name", "?", "$1", "*", "a*", "[a]", "~", "\\", "\\\\",
    "\\n", "\n", "\\u0041", "A", "\\101", "\\%", "\\_", "%", "''", "'", '"', '""', "`", "--", "/* a */", ";", "a\0b",
    "a", "\0", "\x1a", "\\Z", "\ufeff", "é", "e\u0301", "心", "\U0001f600", "NULL", "NaN", " ", "", "\r\n",
    "#", "&amp;",
]  # fmt: skip
pieces = st.sampled_from([*HOSTILE, "${", "}", "$", ":", "x"])
texts = st.one_of(
    st.sampled_from(HOSTILE),
    st.lists(pieces, max_size=3).map("".join),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
)


def conditions_of(drawn):
    for text in drawn:
        yield Compare(Field("TEXT"), "==", Literal(text))
        yield Compare(Field("TEXT"), ">", Literal(text))
    yield Member(Field("TEXT"), tuple(map(Literal, drawn)))


def check_engine(engine, folder, drawn):
    """That an engine says of every text what `judge` says."""
    table = {"TEXT": [*dict.fromkeys([*drawn, *HOSTILE]), None]}
    pq.write_table(pa.table({"TEXT": pa.array(table["TEXT"], pa.string())}), folder / "t.parquet")
    tables = read_tables([str(folder)])
    conditions = [parse_expression(str(one)) for one in conditions_of(drawn)]
    sql = ", ".join(f"coalesce({compile_condition(one, tables.columns, engine.dialect)}, FALSE)" for one in conditions)
    found = engine.run_query(tables, lambda rows: f"SELECT TEXT, {sql} FROM {rows}", MEMORY_GB)
    says = {text: values for text, *values in found}
    for place, condition in enumerate(conditions):
        codes, _ = judge(condition, table, len(table["TEXT"]))
        assert [says[text][place] for text in table["TEXT"]] == (codes == 0).tolist(), str(condition)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=st.lists(texts, min_size=1, max_size=12, unique=True))
def test_a_text_is_itself_to_duckdb(tmp_path, drawn):
    check_engine(filter_duckdb, tmp_path, drawn)


@pytest.mark.turn("Spark does what one process does", 2)
@pytest.mark.slow
@pytest.mark.needs("java")
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=st.lists(texts, min_size=1, max_size=12, unique=True))
def test_a_text_is_itself_to_spark(tmp_path, session, drawn):
    check_engine(filter_spark, tmp_path, drawn)


@pytest.mark.slow
@pytest.mark.needs("java")
def test_every_hostile_text_is_itself_to_spark(tmp_path, session):
    check_engine(filter_spark, tmp_path, HOSTILE)


NAMES = [
    "{a,b}", "a*", "a?", "[ab]", "[", "]", "[!a]", "**", "${user.name}", "$HOME", "%41", "a%20b", "a#b", "a+b", "a b",
    "\\a", "it's", 'a"b', "`a`", "year=2020", "TEXT=other", "~", "a;b", "a,b", "é", "a&b", "a:b",
]  # fmt: skip


def write_tables(folder):
    """Two files, and beside them what a pattern would find as well."""
    folder.mkdir(parents=True)
    for number in (1, 2):
        table = {
            "URL": [f"http://x/{number}", f"http://y/{number}"],
            "TEXT": ["a", "b"],
            "place": [number, number + 10],
        }
        pq.write_table(pa.table(table), folder / f"{folder.name}{number}.parquet")
    for other in ("a", "b", "ab", "A", USER):
        if other != folder.name:
            (folder.parent / other).mkdir()
            pq.write_table(
                pa.table({"URL": ["no"], "TEXT": ["no"], "place": [99]}), folder.parent / other / "a1.parquet"
            )
    return folder


def check_path(name, tmp_path, engine):
    folder = write_tables(tmp_path / "in" / name)
    out = tmp_path / "out" / name
    out.parent.mkdir()
    plan = make_plan(read_tables([str(folder)]), {}, "TEXT in ('a', 'b')", None, None, 0)
    filter_tables(plan, out, engine, MEMORY_GB)
    found = [pq.read_table(path, partitioning=None).to_pydict() for path in sorted(out.glob("part_*.parquet"))]
    assert found == [pq.read_table(path, partitioning=None).to_pydict() for path in sorted(folder.iterdir())]
    assert os.listdir(out.parent) == [name]


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_is_itself_to_duckdb(tmp_path, name):
    check_path(name, tmp_path, "duckdb")


@pytest.mark.turn("Spark does what one process does", 2)
@pytest.mark.slow
@pytest.mark.needs("java")
@pytest.mark.parametrize("name", [name for name in NAMES if "${" not in name and ":" not in name])
def test_a_folder_is_itself_to_spark(tmp_path, session, name):
    check_path(name, tmp_path, "spark")


@pytest.mark.slow
@pytest.mark.needs("java")
def test_where_hadoop_cannot_be_kept_from_expanding_nothing_is_written(tmp_path, session):
    folder, out = write_tables(tmp_path / "in/${user.name}"), tmp_path / "${user.name}"
    plan = make_plan(read_tables([str(folder)]), {}, "place < 50", None, 0, 1)
    with pytest.raises(OutputError, match=r"for a variable; name another folder by --output"):
        filter_tables(plan, out, "spark", MEMORY_GB)
    assert filter_tables(plan, tmp_path / "out", "spark", MEMORY_GB)["rows_out"] == 4
    assert not (tmp_path / USER).exists() and not out.exists()


@pytest.mark.parametrize("where", ["TEXT == 'a\ud800'", "TEXT in ('\udcff', 'a')"])
def test_a_text_that_no_table_can_hold_is_named(tmp_path, where):
    with pytest.raises(ConfigError, match="is not UTF-8"):
        make_plan(read_tables([str(write_tables(tmp_path / "in"))]), {}, where, None, None, 0)


def test_only_a_damaged_table_is_called_damaged(tmp_path):
    tables = read_tables([str(write_tables(tmp_path / "in"))])
    with pytest.raises(DataError, match="^DuckDB cannot answer the conditions .*; see to --where"):
        filter_duckdb.run_query(tables, lambda rows: f"SELECT nothing FROM {rows}", MEMORY_GB)


def columns_table(name):
    return pa.table({"URL": ["u1", "u2", "u3"], "TEXT": ["a", "b", "c"], name: ["x", "y", None]})


def check_column(name, tmp_path, engine):
    (tmp_path / "in").mkdir()
    pq.write_table(columns_table(name), tmp_path / "in/a.parquet")
    plan = make_plan(
        read_tables([str(tmp_path / "in")]), {}, str(Compare(Field(name), "==", Literal("y"))), None, None, 0
    )
    filter_tables(plan, tmp_path / "out", engine, MEMORY_GB)
    found = pq.read_table(tmp_path / "out/part_1.parquet")
    assert found.to_pydict() == {"URL": ["u2"], "TEXT": ["b"], name: ["y"]}


COLUMNS = [name for name in HOSTILE if name and "`" not in name and "\0" not in name] + ["a.b", "year", "x.*"]


@pytest.mark.parametrize("name", COLUMNS, ids=repr)
def test_a_column_is_itself_to_duckdb(tmp_path, name):
    check_column(name, tmp_path, "duckdb")


@pytest.mark.turn("Spark does what one process does", 2)
@pytest.mark.slow
@pytest.mark.needs("java")
@pytest.mark.parametrize("name", COLUMNS, ids=repr)
def test_a_column_is_itself_to_spark_or_refused(tmp_path, session, name):
    if "${" in name:
        with pytest.raises(ConfigError, match="for a variable; use --engine duckdb"):
            check_column(name, tmp_path, "spark")
    else:
        check_column(name, tmp_path, "spark")


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_is_itself_to_the_queries_of_captions_and_pairs(tmp_path, name):
    folder = write_tables(tmp_path / name)
    (folder / "c.jsonl").write_text('{"key": "k", "caption": "one"}\n')
    query = "SELECT key, caption FROM read_json('{folder}/c.jsonl', format='newline_delimited')"
    assert make_captions([folder / "c.jsonl"], query, folder / "table") == {"captions": 1}
    assert os.listdir(tmp_path / name) and (folder / "table").is_file()
    with duckdb.connect() as connection:
        assert find_captions(connection, folder / "table", ["k"]) == {"k": {"key": "k", "caption": "one"}}
    with duckdb_engine(folder / f"{name}1.parquet", MEMORY_GB) as engine:
        assert engine("SELECT place FROM nodes ORDER BY 1")["place"].to_pylist() == [1, 11]

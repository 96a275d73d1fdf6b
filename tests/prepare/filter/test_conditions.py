"""Laws: the SQL of an expression says of every row what `judge` says of it; names for the same thing are one."""

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppldm.data.select.evaluate import judge
from ppldm.data.select.expression import All, Any, Compare, Field, Literal, Member, Not, field_names, parse_expression
from ppldm.prepare.filter.filter import PRESETS, make_conditions, merge_bounds
from ppldm.prepare.filter.plan import DUCKDB, SPARK, all_hold, compile_condition, first_failure
from ppldm.prepare.metadata import INTEGER, NUMBER, OTHER, TEXT, TRUTH, Columns
from ppldm.utils.errors import ConfigError

TABLE = {
    "i": [None, 0, 1, 512, -3, 2**53 + 1, 2**63 - 1],
    "x": [0.98, None, float("nan"), 1.0, 4.5, float("inf"), -1e300],
    "s": ["", "en", "it's", None, 'a "b"\\', "é", "en"],
    "t": [True, False, None, True, True, False, True],
}
KINDS = {"i": INTEGER, "x": NUMBER, "s": TEXT, "t": TRUTH}
NUM_ROWS = 7

numbers = st.sampled_from([Literal(v) for v in (0, 1, 512, -3, 0.98, 1.5, 4.5, 2**53 + 1, 2**63, 1e300)])
texts = st.sampled_from([Literal(v) for v in ("", "en", "it's", 'a "b"\\', "é", "z")])
signs = st.sampled_from(["<", "<=", ">", ">=", "==", "!="])
number_fields, text_field = st.sampled_from([Field("i"), Field("x")]), st.just(Field("s"))
comparisons = st.one_of(
    st.builds(Compare, number_fields, signs, st.one_of(numbers, number_fields)),
    st.builds(Compare, numbers, signs, number_fields),
    st.builds(Compare, text_field, signs, texts),
    st.builds(
        Compare, st.just(Field("t")), st.sampled_from(["==", "!="]), st.sampled_from([Literal(True), Literal(False)])
    ),
    st.builds(Member, number_fields, st.lists(numbers, min_size=1, max_size=3).map(tuple)),
    st.builds(Member, text_field, st.lists(texts, min_size=1, max_size=3).map(tuple)),
)
expressions = st.recursive(
    comparisons,
    lambda inner: st.one_of(
        inner.map(Not), *(st.lists(inner, min_size=2, max_size=3).map(tuple).map(kind) for kind in (All, Any))
    ),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def connection():
    columns = {name: pa.array(values) for name, values in TABLE.items()}
    connection = duckdb.connect()
    connection.register("rows", pa.table(columns))
    yield connection
    connection.close()


def loses_digits(expression) -> bool:
    """Whether it compares an integer column as float64, which Python does exactly."""
    return "i" in field_names(expression)


@settings(deadline=None, max_examples=300)
@given(expression=expressions)
def test_sql_says_what_judge_says(connection, expression):
    sql = compile_condition(expression, Columns(KINDS), DUCKDB)
    found = [row[0] for row in connection.execute(f"SELECT coalesce({sql}, FALSE) FROM rows").fetchall()]
    codes, _ = judge(expression, TABLE, NUM_ROWS)
    expected = (codes == 0).tolist()
    rows = range(5) if loses_digits(expression) else range(NUM_ROWS)
    assert [found[i] for i in rows] == [expected[i] for i in rows]


def test_integers_are_compared_exactly(connection):
    sql = compile_condition(parse_expression(f"i == {2**53 + 1}"), Columns(KINDS), DUCKDB)
    assert connection.execute(f"SELECT count(*) FROM rows WHERE {sql}").fetchall() == [(1,)]
    sql = compile_condition(parse_expression(f"i > {2**53}"), Columns(KINDS), DUCKDB)
    assert connection.execute(f"SELECT count(*) FROM rows WHERE {sql}").fetchall() == [(2,)]


def test_the_first_failure_counts_each_row_once(connection):
    terms = [compile_condition(parse_expression(text), Columns(KINDS), DUCKDB) for text in ("x <= 0.98", 's == "en"')]
    codes = [row[0] for row in connection.execute(f"SELECT {first_failure(terms)} FROM rows").fetchall()]
    assert codes == [3, 2, 2, 1, 1, 1, 0]
    assert first_failure([]) == "0" and all_hold([]) == "TRUE"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("i == 'en'", "i is integer"),
        ("s >= 3", "s is text"),
        ("t == 1", "t is truth"),
        ("i in (1, 'x')", "compare numbers with numbers"),
        ("b == 'x'", "b is other"),
        ("nosuch > 1", "no column is 'nosuch'"),
        ("aesthetic > 1", "AESTHETIC_SCORE"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_a_row_is_read(text, words):
    with pytest.raises(ConfigError, match=words):
        compile_condition(parse_expression(text), Columns({**KINDS, "b": OTHER}), DUCKDB)


def test_names_and_text_are_quoted():
    columns = Columns({'a"b`c': TEXT})
    expression = Compare(Field('a"b`c'), "==", Literal("it's \\"))
    assert compile_condition(expression, columns, DUCKDB) == """"a""b`c" = 'it''s \\'"""
    assert compile_condition(expression, columns, SPARK) == """`a"b``c` = 'it\\'s \\\\'"""


def test_presets_are_the_published_conditions_and_flags_replace_their_bounds():
    texts = lambda bounds, where=None: [str(condition) for condition in make_conditions(bounds, where)]  # noqa: E731
    assert texts(PRESETS["laion2b-en"]) == ["width >= 512", "height >= 512", "punsafe <= 0.98", "aesthetic >= 4.5"]
    assert texts(PRESETS["laion-art"]) == ['language == "en"', "width >= 512", "height >= 512"]
    changed = merge_bounds("laion-art", {"min_width": 256, "language": None, "max_punsafe": 0.5})
    assert texts(changed) == ['language == "en"', "width >= 256", "height >= 512", "punsafe <= 0.5"]
    assert texts({"language": "en,nolang"}) == ['language in ("en", "nolang")']
    assert texts({"min_width": 512}, "width >= 512 and (TEXT != '' or hash > 3)") == [
        "width >= 512",
        'TEXT != "" or hash > 3',
    ]
    with pytest.raises(ConfigError, match="laion2b-en"):
        merge_bounds("laion5b", {})


LAION2B = ["URL", "TEXT", "WIDTH", "HEIGHT", "similarity", "punsafe", "pwatermark", "AESTHETIC_SCORE", "hash"]
ART = ["URL", "TEXT", "WIDTH", "HEIGHT", "similarity", "LANGUAGE", "hash", "pwatermark", "punsafe", "aesthetic"]


@pytest.mark.parametrize(
    ("names", "name", "found"),
    [
        (LAION2B, "aesthetic", "AESTHETIC_SCORE"),
        (LAION2B, "url", "URL"),
        (LAION2B, "language", None),
        (ART, "aesthetic", "aesthetic"),
        (ART, "AESTHETIC_SCORE", "aesthetic"),
        (ART, "lang", "LANGUAGE"),
        (["url", "caption", "text"], "TEXT", "text"),
        (["url", "caption"], "TEXT", "caption"),
        (["Width"], "width", "Width"),
        (["license"], "License", "license"),
    ],
)
def test_a_column_is_found_by_any_name_for_the_same_thing(names, name, found):
    assert Columns(dict.fromkeys(names, TEXT)).find(name) == found


@pytest.mark.parametrize(
    ("names", "written"),
    [
        (LAION2B, LAION2B),
        (ART, ART),
        (["url", "caption", "width", "aesthetic_score"], ["URL", "TEXT", "WIDTH", "AESTHETIC_SCORE"]),
        (["image_url", "text", "caption", "other"], ["URL", "TEXT", "caption", "other"]),
        (["img_url", "url"], ["img_url", "URL"]),
    ],
)
def test_known_columns_are_written_under_their_published_names(names, written):
    new = Columns(dict.fromkeys(names, TEXT)).published_names()
    assert list(new.values()) == written and len({name.lower() for name in written}) == len(written)
    assert np.array_equal(list(new), names)

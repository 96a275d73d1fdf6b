import json
import math
import re

import numpy as np
import pytest
from expressions import make_expressions
from hypothesis import given, settings
from hypothesis import strategies as st

from ppldm.data.select.evaluate import FALSE, judge, read_number
from ppldm.data.select.expression import (
    All,
    Any,
    Compare,
    Literal,
    Member,
    Not,
    field_names,
    parse_expression,
    parse_where,
)
from ppldm.utils.errors import ConfigError

NAMES = ["width", "a", "b_2", "and", "two words", "é"]
numbers = st.integers(-3, 3) | st.floats(-3, 3).filter(lambda x: x == x) | st.sampled_from([10**30, 1e300, -0.0])
texts = st.text('a1."\\ \n', max_size=3) | st.sampled_from(["1", " 2.5 ", "-3", "1e0", "x"])
expressions = make_expressions(NAMES, numbers | texts, numbers | texts | st.booleans(), max_leaves=8)
values = st.none() | st.booleans() | numbers | texts | st.just(math.nan) | st.just([1]) | st.just({})
rows = st.lists(st.fixed_dictionaries({}, optional=dict.fromkeys(NAMES, values)), max_size=6)


def reference(expression, row):
    """True, False or None (unknown), by plain Python on one row."""
    if isinstance(expression, Not):
        inner = reference(expression.term, row)
        return None if inner is None else not inner
    if isinstance(expression, All):
        found = [reference(term, row) for term in expression.terms]
        return False if False in found else None if None in found else True
    if isinstance(expression, Any):
        found = [reference(term, row) for term in expression.terms]
        return True if True in found else None if None in found else False
    if isinstance(expression, Member):
        found = [reference(Compare(expression.item, "==", value), row) for value in expression.values]
        return None if None in found else True in found
    left, right = (
        side.value if isinstance(side, Literal) else row.get(side.name) for side in (expression.left, expression.right)
    )
    if any(side is None or (isinstance(side, float) and math.isnan(side)) for side in (left, right)):
        return None

    def is_number(value):
        return isinstance(value, int | float) and not isinstance(value, bool)

    if isinstance(left, str) and is_number(right) and read_number(left) is not None:
        left = read_number(left)
    elif isinstance(right, str) and is_number(left) and read_number(right) is not None:
        right = read_number(right)
    both = (is_number(left) and is_number(right)) or (isinstance(left, str) and isinstance(right, str))
    if expression.sign in ("==", "!="):
        equal = (both or (isinstance(left, bool) and isinstance(right, bool))) and left == right
        return equal == (expression.sign == "==")
    return eval(f"left {expression.sign} right") if both else None


def verdicts(expression, rows):
    columns = {name: [row.get(name) for row in rows] for name in NAMES}
    codes, reasons = judge(expression, columns, len(rows))
    return [True if code == 0 else False if reasons[code - 1] == FALSE else None for code in codes]


@settings(deadline=None, max_examples=400)
@given(expressions, rows)
def test_an_expression_holds_where_plain_python_says_so(expression, rows):
    assert verdicts(expression, rows) == [reference(expression, row) for row in rows]


@settings(deadline=None, max_examples=400)
@given(expressions)
def test_the_spelling_of_an_expression_is_read_as_that_expression(expression):
    parsed = parse_where(str(expression))
    assert parsed == expression and repr(parsed) == repr(expression)
    assert field_names(parsed) == {name for name in NAMES if f"Field(name={name!r})" in repr(expression)}


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 65535), st.integers(0, 700)), min_size=1), st.integers(-1, 70000), numbers)
def test_sizes_are_compared_as_a_whole_and_0_is_unknown(sizes, bound, number):
    widths, heights = (np.array(side, dtype=np.uint16) for side in zip(*sizes, strict=True))
    expression = parse_expression(f"width >= {bound} and (height < 500 or height > width) or height in (3, {number!r})")
    by_value = {"width": [int(w) or None for w in widths], "height": [int(h) or None for h in heights]}
    codes, reasons = judge(expression, {"width": widths, "height": heights}, len(sizes))
    codes_of_values, _ = judge(expression, by_value, len(sizes))
    assert codes.tolist() == codes_of_values.tolist()
    assert set(reasons) <= {FALSE, "where: no field width", "where: no field height"}


@pytest.mark.parametrize("sign", ["and", "or"])
@pytest.mark.parametrize("term", ["a != 7", "(a != 7)", "not (a == 7)"])
def test_terms_beside_each_other_are_not_nested(sign, term):
    expression = parse_expression(f" {sign} ".join([term] * 150))
    assert len(expression.terms) == 150
    assert verdicts(expression, [{"a": 6}, {"a": 7}, {}]) == [True, False, None]


ROW = {"width": 600, "height": 512, "aesthetic": 5.5, "pwatermark": "0.25", "license": "cc0", "nsfw": False, "n": None}


@pytest.mark.parametrize(
    "text, truth",
    [
        ("width>=512 and height>=512 and pwatermark<=0.5 and aesthetic>=5", True),
        ("width >= 512 and (height < 512 or aesthetic > 6)", False),
        ("width < 1 or height < 1 and aesthetic > 0", False),
        ("height > 1 or width < 1 and width < 1", True),
        ("not width < 1 and not not height > 1", True),
        ("5 < aesthetic <= 5.5 < width", True),
        ("5.5 < aesthetic", False),
        ("width > height", True),
        ("license == 'cc0' and license != \"cc1\"", True),
        ("license in ('by', 'cc0')", True),
        ("license not in ('by', 'cc0',)", False),
        ("width in [599, 600.0]", True),
        ("nsfw == false and nsfw != True", True),
        ("pwatermark in (0.25)", True),
        ('width in ("600", "x")', True),
        ('width in ("601", "x")', False),
        ('width in (" 6e2 ")', True),
        ("5 < aesthetic < 5.5", False),
        ("5 < aesthetic < 6 < width", True),
        ("5 < aesthetic < width < 600", False),
        ("5.5 < aesthetic < width", False),
        ("5 < aesthetic <= 5.4", False),
        ("`width` == 6e2", True),
        ("license == 5", False),
        ("license != 5", True),
        ("license > 5", "where: license is not a number"),
        ("width > 'a'", "where: width is not text"),
        ("nsfw > 0", "where: nsfw is not a number"),
        ("license > aesthetic", "where: license and aesthetic have no order"),
        ("n > 5", "where: no field n"),
        ("other > 5 and n > 5", "where: no field other"),
        ("width > 5 and other in (1)", "where: no field other"),
        ("not (other > 5)", "where: no field other"),
        ("other > 5 and width < 5", False),
        ("other > 5 or width > 5", True),
        ('pwatermark: "<=0.5"', True),
        ('pwatermark: "<=0.2"', False),
        ("pwatermark: <=0.5\nwidth: '>=512'", True),
        ("{pwatermark: '<=0.5', license: '== \"cc1\"'}", False),
        ('{"width": ">=512", "width": "<600"}', False),
        ("filters:\n  pwatermark: '<=0.5'\n  width: '>=512'", True),
        ("dataset_filters:\n- ['aesthetic', 'lambda s: s > 5.5']", False),
        ("license: in ('cc0', 'by')", True),
        ("['aesthetic', 'lambda s: s > 4.5']", True),
        ("[['aesthetic', 'lambda s: s > 4.5'], ['width', 'lambda s: s > 600']]", False),
        ("- [aesthetic, 'lambda x: 4 < x < 6 and not x == 5']\n- ['nsfw', 'lambda nsfw: nsfw == False']", True),
        ('[["aesthetic", "lambda s: s > 4.5"]]', True),
        ("['aesthetic_score', 'lambda s: s > 4.5']", "where: no field aesthetic_score"),
    ],
)
def test_what_is_documented(text, truth):
    codes, reasons = judge(parse_where(text), {name: [value] for name, value in ROW.items()}, 1)
    due = {True: None, False: FALSE}.get(truth, truth)
    assert (reasons[codes[0] - 1] if codes[0] else None) == due


@pytest.mark.parametrize(
    "text, message",
    [
        ("", r"a field, a number or text is due at character 1: -->"),
        ("width", r"is due at character 6: width -->"),
        ("width >= 512 and", r"is due at character 17: width >= 512 and -->"),
        ("width = 512", r"this is not understood at character 7: width --> = 512"),
        ("width >= 512px", r"not understood at character 10: width >= --> 512px"),
        ("(width > 1", r"closing parenthesis is due at character 11"),
        ("width > 1)", r"`and`, `or` or the end is due at character 10: width > 1 --> \)"),
        ("width > 1 height > 1", r"is due at character 11: width > 1 --> height > 1"),
        ("a == 'x", r"no closing quote at character 6: a == --> 'x"),
        ("a in ()", r"is due at character 7"),
        ("a in (b)", r"a list holds only numbers, .* at character 8"),
        ("a in (1", r"a comma or \) is due at character 8"),
        ("a in 1", r"a list in parentheses is due at character 6"),
        ("a not 1", r"`in` is due at character 7"),
        ("1 < 2", r"needs a field at character 1"),
        ("a > 1 and 1 in (1)", r"needs a field at character 11: a > 1 and --> 1 in"),
        ("a > true", r"no order.* at character 3"),
        ("a > 1e999", r"too large at character 5"),
        ("and > 1", r"character 1"),
        ("a is not None", r"is due at character 3"),
        ("f(a) > 1", r"is due at character 2"),
        ("__import__('os').system('true')", r"is due at character 11: __import__ --> \('os'\)"),
        ("not " * 101 + "a > 1", "nested over 100 times"),
        ("(" * 100_000, "nested over 100 times"),
        ("a:\n  b: <5", "line 1, character 1: no comparison"),
        ("pwatermark: __import__('os')", r"is due at character 13: pwatermark: --> __import__"),
        ("punsafe: 0.5", r"is due at character 10: punsafe: --> 0.5"),
        ("pwatermark: >=0.5", "not YAML .*in quotes"),
        ("'': '>5'", "not the name of a field"),
        ("{}", "no condition is there"),
        ("[]", "no condition is there"),
        ("[['a', 'lambda s: t > 1']]", "only s may be named here at character 11"),
        ("[['a', 'lambda s: eval(s)']]", "only s may be named here at character 11"),
        ("[['a', 's > 1']]", "line 1, character 2: no rule"),
        ("[a, [b, c]]", "line 1, character 2: no rule"),
        ("[" * 5000, "not YAML"),
        ("&a [*a]", "not understood"),
        ("[&a [*a]]", "no rule"),
        ("!!int '' : 5", "--where: "),
        ("@missing.yaml", "cannot read 'missing.yaml' .No such file"),
        ("@~nobody/w\n.yaml", "cannot read '~nobody/w.*No such file"),
        ("@.", "cannot read '.' .Is a directory"),
    ],
)
def test_a_malformed_condition_is_one_line_that_points_at_the_place(text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        parse_where(text)
    assert str(caught.value).startswith("--where") and "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "name, text",
    [
        ("w.yaml", 'width: ">=512"\naesthetic: ">4.5"'),
        ("w.yml", "- [width, 'lambda s: s>=512']\n- [aesthetic, 'lambda s: s>4.5']\n"),
        ("w.json", json.dumps({"width": ">=512", "aesthetic": ">4.5"}, indent=4)),
        ("w.txt", "width >= 512\n and\taesthetic > 4.5\n"),
        ("w.yaml", "width >= 512\nand aesthetic > 4.5\n"),
        ("w", '\ufeffwidth >= 512 and "4.5" < aesthetic'),
    ],
)
def test_a_file_holds_any_notation(tmp_path, name, text):
    (tmp_path / name).write_text(text, encoding="utf-8")
    codes, _ = judge(parse_where(f"@{tmp_path / name}"), {"width": [512, 511], "aesthetic": [5, 5]}, 2)
    assert codes.tolist() == [0, 1]


@settings(deadline=None, max_examples=500)
@given(
    st.text()
    | st.text("ab<>=!()[]{}'\"`\\,.:-+ \n\t@#&*0129eE")
    | st.lists(st.sampled_from([*"()[],", "and", "or", "not", "in", "a", "<", "==", "1", "'x'", "lambda s:"])).map(
        " ".join
    )
)
def test_any_text_is_a_condition_or_a_config_error(text):
    try:
        expression = parse_where(text)
    except ConfigError as error:
        assert "\n" not in str(error)
    else:
        assert parse_expression(str(expression)) == expression


@settings(deadline=None, max_examples=300)
@given(expressions, st.integers(0), st.text(max_size=1))
def test_a_changed_character_never_breaks_the_parser(expression, place, character):
    text = str(expression)
    place %= len(text)
    try:
        parse_where(text[:place] + character + text[place + 1 :])
    except ConfigError as error:
        assert not re.search("[\n\r]", str(error))

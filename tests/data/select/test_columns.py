"""What the columns of a part say of it is what its rows say, read one by one."""

import math

import numpy as np
import pytest
from expressions import make_expressions
from hypothesis import given, settings
from hypothesis import strategies as st

from ppldm.data.select import columns as module
from ppldm.data.select.columns import ColumnsWriter, Distinct, Misfit, read_blocks
from ppldm.data.select.evaluate import judge
from ppldm.data.select.expression import field_names, parse_expression

NAMES = ["width", "height", "a", "b", "caption", "two words"]
KEY = [[12, 34], 5, "part", "default"]

numbers = (
    st.integers(-3, 3)
    | st.floats(allow_nan=False)
    | st.floats(width=32, allow_nan=False)
    | st.sampled_from([10**30, 1 << 53, (1 << 53) + 1, -(1 << 53) - 1, 1e300, -0.0, 0.1, 16777217])
)
texts = st.text("a1. é\ud800", max_size=3) | st.sampled_from(["1", " 2.5 ", "-3", "1e0", "x", str((1 << 53) + 1)])
values = st.none() | st.booleans() | numbers | texts | st.just(math.nan) | st.just([1]) | st.just({"k": 1})
# Columns of one kind too: those are stored as arrays.
metas = st.lists(st.fixed_dictionaries({}, optional=dict.fromkeys(NAMES, values)), max_size=8) | st.lists(
    st.fixed_dictionaries({}, optional=dict.fromkeys(NAMES, st.none() | numbers)), max_size=8
)
expressions = make_expressions(NAMES, numbers | texts, numbers | texts | st.booleans(), max_leaves=6)


def write(path, rows, key=KEY):
    """rows: (caption, metadata), or the reason of a row that cannot be read."""
    with open(path, "wb") as file:
        writer = ColumnsWriter(file)
        for row in rows:
            writer.add_bad(row) if isinstance(row, str) else writer.add(*row)
        writer.finish(key)
    return path


def why(codes, reasons):
    return [None if code == 0 else reasons[code - 1] for code in codes.tolist()]


@settings(deadline=None, max_examples=400)
@given(expressions, metas, st.integers(1, 9))
def test_columns_are_judged_as_the_rows_are(tmp_path_factory, expression, metas, block_rows):
    folder = tmp_path_factory.mktemp("columns")
    rows = [(f"a{number % 2}", meta) for number, meta in enumerate(metas)]
    patch = pytest.MonkeyPatch()
    patch.setattr(module, "_BLOCK_ROWS", block_rows)
    write(folder / "c", rows)
    patch.undo()
    sizes = [{name: meta[name] for name in ("width", "height") if type(meta.get(name)) is int} for meta in metas]
    names = field_names(expression)
    found, start = [], 0
    for num_rows, columns, errors in read_blocks(folder / "c", KEY, names):
        assert errors is None and not {"width", "height"} & columns.keys()
        index = {
            name: np.array(
                [min(max(size.get(name, 0), 0), 65535) for size in sizes[start : start + num_rows]], np.uint16
            )
            for name in ("width", "height")
        }
        found += why(*judge(expression, {**columns, **index}, num_rows))
        start += num_rows
    by_row = {
        name: [caption if name == "caption" else meta.get(name) for caption, meta in rows] for name in names - {"width"}
    }
    by_row |= {name: [min(max(size.get(name, 0), 0), 65535) or None for size in sizes] for name in ("width", "height")}
    assert found == why(*judge(expression, by_row, len(rows)))


@pytest.mark.parametrize(
    "values, expected",
    [
        ([1, 2.5, None, -3], "<f4"),
        ([0.1, 0.5], "<f8"),
        ([16777217], "<f8"),
        ([1 << 53], "<f4"),
        ([(1 << 53) - 1], "<f8"),
        ([(1 << 53) + 1], Distinct),
        ([1, True], Distinct),
        ([1, "1"], Distinct),
        ([[], {}], Distinct),
    ],
)
def test_numbers_are_arrays_where_those_are_exact(tmp_path, values, expected):
    write(tmp_path / "c", [("", {"a": value}) for value in values])
    ((_, columns, _),) = read_blocks(tmp_path / "c", KEY, {"a", "b"})
    assert set(columns) == {"a"}
    column = columns["a"]
    if expected is Distinct:
        assert isinstance(column, Distinct)
        listed = [column.values[place] for place in column.places]
        assert [type(value) for value in listed] == [
            list if isinstance(value, dict) else type(value) for value in values
        ]
    else:
        assert column.dtype.str == expected
        np.testing.assert_array_equal(column, [math.nan if value is None else value for value in values])


@pytest.mark.parametrize("text, truth", [("a < {}", True), ("a == {}", False), ("a in ({})", False), ("a != {}", True)])
def test_numbers_that_float64_does_not_hold_are_compared_exactly(text, truth):
    column = np.array([1 << 53], dtype=np.float64)
    codes, _ = judge(parse_expression(text.format((1 << 53) + 1)), {"a": column}, 1)
    assert (codes[0] == 0) == truth


def test_zero_is_a_number_and_nan_is_none():
    codes, reasons = judge(parse_expression("a < 1"), {"a": np.array([0, np.nan, 2], dtype=np.float32)}, 3)
    assert why(codes, reasons) == [None, "where: no field a", "where: false"]


def test_rows_that_cannot_be_read_keep_their_place_and_reason(tmp_path):
    write(tmp_path / "c", [("x", {"a": 1}), "gzip", ("y", {}), "columns", "gzip"])
    ((num_rows, columns, errors),) = read_blocks(tmp_path / "c", KEY, {"a", "caption"})
    assert num_rows == 5 and np.isnan(columns["a"]).tolist() == [False, True, True, True, True]
    assert [columns["caption"].values[place] for place in columns["caption"].places] == ["x", None, "y", None, None]
    assert [errors.values[place] for place in errors.places] == [None, "gzip", None, "columns", "gzip"]


def test_the_same_rows_give_the_same_bytes_and_a_field_costs_its_own_bytes_alone(tmp_path, monkeypatch):
    rows = [(f"caption {i}", {"url": f"https://example.com/{i}", "score": i / 7}) for i in range(1000)]
    first = write(tmp_path / "a", rows).read_bytes()
    assert write(tmp_path / "b", rows).read_bytes() == first
    read, pread = [], module.os.pread
    monkeypatch.setattr(module.os, "pread", lambda *where: read.append(where[1]) or pread(*where))
    read_blocks(tmp_path / "a", KEY, {"score"})
    assert sum(read) < len(first) / 2


@pytest.mark.parametrize("key", [[], [[12, 35], *KEY[1:]], [[12, 34], 6, *KEY[2:]], [*KEY[:3], "vc"]])
def test_columns_of_another_part_are_refused(tmp_path, key):
    write(tmp_path / "c", [("", {"a": 1})])
    with pytest.raises(Misfit, match="another part"):
        read_blocks(tmp_path / "c", key, ())


def test_columns_of_another_version_are_refused(tmp_path, monkeypatch):
    write(tmp_path / "c", [("", {"a": 1})])
    monkeypatch.setattr(module, "_VERSION", 2)
    with pytest.raises(Misfit, match="another part"):
        read_blocks(tmp_path / "c", KEY, ())


def test_every_damaged_byte_of_what_is_read_is_noticed(tmp_path):
    sound = write(tmp_path / "c", [("x", {"a": 1}), ("y", {"a": "z"})]).read_bytes()
    expected = str(read_blocks(tmp_path / "c", KEY, {"a", "caption"}))
    flipped = [sound[:i] + bytes([sound[i] ^ 1]) + sound[i + 1 :] for i in range(len(module._MAGIC), len(sound))]
    for damaged in (*flipped, b"", sound[:9], sound[:-1], sound + b"\0"):
        (tmp_path / "c").write_bytes(damaged)
        with pytest.raises(Misfit):
            found = str(read_blocks(tmp_path / "c", KEY, {"a", "caption"}))
            assert found == expected, "wrong without a word"


def test_every_row_may_have_fields_of_its_own(tmp_path):
    write(tmp_path / "c", [("", {f"field {i}": i}) for i in range(3000)])
    ((_, columns, _),) = read_blocks(tmp_path / "c", KEY, {"field 77"})
    assert np.flatnonzero(~np.isnan(columns["field 77"])).tolist() == [77]

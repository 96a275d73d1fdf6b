import base64
import binascii
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppldm.data.formats.row import Row, decode_row, encode_row
from ppldm.utils.errors import RowError

captions = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\t\r\n"))
metas = st.dictionaries(st.text(), st.one_of(st.none(), st.booleans(), st.integers(), st.text()), max_size=4)


@settings(deadline=None)
@given(captions, st.binary(min_size=1), metas)
def test_a_row_comes_back_from_one_line(caption, image, meta):
    meta = json.loads(json.dumps(meta, ensure_ascii=False).encode("utf-8", "replace"))
    line = encode_row(Row(caption, image, meta))
    assert line.count(b"\n") == 1 and line.endswith(b"\n") and line.count(b"\t") == 2
    assert decode_row(line, "") == Row(caption, image, meta)
    assert decode_row(line.replace(b"\n", b"\r\n"), "") == Row(caption, image, meta)


@pytest.mark.parametrize("breaker", ["\t", "\n", "\r", "\r\n", "\t\t\n"])
def test_what_would_break_the_line_becomes_one_space(breaker):
    assert decode_row(encode_row(Row(f"a{breaker}b", b"x", {"k": f"c{breaker}d"})), "").caption == "a b"
    assert decode_row(encode_row(Row("a", b"x", {"k": f"c{breaker}d"})), "").meta == {"k": f"c{breaker}d"}


def test_a_lone_surrogate_becomes_a_question_mark():
    assert decode_row(encode_row(Row("a\ud83d", b"x", {"k": "\ud83d"})), "") == Row("a?", b"x", {"k": "?"})


def test_metadata_is_compact_sorted_and_empty_where_there_is_none():
    assert encode_row(Row("c", b"x", {"b": "é", "a": 1})) == 'c\t{"a":1,"b":"é"}\teA==\n'.encode()
    assert encode_row(Row("c", b"x")) == b"c\t\teA==\n"


@pytest.mark.parametrize("meta", [{"a": float("nan")}, {"a": object()}])
def test_metadata_without_a_json_form_is_refused(meta):
    with pytest.raises(RowError) as caught:
        encode_row(Row("c", b"x", meta))
    assert caught.value.reason == "meta"


@pytest.mark.parametrize("column", [b"", b"NONE", b"0", b"[1]", b"{broken", b"null", b'{"a":' * 100_000])
def test_an_ignored_column_that_is_no_object_means_unknown(column):
    assert decode_row(b"c\t" + column + b"\teA==\n", "").meta == {}


def test_further_columns_are_ignored():
    assert decode_row(b"c\t\teA==\tmore\t\xff\n", "") == Row("c", b"x")


def test_gb18030_is_read_where_utf8_fails():
    line = '一张照片\t{"来源":"网络"}\teA==\n'.encode("gb18030")
    assert decode_row(line, "") == Row("一张照片", b"x", {"来源": "网络"})


@pytest.mark.parametrize(
    "line, reason",
    [
        (b"", "columns"),
        (b"caption only\n", "columns"),
        (b"caption\teA==\n", "columns"),
        (b"caption\t\t\n", "base64"),
        (b"caption\t\t  \n", "base64"),
        (b"caption\t\teA=\n", "base64"),
        (b"caption\t\te*A==\n", "base64"),
        ("caption\t\té\n".encode(), "base64"),
        (b"\xff\xff\t\teA==\n", "encoding"),
    ],
)
def test_a_bad_row_names_its_reason_and_place(line, reason):
    with pytest.raises(RowError, match="part-3 row 9") as caught:
        decode_row(line, "part-3 row 9")
    assert caught.value.reason == reason


@settings(deadline=None, max_examples=300)
@given(st.binary())
def test_any_line_is_a_row_or_a_row_error(line):
    try:
        row = decode_row(line, "")
    except RowError:
        return
    assert row.image and line.count(b"\t") >= 2


def image_or_reason(decode):
    try:
        return decode()
    except RowError as error:
        return error.reason
    except binascii.Error:
        return "base64"


@settings(deadline=None, max_examples=500)
@given(st.lists(st.sampled_from([b"QUJD", b"QQ==", b"QUI=", b"=", b"A", b"-", b" ", b"\0", b"\xff"]), min_size=1))
def test_base64_is_read_as_the_standard_library_reads_it(pieces):
    column = b"".join(pieces).strip()
    expected = image_or_reason(lambda: base64.b64decode(column, validate=True)) or "base64"
    assert image_or_reason(lambda: decode_row(b"\t\t" + column, "").image) == expected

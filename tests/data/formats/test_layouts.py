"""Reference: the published readers' table of data sources."""

import base64
import json

import pytest

from ppldm.data.formats.layouts import LAYOUTS
from ppldm.data.formats.row import Row, decode_row, decode_text_columns
from ppldm.utils.errors import RowError

# name: (column of the caption, column of the image), both from 0
PUBLISHED = {
    "default": (0, 2),
    "laion_aes": (2, 5),
    "alt_aesthetic": (1, 4),
    "laion_aesthetic": (10, 12),
    "cc_15m_tag_watermark_1024": (0, 4),
    "laion400m_1024": (0, 4),
    "cc_tag_watermark": (0, 4),
    "cc_12m_tag_watermark": (0, 4),
    "alt-text2image_gen_filted_data_shuffle_watermark": (1, 0),
    "image_search_key_201810": (1, 5),
    "laion400m": (0, 2),
    "yfcc_en_zh": (0, 4),
    "vc": (6, 3),
}


def make_line(name, caption, image=b"image", further=0):
    caption_column, image_column = PUBLISHED[name]
    columns = [f"column {i}" for i in range(max(caption_column, image_column) + 1 + further)]
    columns[caption_column], columns[image_column] = caption, base64.b64encode(image).decode()
    return "\t".join(columns).encode() + b"\n"


def test_every_published_layout_is_there():
    assert set(LAYOUTS) == {*PUBLISHED, "control"}


@pytest.mark.parametrize("further", [0, 2])
@pytest.mark.parametrize("name", PUBLISHED)
def test_columns(name, further):
    caption = json.dumps({"caption_en": "a dog"}) if name == "laion_aes" else "a dog"
    line = make_line(name, caption, b"\xff\xd8 picture", further)
    row = decode_row(line, "", LAYOUTS[name])
    assert (row.caption, row.image, row.other_captions) == ("a dog", b"\xff\xd8 picture", ())
    with pytest.raises(RowError, match="part row 3") as caught:
        decode_row(b"\t".join(line.split(b"\t")[: max(PUBLISHED[name])]), "part row 3", LAYOUTS[name])
    assert caught.value.reason == "columns"


@pytest.mark.parametrize("name", PUBLISHED)
def test_text_is_read_without_the_image_wherever_it_ends_before_the_line(name):
    line = make_line(name, json.dumps({"caption_en": "é", "n": 1}) if name == "laion_aes" else "é", further=1)
    row = decode_row(line, "", LAYOUTS[name])
    for end in range(len(line)):
        assert decode_text_columns(line[:end], "", LAYOUTS[name]) in (None, (row.caption, row.meta))
    assert decode_text_columns(line, "", LAYOUTS[name]) == (row.caption, row.meta)


@pytest.mark.parametrize(
    "meta, caption",
    [
        ({"caption_en": "a", "blip_caption_en": "b"}, "a"),
        ({"blip_caption_en": "b"}, "b"),
        ({"caption_en": None, "blip_caption_en": "b"}, "b"),
        ({"caption_en": "", "blip_caption_en": "b"}, "b"),
        ({"other": 1}, ""),
    ],
)
def test_the_caption_of_laion_aes_is_in_its_json(meta, caption):
    row = decode_row(make_line("laion_aes", json.dumps(meta)), "", LAYOUTS["laion_aes"])
    assert row == Row(caption, b"image", meta)


@pytest.mark.parametrize("column", ["", "plain", "[1]", "{broken"])
def test_a_caption_column_without_its_json_is_a_bad_row(column):
    with pytest.raises(RowError, match="row 5.*caption_en") as caught:
        decode_row(make_line("laion_aes", column), "row 5", LAYOUTS["laion_aes"])
    assert caught.value.reason == "caption"


@pytest.mark.parametrize("name", PUBLISHED)
def test_marks_go_from_the_two_layouts_that_have_them(name):
    if name == "laion_aes":
        return
    caption = decode_row(make_line(name, "a<mark>b <mark>"), "", LAYOUTS[name]).caption
    assert caption == ("ab " if name in ("cc_tag_watermark", "cc_12m_tag_watermark") else "a<mark>b <mark>")


def test_several_captions():
    name = "image_search_key_201810"
    for text, captions in {"a\x01|b||c": ("a", "b", "c"), "": ("",), "|": ("",)}.items():
        row = decode_row(make_line(name, text), "", LAYOUTS[name])
        assert (row.caption, *row.other_captions) == captions
    assert decode_row(make_line("default", "a|b"), "", LAYOUTS["default"]).caption == "a|b"


def test_gb18030_in_a_column_behind_the_image():
    line = make_line("vc", "CAPTION").replace(b"CAPTION", "一张照片".encode("gb18030"))
    assert decode_row(line, "", LAYOUTS["vc"]).caption == "一张照片"

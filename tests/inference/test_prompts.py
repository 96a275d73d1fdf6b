"""Prompts from files of every kind."""

import json

import pytest

from ppldm.inference.prompts import Request, read_licence, read_requests
from ppldm.utils.errors import ConfigError


@pytest.mark.parametrize(
    "name, text, expected",
    [
        ("p.txt", "红心\tseen\n\n  blue heart \n", [Request("红心", remark="seen"), Request("blue heart")]),
        ("p.tsv", "id\tcaption_en\n7\ta cat, a dog\n", [Request("a cat, a dog")]),
        ("p.csv", 'prompt,negative_prompt,seed\n"a, b",dull,3\nc,,\n', [Request("a, b", "dull", 3), Request("c")]),
        ("p.jsonl", '{"text": "a", "seed": 0}\n\n"b"\n', [Request("a", seed=0), Request("b")]),
        ("p.tsv", '\ufeffprompt\n"quoted" word\n', [Request("quoted word")]),
        ("p.csv", 'prompt\n"two\nlines"\n', [Request("two\nlines")]),
        ("p.txt", "one\u2028prompt\r\ntwo", [Request("one\u2028prompt"), Request("two")]),
        ("p.json", '["a",\n {"caption": "b", "seed": 4}]', [Request("a"), Request("b", seed=4)]),
    ],
)
def test_forms(tmp_path, name, text, expected):
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert read_requests(tmp_path / name) == expected


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("p.tsv", "id\twords\n7\ta\n", "line 2 has no prompt"),
        ("p.csv", "prompt,seed\na,x\n", "line 2: the seed 'x'"),
        ("p.jsonl", '{"prompt": "a"}\n{"prompt"\n', "line 2 is not JSON"),
        ("p.jsonl", json.dumps({"prompt": "a", "seed": -3}), "line 1: the seed -3"),
        ("p.csv", "prompt\n", "holds no prompts"),
        ("p.csv", 'prompt\na\n"b\nc\n', "not a table, up to line 4: unexpected end of data"),
        ("p.tsv", 'prompt\na\n"b\nc\n', "not a table, up to line 4: a quotation mark .* is not closed"),
        ("p.json", '[{"prompt": "a"}, 3]', "item 2 has no prompt"),
        ("p.json", '["a"', "p.json is not JSON"),
        ("p.jsonl", '{"prompt": "a", "seed": true}', "the seed True"),
        ("p.jsonl", '{"prompt": "a", "seed": 1.5}', "the seed 1.5"),
        ("p.jsonl", '{"prompt": "a", "seed": 18446744073709551616}', "the seed 18446744073709551616"),
        ("p.jsonl", '{"prompt": "a", "negative_prompt": 3}', "the negative_prompt 3 is not text"),
    ],
)
def test_words_for_bad_files(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_requests(tmp_path / name)
    with pytest.raises(ConfigError, match="caption sets are not part of this package"):
        read_requests("coco30k")


def test_captions_of_coco_are_the_first_of_each_picture(tmp_path):
    path = tmp_path / "captions_val2014.json"
    annotations = [
        {"image_id": 42, "id": 1, "caption": "A red heart. "},
        {"image_id": 7, "id": 2, "caption": "Two boats"},
        {"image_id": 42, "id": 3, "caption": "A heart, red"},
    ]
    whole = {
        "info": {"description": "COCO 2014 Dataset", "url": "http://cocodataset.org", "contributor": "x"},
        "licenses": [{"id": 1, "name": "CC BY 2.0", "url": "u"}],
        "annotations": annotations,
    }
    for indent in (None, 2):
        path.write_text(json.dumps(whole, indent=indent))
        found = read_requests(path)
        assert [(one.prompt, one.remark) for one in found] == [("A red heart.", "42"), ("Two boats", "7")]
    assert read_licence(path) == {
        **{"description": "COCO 2014 Dataset", "url": "http://cocodataset.org", "licences": ["CC BY 2.0"]}
    }
    path.write_text(json.dumps({"annotations": [{"caption": "x"}]}))
    with pytest.raises(ConfigError, match="annotation 1 names no image_id"):
        read_requests(path)
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    assert [one.prompt for one in read_requests(path)] == ["a", "b"] and read_licence(path) == {}

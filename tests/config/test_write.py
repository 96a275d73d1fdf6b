"""A recipe that is written and read again is the same."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from schema import read

from ppldm.config.load import Setting
from ppldm.config.recipe import recipe_text, write_settings

TEXT = st.text(st.characters(blacklist_categories=("Cs", "Cc")), max_size=30).filter(lambda text: text != "???")


@given(TEXT, st.lists(TEXT, max_size=3), st.floats(allow_nan=False, allow_infinity=False), st.booleans())
@settings(max_examples=60, deadline=None)
@example(
    "\udc80\U0010fe7f\U0010fe80", ["\U0010fe7f", "\U0010feff\udcff"], 0.0, False
)  # bytes, and what stands for them
def test_what_is_written_is_read_again(tmp_path_factory, text, names, rate, flip):
    values = {
        "family": "ldm", "data.list": text, "data.size": 7, "data.kind": "area",
        "run.rate": rate, "run.names": names, "run.where": None, "run.flip": flip,
    }  # fmt: skip
    path = tmp_path_factory.mktemp("x") / "recipe.yaml"
    for origins in (False, True):
        path.write_text(write_settings({key: Setting(value, "x") for key, value in values.items()}, origins))
        assert {key: one.value for key, one in read(path).items()} == values


@pytest.mark.parametrize(
    "text", ["1e-4", "null", "true", "${data.size}", r"\${x}", "a: b", "# a", "x" * 300, "???x", "0x1F"]
)
def test_text_stays_text(tmp_path, text):
    path = tmp_path / "recipe.yaml"
    path.write_text(write_settings({"data.list": Setting(text, "x"), "run.names": Setting([text], "x")}, origins=True))
    assert read(path)["data.list"].value == text and read(path)["run.names"].value == [text]


def test_what_came_from_the_environment_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setenv("LIST_OF_MINE", "secret-value")
    path = tmp_path / "a.yaml"
    path.write_text("data: {list: '${oc.env:LIST_OF_MINE}/x'}\nrun: {where: '${data.list}', names: ['${run.where}']}")
    found = read(path)
    written = {key: one.written for key, one in found.items() if one.written}
    assert set(written) == {"data.list", "run.where", "run.names"}
    assert "secret-value" not in write_settings(found, origins=True)
    tree = {
        "data": {"list": "secret-value/x", "size": 3},
        "run": {"where": "secret-value/x", "names": ["secret-value"]},
    }
    text = recipe_text(tree, written, "1.2.3")
    assert "secret-value" not in text and "${oc.env:LIST_OF_MINE}/x" in text
    path.write_text(text)
    again = {key: one.value for key, one in read(path).items()}
    assert again == {key: one.value for key, one in found.items()} | {"data.size": 3}


def test_every_setting_has_its_origin(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("data:\n  list: x")
    text = write_settings(read(path, "data.size=3", rate=0.5), origins=True)
    assert "family: ldm  # default\n\ndata:\n" in text
    assert f"  list: x  # {path}:2\n  size: 3  # override\n" in text and "  rate: 0.5  # flag\n" in text
    assert "  # default\n  names:\n  - visualdl\n" in text


def test_a_recipe_does_not_clear_the_folder_again():
    text = recipe_text({"family": "ldm", "run": {"overwrite_output_dir": True, "seed": 1}}, {}, "1")
    assert "overwrite" not in text and "family: ldm" in text and "seed: 1" in text

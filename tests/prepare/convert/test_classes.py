"""Law: `ppldm convert --idx-to-prompt` gives a picture the caption of its class, or refuses what tells no classes."""

import json
from pathlib import Path

import pytest
import web
from formats import add_member

from ppldm.cli.main import run
from ppldm.data.formats.part import Part
from ppldm.data.formats.tar import read_class_prompts
from ppldm.utils.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
PROMPTS = {"0": "tench", "1": "goldfish", "2": "great white shark"}
SYNSETS = ["n01491361", "n01440764", "n01443537"]  # not sorted


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PPLDM_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "names.json").write_text(json.dumps(PROMPTS))
    return tmp_path


def write_classes(folder, names, count=2) -> None:
    for place, name in enumerate(names):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            (folder / name / f"{name}_{number}.jpg").write_bytes(web.encode(web.picture(10 * place + number)))


def convert(source, *words, table="names.json") -> list[tuple[str, str]]:
    """(key, caption) of each row, of a new process's table."""
    read_class_prompts.cache_clear()
    run(["convert", str(source), "--out", "out", "--num-workers", "1", "--idx-to-prompt", str(table), *words])
    found = []
    for path in sorted(Path("out/parts").glob("*.gz")):
        part = Part(path)
        rows = [part.read(number) for number in range(len(part))]
        found += [(row.meta["key"], row.caption) for row in rows]
        part.close()
    return found


@pytest.mark.parametrize("names, numbers", [
    (["0", "2", "1"], [0, 2, 1]), (["2"], [2]), (SYNSETS, [2, 0, 1]), (["train/x", "b", "a"], [2, 1, 0]),
])  # fmt: skip
def test_folders_by_class(here, names, numbers):
    for place, name in enumerate(names):
        (here / "pictures" / name).mkdir(parents=True)
        (here / "pictures" / name / f"p{place}.jpg").write_bytes(web.encode(web.picture(place)))
    expected = [(f"p{place}", PROMPTS[str(number)]) for place, number in enumerate(numbers)]
    assert sorted(convert("pictures")) == expected


def test_a_caption_beside_a_picture_comes_before_its_class(here):
    write_classes(here / "pictures", ["0", "1"])
    (here / "pictures/0/0_1.txt").write_text("one of its own")
    found = [caption for _, caption in sorted(convert("pictures"))]
    assert found == [PROMPTS["0"], "one of its own", PROMPTS["1"], PROMPTS["1"]]


def test_a_table_by_the_folders_names(here):
    write_classes(here / "pictures", SYNSETS[:2])
    (here / "names.json").write_text(json.dumps(dict(zip(SYNSETS, "abc", strict=True))))
    assert {caption for _, caption in convert("pictures", "--class-mapping", "names.json")} == {"a", "b"}
    (here / "names.json").write_text(json.dumps(dict(zip(SYNSETS, "xyz", strict=True))))
    assert {caption for _, caption in convert("pictures")} == {"x", "y"}  # parts follow the table
    with pytest.raises(ConfigError, match="captions.*make it again with --redo"):
        run(["convert", "pictures", "--out", "out", "--num-workers", "1"])


def test_tars_with_classes(here):
    import tarfile

    with tarfile.open("a.tar", "w") as tar:
        for number, content in enumerate((b"2", b"0\n", b"7")):
            add_member(tar, f"{number}.jpg", web.encode(web.picture(number)))
            add_member(tar, f"{number}.cls", content)
    assert convert("a.tar") == [("0", "great white shark"), ("1", "tench")]
    assert json.loads(Path("out/manifest.json").read_text())["skipped"] == {"class": 1}
    (here / "names.json").write_text(json.dumps(PROMPTS | {"0": "fish"}))
    assert convert("a.tar")[1] == ("1", "fish")


@pytest.mark.parametrize("names, table, message", [
    (SYNSETS[:2], PROMPTS, "2 folders where that has 3 classes"),
    ([*SYNSETS, "n2"], PROMPTS, "4 folders where that has 3 classes"),
    (SYNSETS, {"a": "x", "b": "y", "c": "z"}, "is no class"),
    (["0"], {"0": 5}, "not text"), (["0"], ["tench"], "does not hold a JSON object"),
])  # fmt: skip
def test_what_does_not_tell_classes_is_refused(here, names, table, message):
    write_classes(here / "pictures", names)
    (here / "names.json").write_text(json.dumps(table))
    with pytest.raises(ConfigError, match=message):
        convert("pictures")
    for picture in [path for path in (here / "pictures").rglob("*") if path.is_file()]:
        picture.with_suffix(".txt").write_text("a caption beside")
    if names == SYNSETS[:2]:
        with pytest.raises(ConfigError, match="is for tars with .cls"):
            convert("pictures")


def test_the_published_table_is_whole():
    table = json.loads((ROOT / "data/imagenet_idx_to_prompt.json").read_text())
    assert [*table] == [str(number) for number in range(1000)] and table["0"] == "tench" and all(table.values())

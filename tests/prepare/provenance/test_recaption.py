"""Laws: every row is there, in its place, with its own caption and picture; a further caption where there is one, and
rows in = captioned + missing; stopped anywhere, the same command comes to the same bytes."""

import json
import sys
from contextlib import closing

import numpy as np
import pytest
from filelists import read_filelist

from ppldm.data.formats.part import Part
from ppldm.data.text.captions import CaptionRule
from ppldm.prepare.convert.convert import convert_source
from ppldm.prepare.provenance import recaption as recaptioning
from ppldm.prepare.provenance.forget import forget
from ppldm.prepare.provenance.lineage import describe, trace_rows
from ppldm.prepare.provenance.recaption import recaption, recaption_rows
from ppldm.utils.errors import ConfigError, DataError, EnvironmentProblem
from ppldm.utils.pictures import save_png

ROWS = 7
ANSWER = """
import base64, io, json, sys
from PIL import Image
seen = open({seen!r}, "a")
for line in sys.stdin:
    told = json.loads(line)
    print(told["row"], file=seen, flush=True)
    if told["row"] == {dies}:
        sys.exit(3)
    grey = Image.open(io.BytesIO(base64.b64decode(told["image"]))).getpixel((0, 0))[0]
    if told["row"] != 2:
        print(json.dumps({{"row": told["row"], "caption": f"grey {{grey}}, was {{told['caption']}}"}}), flush=True)
"""


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "in"
    for row in range(ROWS):
        (folder / f"{row // 4}").mkdir(parents=True, exist_ok=True)
        path = folder / f"{row // 4}" / f"{row % 4:04}"
        save_png(path.with_suffix(".png"), np.full((40, 40, 3), row * 20, np.uint8))
        path.with_suffix(".txt").write_text(f"picture {row}")
        path.with_suffix(".json").write_text(json.dumps({"url": f"http://a/{row}.png"}))
    convert_source(folder, tmp_path / "data", num_workers=1, rows_per_part=2)
    return tmp_path / "data"


def rows_of(data) -> list:
    rows = []
    for path in read_filelist(data / "custom.filelist"):
        with closing(Part(path)) as part:
            rows += [part.read(row) for row in range(len(part))]
    return rows


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return path


def command_of(folder, dies=-1) -> str:
    (folder / "answer.py").write_text(ANSWER.format(seen=str(folder / "seen"), dies=dies))
    return f"{sys.executable} {folder / 'answer.py'}"


def test_every_row_keeps_what_it_has_and_gets_its_caption(data, tmp_path, capsys):
    before = rows_of(data)
    named = [{"key": "0/0000"}, {"url": "http://a/1.png"}, {"sha256": before[5].meta["sha256"]}, {"key": "no such"}]
    captions = [one | {"caption": f"new\t{number} 心"} for number, one in enumerate(named)]
    file = write(tmp_path / "new.jsonl", [*captions, {"url": "http://a/6.png", "caption": " "}])
    recaption(str(data), str(tmp_path / "out"), captions=str(file), name="blip", num_workers=1)
    assert "3 of 7 rows have a new caption" in (told := capsys.readouterr().out) and "not there: 1" in told
    after = rows_of(tmp_path / "out")
    new = {0: "new\t0 心", 1: "new\t1 心", 5: "new\t2 心"}
    for row, (one, other) in enumerate(zip(before, after, strict=True)):
        assert (one.caption, one.image) == (other.caption, other.image)
        assert other.meta == one.meta | ({"blip": new[row]} if row in new else {})
    account = json.loads((tmp_path / "out/manifest.json").read_text())["captions"]["blip"]
    assert account["rows"] == account["captioned"] + account["missing"] == 7
    # Training takes it, and says of rows that have neither what they lack.
    rule = CaptionRule.of_flags("blip:1", clean=False)
    assert [rule.texts(after[row]) for row in new] == [[text] for text in new.values()] and rule.texts(after[2]) == []
    found = trace_rows(tmp_path / "out", ["0/0000", "0/0002"])
    assert [list(row["captions"]) for row in found] == [["blip"], []]
    assert f"blip comes from new.jsonl, SHA-256 {account['sha256']}" in describe(found)
    # Again is nothing; another column is added to the first; what is there is not overwritten.
    sums = {path.name: path.read_bytes() for path in (tmp_path / "out/parts").iterdir()}
    assert recaption_rows(data, tmp_path / "out", file, "blip") == account
    assert {path.name: path.read_bytes() for path in (tmp_path / "out/parts").iterdir()} == sums
    recaption_rows(tmp_path / "out", tmp_path / "two", file, "cog")
    assert rows_of(tmp_path / "two")[0].meta["blip"] == rows_of(tmp_path / "two")[0].meta["cog"] == "new\t0 心"
    assert {"blip", "cog"} == json.loads((tmp_path / "two/manifest.json").read_text())["captions"].keys()
    with pytest.raises(ConfigError, match="has a blip already"):
        recaption_rows(tmp_path / "out", tmp_path / "three", file, "blip")
    write(tmp_path / "urls", ["x"]).write_text("http://a/1.png\n")
    forget(str(tmp_path / "two"), url=str(tmp_path / "urls"), num_workers=1)
    assert len(rows_of(tmp_path / "two")) == 6


def test_what_a_file_cannot_mean(data, tmp_path):
    for lines, message in (
        ([{"caption": "a"}], "line 1 of"),
        ([{"key": "0001"}], "line 1 of"),
        ([{"url": "http://a/1.png", "caption": "a"}, {"url": "http://a/1.png", "caption": "b"}], "line 2 .*another"),
        ([{"key": "0001", "caption": "a"}], "key 0001 is in 2 places"),
    ):
        with pytest.raises(ConfigError, match=message):
            recaption_rows(data, tmp_path / "out", write(tmp_path / "bad.jsonl", lines), "blip")
    for options in (
        {},
        {"captions": "a", "command": "b"},
        {"captions": "a", "name": "caption"},
        {"captions": "nowhere"},
    ):
        with pytest.raises(ConfigError):
            recaption(str(data), str(tmp_path / "none"), **options)
    with pytest.raises(ConfigError, match="is the data themselves"):
        recaption_rows(data, data, tmp_path / "bad.jsonl", "blip")


def test_a_command_answers_once_for_each_row_wherever_it_is_stopped(data, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(EnvironmentProblem, match="status 3 after 3 captions, which are kept"):
        recaption_rows(data, out, command_of(tmp_path, dies=4), "caption_2")
    with open(out / ".recaption/answers.jsonl", "a") as journal:
        journal.write('[5, "tor')  # as a killed run leaves it
    account = recaption_rows(data, out, command_of(tmp_path), "caption_2")
    assert (account["captioned"], account["missing"]) == (6, 1)
    assert [row.meta.get("caption_2") for row in rows_of(out)] == [
        None if row == 2 else f"grey {row * 20}, was picture {row}" for row in range(ROWS)
    ]
    asked = (tmp_path / "seen").read_text().split()
    assert asked == ["0", "1", "2", "3", "4", "2", "4", "5", "6"]
    assert "comes from the command" in describe(trace_rows(out, ["0/0000"]))
    answers = [json.loads(line) for line in (out / ".recaption/answers.jsonl").read_text().splitlines()]
    assert sorted(row for row, _ in answers) == [0, 1, 3, 4, 5, 6]
    whole = recaption_rows(data, tmp_path / "whole", command_of(tmp_path), "caption_2")
    assert {name: whole[name] for name in ("rows", "captioned")} == {
        name: account[name] for name in ("rows", "captioned")
    }
    for path in (out / "parts").glob("*.gz"):
        assert path.read_bytes() == (tmp_path / "whole/parts" / path.name).read_bytes()


@pytest.mark.parametrize("stop", range(4))
def test_stopped_between_parts_the_same_command_goes_on(data, tmp_path, monkeypatch, stop):
    file = write(
        tmp_path / "new.jsonl", [{"url": f"http://a/{row}.png", "caption": f"new {row}"} for row in range(ROWS)]
    )
    make, made = recaptioning.write_lines, []

    def stopping(path, lines):
        if len(made) == stop:
            raise KeyboardInterrupt
        made.append(path)
        return make(path, lines)

    monkeypatch.setattr(recaptioning, "write_lines", stopping)
    with pytest.raises(KeyboardInterrupt):
        recaption_rows(data, tmp_path / "out", file, "caption_2")
    assert not (tmp_path / "out/manifest.json").exists()
    monkeypatch.setattr(recaptioning, "write_lines", lambda *given: (made.append(given[0]), make(*given))[1])
    account = recaption_rows(data, tmp_path / "out", file, "caption_2")
    assert account["captioned"] == ROWS and len(made) == len(set(made)) == 4
    file.write_text("")
    with pytest.raises(ConfigError, match="--redo"):
        recaption_rows(data, tmp_path / "out", file, "caption_2")
    assert recaption_rows(data, tmp_path / "out", file, "caption_2", redo=True)["missing"] == ROWS


def test_made_anew_each_row_is_asked_anew(data, tmp_path):
    recaption_rows(data, tmp_path / "out", command_of(tmp_path), "caption_2")
    (tmp_path / "other").mkdir()
    recaption_rows(data, tmp_path / "out", command_of(tmp_path / "other"), "caption_2", redo=True)
    assert (tmp_path / "other/seen").read_text() == "".join(f"{row}\n" for row in range(ROWS))


def test_what_a_command_cannot_answer(data, tmp_path):
    with pytest.raises(ConfigError, match="cannot be started"):
        recaption_rows(data, tmp_path / "a", "/no/such/program", "caption_2")
    with pytest.raises(DataError, match="answered 'hello'"):
        recaption_rows(data, tmp_path / "b", "echo hello", "caption_2")


@pytest.mark.slow
def test_training_on_new_captions_is_training_on_captions_that_were_there(data, tmp_path, tiny):
    from command_line import parse_arguments

    from ppldm.training.prepare import prepare
    from ppldm.training.train import run_loop

    texts = [f"a heart {row}" for row in range(ROWS)]
    file = write(
        tmp_path / "new.jsonl", [{"url": f"http://a/{row}.png", "caption": text} for row, text in enumerate(texts)]
    )
    recaption_rows(data, tmp_path / "out", file, "blip")
    for row, path in enumerate(sorted((tmp_path / "in").rglob("*.txt"))):
        path.write_text(texts[row])
    convert_source(tmp_path / "in", tmp_path / "own", num_workers=1, rows_per_part=2)
    losses = []
    for folder, changes in (("out", {"captions": "blip:1"}), ("own", {}), ("out", {"captions": "caption:1"})):
        name = f"run{len(losses)}"
        file_list = tmp_path / folder / "custom.filelist.list"
        words = tiny.flags(tmp_path / name, file_list=file_list, max_steps=3, logging_steps=1, **changes)
        run_loop(prepare(*parse_arguments(words, True)))
        lines = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        losses.append([line["loss"] for line in lines if "loss" in line])
    assert losses[0] == losses[1] != losses[2] and len(losses[0]) == 3

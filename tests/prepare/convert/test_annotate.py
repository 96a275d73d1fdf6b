"""Law: pictures = lines + skipped; captions come back through any CSV reader as they were."""

import csv
import json

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ppldm.data.formats.csv_table import CsvTable
from ppldm.data.formats.part import Part
from ppldm.prepare.convert.annotate import annotate, annotate_folder
from ppldm.prepare.convert.convert import convert_source
from ppldm.utils.errors import ConfigError, DataError

CAPTIONS = ["plain", 'a "quoted", one', "two\nlines", "tab\there", "图画, 红", "  spaces  ", "=1+1"]


# Characters that end lines, fields or texts somewhere, and those that UTF-8 does not have.
CONTROLS = [*map(chr, range(0x20)), "\x7f", *map(chr, range(0x80, 0xA0)), "\u2028", "\u2029", "\ufeff", '"', ",", "\\"]
HARD = ["\ud800", "\udfff", '"', ",", "\0", "\r", "\n", "\x85", "\u2028", "a", " ", "图", "'", ";", "#"]


def as_written(caption: str) -> str:
    """A caption as CSV files can have it."""
    return "".join("?" if "\ud800" <= c <= "\udfff" else "\ufffd" if c == "\0" else c for c in caption)


def check_round_trip(folder, captions):
    """Every reader finds all captions: Python's csv, pandas, `format=csv` for training, `ppldm convert`."""
    (folder / "part_1/00000").mkdir(parents=True)
    image = web.encode(web.picture(0))
    for row, caption in enumerate(captions):
        key = f"part_1/00000/{row:09}"
        (folder / f"{key}.jpg").write_bytes(image)
        (folder / f"{key}.json").write_text(json.dumps({"caption": caption}))
    counts = annotate_folder(folder)[str(folder / "part_1.csv")]
    captions = json.loads(json.dumps(captions))  # where two halves of a pair are one character
    wanted = [as_written(caption) for caption in captions if caption.strip()]
    assert counts["lines"] == len(wanted) and counts["pictures"] == len(captions)
    path = folder / "part_1.csv"
    assert [row["text"] for row in read(path)] == wanted
    if not wanted:
        return
    assert pd.read_csv(path, keep_default_na=False, dtype=str)["text"].tolist() == wanted
    folded = [" ".join(text.split()) for text in wanted]
    table = CsvTable(path)
    assert [table.read(row).caption for row in range(len(table))] == folded
    manifest = convert_source(path, folder / "out", "custom")
    assert manifest["rows_out"] == len(wanted)
    part = Part(folder / "out" / manifest["parts"][0]["path"])
    assert [part.read(row).caption for row in range(len(part))] == folded
    part.close()


def test_every_control_character_comes_back(tmp_path):
    check_round_trip(
        tmp_path, [f"a{c}b" for c in CONTROLS] + [f"{c}a{c}" for c in CONTROLS] + ["a\ud800b", "x" * 200_000]
    )


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(st.sampled_from(HARD) | st.characters(), max_size=8).map("".join), min_size=1, max_size=8))
def test_any_caption_comes_back(tmp_path_factory, captions):
    check_round_trip(tmp_path_factory.mktemp("any"), captions)


def test_a_name_that_is_not_utf8_is_counted(tmp_path):
    shard = make_shard(tmp_path / "part_1", 0, ["good"], table=False)
    for suffix in ("jpg", "json"):
        (shard / f"000000000.{suffix}").rename(shard / f"caf\udce9.{suffix}")
    report = annotate_folder(tmp_path)[str(tmp_path / "part_1.csv")]
    assert report == {"pictures": 1, "lines": 0, "skipped": {"file_name": 1}}


def make_shard(part, number, captions, table=True, finished=True):
    """As img2dataset leaves it: pictures with .txt and .json, a table, and its stats."""
    shard = part / f"{number:05}"
    shard.mkdir(parents=True)
    rows = []
    for row, caption in enumerate(captions):
        key = f"{number:05}{row:04}"
        (shard / f"{key}.jpg").write_bytes(web.encode(web.picture(row)))
        (shard / f"{key}.json").write_text(json.dumps({"caption": caption, "key": key}))
        rows.append({"key": key, "caption": caption, "status": "success"})
    rows.append({"key": f"{number:05}9999", "caption": "never came", "status": "failed_to_download"})
    if table:
        pq.write_table(pa.Table.from_pylist(rows), part / f"{number:05}.parquet")
    if finished:
        (part / f"{number:05}_stats.json").write_text("{}")
    return shard


def read(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("table", [True, False])
def test_captions_come_back_as_they_were(tmp_path, table, capsys):
    make_shard(tmp_path / "part_2", 0, CAPTIONS, table)
    make_shard(tmp_path / "part_2", 1, CAPTIONS[:2], table)
    make_shard(tmp_path / "part_10", 0, CAPTIONS[:1], table)
    annotate(str(tmp_path), json=True)
    assert json.loads(capsys.readouterr().out) == {
        str(tmp_path / "part_2.csv"): {"pictures": 9, "lines": 9, "skipped": {}},
        str(tmp_path / "part_10.csv"): {"pictures": 1, "lines": 1, "skipped": {}},
    }
    rows = read(tmp_path / "part_2.csv")
    assert [row["text"] for row in rows] == CAPTIONS + CAPTIONS[:2]
    assert rows[0]["dir"] == "part_2/00000/000000000.jpg" and rows[-1]["dir"] == "part_2/00001/000010001.jpg"
    assert all((tmp_path / row["dir"]).is_file() for row in rows)


def test_the_csv_files_can_be_trained_on(tmp_path):
    make_shard(tmp_path / "part_1", 0, CAPTIONS)
    annotate_folder(tmp_path)
    table = CsvTable(tmp_path / "part_1.csv")
    assert len(table) == len(CAPTIONS)
    assert table.read(1).image == (tmp_path / "part_1/00000/000000001.jpg").read_bytes()


def test_one_level_and_a_file_for_each_shard(tmp_path):
    make_shard(tmp_path / "art", 0, CAPTIONS[:3])
    annotate_folder(tmp_path / "art", per_shard=True)
    assert read(tmp_path / "art/art.csv") == read(tmp_path / "art/00000.csv")
    assert read(tmp_path / "art/art.csv")[0] == {"dir": "00000/000000000.jpg", "text": "plain"}


def test_a_prefix_stands_before_every_path(tmp_path):
    make_shard(tmp_path / "images" / "part_1", 0, CAPTIONS[:2])
    annotate(str(tmp_path / "images"), folder_prefix="laion/images", save_csv_per_img_folder=True)
    for path in ("part_1.csv", "part_1/00000.csv"):
        rows = read(tmp_path / "images" / path)
        assert [row["dir"] for row in rows] == [f"laion/images/part_1/00000/00000000{n}.jpg" for n in (0, 1)]


def test_what_cannot_be_used_is_counted(tmp_path):
    shard = make_shard(tmp_path / "part_1", 0, ["good", "  ", "gone"])
    (shard / "000000002.jpg").unlink()
    (shard / "stray.jpg").write_bytes(b"")
    make_shard(tmp_path / "part_1", 1, ["half"], finished=False)
    report = annotate_folder(tmp_path)[str(tmp_path / "part_1.csv")]
    assert report == {"pictures": 3, "lines": 1, "skipped": {"empty_caption": 1, "no_caption": 1, "no_image": 1}}


def test_folders_without_pictures_are_an_error(tmp_path):
    with pytest.raises(DataError, match="no folders of pictures"):
        annotate_folder(tmp_path)
    with pytest.raises(ConfigError, match="is not a folder"):
        annotate_folder(tmp_path / "none")

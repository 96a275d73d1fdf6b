"""The command: every row is accounted for, the best of copies stays, and no picture is read twice."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from formats import write_tar
from pictures import draw, encode
from PIL import Image, ImageOps

from ppldm.data.formats.part import write_part
from ppldm.data.formats.row import Row
from ppldm.utils.errors import ConfigError, DataError
from ppldm.utils.pictures import save_png


def row(image: bytes, name: str, caption: str = "a picture") -> Row:
    return Row(caption, image, {"key": name})


@pytest.fixture
def copies(here):
    """Two lists, of parts and a tar: 9 rows with copies within and between them."""
    one, two, three = draw(1), draw(2), draw(3)
    write_part(
        "a.gz",
        [
            row(encode(one.resize((60, 45))), "small"),
            row(encode(two), "two"),
            row(encode(one), "one"),
            row(encode(Image.new("RGB", (40, 40), "white")), "white"),
        ],
    )
    torn = row(encode(three)[:90], "torn")
    write_part("b.gz", [row(encode(two), "two again", "a longer caption"), torn, row(encode(three), "three")])
    mirrored = row(encode(ImageOps.mirror(three)), "mirrored")
    write_tar("c.tar", [mirrored, row(encode(Image.new("RGB", (40, 40), "black")), "black")])
    (here / "parts.filelist").write_text("a.gz\nb.gz\n")
    (here / "tars.filelist").write_text("c.tar\n")
    (here / "all.list").write_text("parts.filelist\ntars.filelist format=webdataset\n")
    return here


def find(run, *flags) -> tuple[dict, dict]:
    """(the report, {key of a row: key of the one that stands for it, None where it is torn})."""
    report = json.loads(run("dedup", "all.list", "--out", "out", "--workers", "1", "--json", *flags))
    rows = pq.read_table("out/labels.parquet").to_pylist()
    names = [one["key"] or "torn" for one in rows]
    found = {}
    for number, one in enumerate(rows):
        place = number if one["cluster"] is None else one["cluster"]
        found[names[number]] = None if one["kept"] is None else names[place]
        assert one["kept"] is None or one["kept"] == (place == number)
        assert one["kept"] is False or not one["distance"]
    assert report["rows"] == report["kept"] + report["duplicates"] + sum(report["skipped"].values()) == len(rows)
    dropped = [name for name, kept in found.items() if kept not in (None, name)]
    with open("out/duplicates.jsonl") as file:
        assert [json.loads(line)["key"] for line in file] == dropped
    return report, {name: found[name] for name in dropped}


def test_the_best_of_copies_is_kept(copies, run):
    report, dropped = find(run)
    assert dropped == {"small": "one", "two": "two again"}
    assert report["skipped"] == {"image": 1} and report["without_structure"] == 2
    assert report["of_the_same_file"] == 1 and report["clusters"] == 2 and report["chains"] == 0
    assert find(run, "--exact")[1] == {"two": "two again"}
    assert find(run, "--keep", "first")[1] == {"one": "small", "two again": "two"}
    assert find(run, "--mirrored", "--no-crops")[1] == {"small": "one", "two": "two again", "mirrored": "three"}
    for name in ("sheet.png", "histogram.png"):
        assert np.asarray(Image.open(f"out/{name}")).std() > 10


def test_no_picture_is_read_twice(copies, run):
    find(run)
    files = sorted((copies / "out/hashes").iterdir())
    before = [file.stat().st_mtime_ns for file in files]
    assert len(files) == 3
    find(run, "--bits", "8")
    assert [file.stat().st_mtime_ns for file in files] == before


def test_a_changed_part_is_hashed_again(copies, run):
    find(run)
    write_part("b.gz", [row(encode(draw(9)), "new"), row(encode(draw(1)), "large"), row(encode(draw(8)), "x")])
    assert find(run)[1] == {"small": "one", "large": "one"}
    for file in (copies / "out/hashes").iterdir():
        file.write_bytes(b"torn")
    assert find(run)[1] == {"small": "one", "large": "one"}


@pytest.mark.slow
def test_processes_do_not_change_the_labels(copies, run):
    find(run)
    alone = (copies / "out/labels.parquet").read_bytes()
    run("dedup", "all.list", "--out", "other", "--workers", "2")
    assert (copies / "other/labels.parquet").read_bytes() == alone


def test_forget_takes_the_copies_out(here, run):
    for place, seed in (("x", 1), ("y", 1), ("y", 2)):
        (here / "in" / place).mkdir(parents=True, exist_ok=True)
        save_png(here / f"in/{place}/000{seed}.png", np.asarray(draw(seed)))
        (here / f"in/{place}/000{seed}.txt").write_text("long caption" if place == "y" else "short")
    run("convert", "in", "--out", "data", "--workers", "1")
    run("dedup", "data/custom.filelist", "--out", "out", "--workers", "1")
    entries = (here / "out/duplicates.jsonl").read_text()
    report = json.loads(run("forget", "data", "--entries", "out/duplicates.jsonl", "--workers", "1", "--json"))
    assert entries and report["rows_found"] == 1 and not report["not_found"]
    again = json.loads(run("dedup", "data/custom.filelist", "--out", "out", "--workers", "1", "--json"))
    assert (again["rows"], again["duplicates"]) == (2, 0) and not (here / "out/sheet.png").exists()


def test_the_page_of_a_data_set_counts_copies(copies, run):
    find(run, "--mirrored")
    flags = ("--html", "page.html", "--num-workers", "1", "--json", "--labels", "out/labels.parquet")
    found = json.loads(run("stats", "all.list", *flags))["facts"]["copies"]["picture"]
    assert found == {"rows": 8, "distinct": 5, "repeated": 3, "extra": 3, "sampled_share": 1.0}
    assert "<td>picture</td>" in (copies / "page.html").read_text()
    with pytest.raises(DataError, match="labels 9 rows of 7"):
        run("stats", "parts.filelist", *flags)
    (copies / "out/labels.parquet").write_bytes(b"torn")
    with pytest.raises(DataError, match="cannot be read as labels"):
        run("stats", "all.list", *flags)
    with pytest.raises(ConfigError, match="without --html"):
        run("stats", "all.list", *flags[-2:])


@pytest.mark.parametrize("flags", [["--bits", "17"], ["--keep", "prettiest"]])
def test_flags_are_checked_before_the_work(copies, run, flags):
    with pytest.raises(ConfigError):
        run("dedup", "all.list", "--out", "out", *flags)
    assert not (copies / "out").exists()

"""What the commands of this folder say of rows with a second image."""

import io
import json

import numpy as np
import pytest
from formats import WRITERS
from PIL import Image

from ppldm.data.control import ControlPreview, make_filter
from ppldm.data.filelist import read_sources
from ppldm.data.formats.layouts import FORMATS
from ppldm.data.formats.open import open_part
from ppldm.data.formats.row import Row
from ppldm.inspect.parts import index_parts, list_parts
from ppldm.inspect.show import read_tile
from ppldm.utils.errors import DataError


def encode(pixels) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(file, "PNG")
    return file.getvalue()


def make_rows(count):
    pixels = [np.random.default_rng(i).integers(0, 256, (30, 40, 3)) for i in range(count)]
    return [Row(f"picture {i}", encode(one), {"key": f"{i}"}, (), encode(255 - one)) for i, one in enumerate(pixels)]


def write(here, rows, format="webdataset"):
    WRITERS[format](here / "p", rows)
    (here / "p.filelist").write_text("p\n")
    (here / "p.list").write_text(f"p.filelist 2 format={format} layout=control\n")
    return here / "p.list"


@pytest.mark.parametrize("format", FORMATS)
def test_repacked_rows_keep_them_and_the_list_says_so(here, run, format):
    rows = make_rows(5)
    run("repack", write(here, rows, format), "--out", "out", "--num-workers", 1)
    assert (here / "out/repacked.filelist.list").read_text() == "0-p.filelist 2 layout=control\n"
    (source,) = read_sources(here / "out/repacked.filelist.list")
    part = open_part(source.parts[0], source)
    assert [(part.read(i).image, part.read(i).control) for i in range(5)] == [(row.image, row.control) for row in rows]


def test_a_second_image_of_a_table_that_changed_is_repacked_anew(here, run):
    rows = make_rows(3)
    file_list = write(here, rows, "csv")
    run("repack", file_list, "--out", "out", "--num-workers", 1)
    (here / "p-images/2.control.png").write_bytes(rows[0].control)
    run("repack", file_list, "--out", "out", "--num-workers", 1)
    (source,) = read_sources(here / "out/repacked.filelist.list")
    assert open_part(source.parts[0], source).read(2).control == rows[0].control


def test_they_are_verified_counted_and_shown(here, run, capsys):
    rows = make_rows(6)
    bad = [b"", encode(np.zeros((30, 30, 3))), rows[2].control[:100]]
    rows[:3] = [Row(row.caption, row.image, row.meta, (), second) for row, second in zip(rows, bad, strict=False)]
    file_list = write(here, rows)
    with pytest.raises(DataError, match="have bad rows"):
        run("verify", file_list, "--json", "--num-workers", 1)
    report = json.loads(capsys.readouterr().out)
    assert report["skipped"] == {"control": 1, "image": 1, "no_control": 1} and report["ok"] == 3
    report = json.loads(run("stats", file_list, "--json", "--num-workers", 1))
    assert report["second_images"] == 5 and report["skipped"] == {"no_control": 1} and report["control_kb"]
    text = run("stats", file_list, "--num-workers", 1)
    assert text.startswith("6 rows in 1 part(s), 5 with a second image\n") and "second image file, KB" in text
    records = [json.loads(line) for line in run("head", file_list, "--json", "-n", 4, "--num-workers", 1).splitlines()]
    assert records[0]["reason"] == "no_control" and records[3]["second_image_bytes"] == len(rows[3].control)


def test_the_preview_shows_it_beside_the_crop(here, run):
    file_list = write(here, make_rows(1), "folder")
    run("show", file_list, "--control", "row", "--resolution", 30, "--side", 60, "-n", 1, "--out", "sheet.png",
        "--num-workers", 1)  # fmt: skip
    assert Image.open(here / "sheet.png").width > 60
    indexed = index_parts(list_parts([str(file_list)]), 1)
    image, caption, _ = read_tile(indexed, 0, ControlPreview(make_filter("row"), 30, 0))
    first, second = np.split(np.asarray(image).astype(int), 2, axis=1)
    assert np.abs(255 - second - first).max() <= 1 and caption == "picture 0"

"""What is a picture, what its caption, and why not: of folders, tars and tables alike, to conversion and training."""

import io
import json
import tarfile
from pathlib import Path
from unicodedata import normalize

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from ppldm.data.filelist import Source
from ppldm.data.formats.open import open_part
from ppldm.data.images import FORMATS, decode_pixels
from ppldm.evaluation.pictures import open_pictures
from ppldm.prepare.convert.units import find_units, or_error
from ppldm.training.commands.finetune import read_pictures
from ppldm.utils.errors import RowError


def picture(format: str = "PNG", seed: int = 0) -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (2, 2, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((16, 16), Image.Resampling.NEAREST).save(file, format)
    return file.getvalue()


def write(path: Path, files: dict[str, bytes], is_tar: bool) -> Path:
    """Files in a folder, beside a good sample, or in a tar."""
    files = {**files, "zz.png": picture(), "zz.txt": b"good"}
    if not is_tar:
        path.mkdir()
        for name, content in files.items():
            (path / name).write_bytes(content)
        return path
    with tarfile.open(path.with_suffix(".tar"), "w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path.with_suffix(".tar")


def read(path: Path) -> list:
    """(caption, picture, metadata) of each row, or the error's reason and text; by conversion, and as trained on."""
    format = "folder" if path.is_dir() else {".tar": "webdataset"}.get(path.suffix, path.suffix[1:])
    part = None if format == "jsonl" else open_part(path, Source(path, (path,), format=format).without_parts())
    units = find_units(path)
    converted = [outcome(row) for unit in units for span in unit.spans(3) for _, row in unit.read(span)]
    if part is not None:
        trained = [outcome(or_error(part.read, number)) for number in range(len(part))]
        assert [one[:2] for one in converted] == [one[:2] for one in trained] or any(
            isinstance(one[0], RowError) for one in converted
        )
        assert [isinstance(one[0], str) for one in trained] == [isinstance(one[0], str) for one in converted]
    return converted


def outcome(row):
    return (row, row.reason) if isinstance(row, RowError) else (row.caption, row.image, row.meta)


KINDS = {"JPEG": ("jpg", "jpeg", "jfif"), "PNG": ("png",), "WEBP": ("webp",), "GIF": ("gif",), "BMP": ("bmp",),
         "TIFF": ("tif", "tiff"), "AVIF": ("avif",)}  # fmt: skip
SUFFIXES = [(format, one) for format in FORMATS for suffix in KINDS[format] for one in (suffix, suffix.upper())]


@pytest.mark.parametrize("is_tar", [False, True])
@pytest.mark.parametrize("format, suffix", SUFFIXES)
def test_whatever_is_decoded_is_a_picture_by_its_suffix(tmp_path, is_tar, format, suffix):
    content = picture(format)
    path = write(tmp_path / "x", {f"a.{suffix}": content, "a.txt": b"red"}, is_tar)
    assert read(path)[0][:2] == ("red", content)
    if not is_tar:
        assert (open_pictures(path)[0] == decode_pixels(content)).all() and open_pictures(path).captions[0] == "red"
        assert len(read_pictures(path, "").files) == 2


@pytest.mark.parametrize("is_tar", [False, True])
@pytest.mark.parametrize("suffix", ["heic", "HEIF", "jxl", "jp2", "svg", "NEF"])
def test_pictures_that_are_not_read_are_named_by_their_format(tmp_path, is_tar, suffix):
    path = write(tmp_path / "x", {f"a.{suffix}": b"x", "a.txt": b"red"}, is_tar)
    error, reason = read(path)[0]
    assert reason == "format" and f"is a .{suffix.lower()}, which is not read; convert it to JPEG or PNG" in str(error)
    if not is_tar:
        assert open_pictures(path).facts["skipped"] == {"image": 1}


@pytest.mark.parametrize("is_tar", [False, True])
def test_other_files_beside_a_usual_picture_change_nothing(tmp_path, is_tar):
    files = {f"a.{suffix}": b"x" for suffix in ("gif", "tif", "heic", "psd", "bmp")}
    assert read(write(tmp_path / "x", {"a.jpg": picture("JPEG"), **files, "a.txt": b"red"}, is_tar))[0][0] == "red"
    twice = {"a.gif": picture("GIF"), "a.bmp": picture("BMP"), "a.txt": b"red"}
    assert read(write(tmp_path / "y", twice, is_tar))[0][1] == "two_images"


@pytest.mark.parametrize("is_tar", [False, True])
@pytest.mark.parametrize(
    "files, caption",
    [
        ({"a.caption": b" a  red\nheart"}, "a red heart"),
        ({"a.caption": b"other", "a.txt": b"red"}, "red"),
        ({"a.json": b'{"caption": "a  red heart", "n": 1}'}, "a red heart"),
        ({"a.json": b'{"Prompt": "red", "caption": null, "title": "t"}'}, "red"),
        ({"a.json": b'{"TEXT": "red", "text": 5}'}, "red"),
        ({"a.json": b'{"caption": "other"}', "a.txt": b"red"}, "red"),
        ({"a.json": b'{"caption": " "}'}, "empty_caption"),
        ({"a.json": b'{"n": 1}'}, "no_caption"),
        ({"a.caption": b" "}, "empty_caption"),
    ],
)
def test_captions_lie_in_text_files_or_in_the_metadata(tmp_path, is_tar, files, caption):
    row = read(write(tmp_path / "x", {"a.png": picture(), **files}, is_tar))[0]
    assert (row[1] if isinstance(row[0], RowError) else row[0]) == caption
    if caption == "a red heart" and "a.json" in files:
        assert row[2] == {"key": "a", "n": 1}  # the caption does not stand there twice


@pytest.mark.parametrize("is_tar", [False, True])
@pytest.mark.parametrize("name", ["café", "Å", "が", "한"])
@pytest.mark.parametrize("forms", [("NFC", "NFD"), ("NFD", "NFC")])
def test_names_that_write_accents_in_two_ways_are_one(tmp_path, is_tar, name, forms):
    names = [normalize(form, name) for form in forms]
    path = write(tmp_path / "x", {f"{names[0]}.png": picture(), f"{names[1]}.txt": b"red"}, is_tar)
    rows = read(path)
    assert len(rows) == 2 and "red" in [row[0] for row in rows]
    if not is_tar:
        assert "red" in open_pictures(path).captions and len(read_pictures(path, "").captions) == 2


NAMES = ("/etc/passwd", "../x.png", "a/../../x.png", "..", "a/b/../../../x.png")


@pytest.mark.parametrize("table", ["metadata.jsonl", "metadata.csv"])
@pytest.mark.parametrize("name", NAMES)
def test_the_table_of_an_imagefolder_names_pictures_in_its_folder_alone(tmp_path, table, name):
    (tmp_path / "x.png").write_bytes(picture())
    folder = tmp_path / "set"
    (folder / "a").mkdir(parents=True)
    for good in ("..x.png", "a/x.png"):
        (folder / good).write_bytes(picture())
    rows = [{"file_name": one, "text": "red"} for one in (name, "..x.png", "a/x.png", "a/../..x.png")]
    if table.endswith("csv"):
        text = "".join(
            f"{row['file_name']},{row['text']}\n" for row in [{"file_name": "file_name", "text": "text"}, *rows]
        )
    else:
        text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / table).write_text(text)
    first, *others = read(folder / table)
    assert first[1] == "outside" and f"{name}, which is outside the folder of {table}" in str(first[0])
    assert [row[0] for row in others] == ["red"] * 3
    # A table of one's own may name what it likes.
    (folder / "own.csv").write_text("file_name,text\n../x.png,red\n")
    assert read(folder / "own.csv")[0][0] == "red"


@pytest.mark.parametrize(
    "image, caption", [("Image", "Text"), ("IMAGE", "CAPTION"), ("jpg", "prompt"), ("JPG", "Prompt")]
)
def test_columns_in_another_case_are_the_same(tmp_path, image, caption):
    bytes_of = [picture(seed=1), picture(seed=2)]
    pq.write_table(pa.table({image: bytes_of, caption: ["red", "blue"], "N": [1, 2]}), tmp_path / "x.parquet")
    rows = read(tmp_path / "x.parquet")
    assert [row[:2] for row in rows] == [("red", bytes_of[0]), ("blue", bytes_of[1])] and rows[0][2] == {"N": 1}
    (tmp_path / "a.png").write_bytes(bytes_of[0])
    (tmp_path / "x.csv").write_text(f"File_Name,{caption},n\na.png,007,1\n")
    (tmp_path / "x.jsonl").write_text(json.dumps({"Path": "a.png", caption: "red"}) + "\n")
    assert read(tmp_path / "x.csv")[0] == ("007", bytes_of[0], {"key": "a", "n": 1})
    assert read(tmp_path / "x.jsonl")[0][0] == "red"


def test_an_exact_name_wins_over_one_in_another_case(tmp_path):
    content = picture()
    table = pa.table({"Text": ["no"], "caption": ["yes"], "image": [content], "JPG": [b"x"]})
    pq.write_table(table, tmp_path / "x.parquet")
    assert read(tmp_path / "x.parquet")[0][:2] == ("yes", content)

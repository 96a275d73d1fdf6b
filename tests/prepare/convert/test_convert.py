"""Laws: rows in = rows out + skipped; images go through untouched; the output is a function of the input alone."""

import base64
import gzip
import hashlib
import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from filelists import read_filelist
from PIL import Image

from ppldm.data.filelist import read_filelist_list
from ppldm.data.formats.part import Part
from ppldm.data.images import crop_pixels, decode_pixels
from ppldm.prepare.convert.convert import Conversion, convert, convert_source
from ppldm.prepare.convert.reencode import Treatment
from ppldm.utils.errors import ConfigError, DataError, OutputError


def make_image(seed=0, size=(12, 9), image_format="PNG", mode="RGB", **options) -> bytes:
    shape = (size[1], size[0], len(mode)) if len(mode) > 1 else (size[1], size[0])
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels, mode).save(buffer, image_format, **options)
    return buffer.getvalue()


def make_folder(folder: Path, num_rows=7) -> Path:
    """A folder of good rows in all formats, keys 0000, 0001, ..."""
    folder.mkdir()
    for row in range(num_rows):
        suffix, image_format = (("jpg", "JPEG"), ("png", "PNG"), ("webp", "WEBP"), ("jpeg", "JPEG"))[row % 4]
        (folder / f"{row:04}.{suffix}").write_bytes(make_image(row, image_format=image_format))
        (folder / f"{row:04}.txt").write_text(f"picture {row}")
    return folder


def run(folder, out, **options) -> dict:
    return convert_source(folder, out, **{"num_workers": 1, "rows_per_part": 3} | options)


def read_output(out: Path) -> dict[str, bytes]:
    """Every file that is part of the result."""
    files = (path for path in out.rglob("*") if path.is_file() and ".convert" not in path.parts)
    return {str(path.relative_to(out)): path.read_bytes() for path in files}


def read_plainly(part: Path) -> list[tuple[str, bytes]]:
    """What any reader of the published three-column format sees."""
    with gzip.open(part, "rt", encoding="utf-8", newline="\n") as file:
        columns = [line.rstrip("\n").split("\t") for line in file]
    return [(row[0], base64.b64decode(row[2])) for row in columns]


def test_images_and_captions_come_through_both_readers_untouched(tmp_path):
    folder = make_folder(tmp_path / "in")
    manifest = run(folder, tmp_path / "out")
    expected = [
        (f"picture {row}", path.read_bytes())
        for row, path in enumerate(sorted(folder.glob("*[!t]"), key=lambda p: p.stem))
    ]
    parts = [
        part for item in read_filelist_list(tmp_path / "out/custom.filelist.list") for part in read_filelist(item.path)
    ]
    assert [row for part in parts for row in read_plainly(part)] == expected
    rows = [row for part in map(Part, parts) for row in map(part.read, range(len(part)))]
    assert [(row.caption, row.image) for row in rows] == expected
    assert [part["rows"] for part in manifest["parts"]] == [3, 3, 1]
    assert json.loads((tmp_path / "out/manifest.json").read_text()) == manifest
    for entry, part in zip(manifest["parts"], parts, strict=True):
        assert entry["bytes"] == part.stat().st_size
        assert entry["sha256"] == hashlib.sha256(part.read_bytes()).hexdigest()


def test_metadata_holds_what_is_known_of_these_bytes_and_what_the_source_says(tmp_path):
    folder = make_folder(tmp_path / "in", 1)
    source = {"url": "http://x", "key": "elsewhere", "width": 1, "original_width": 99, "similarity": 0.3}
    (folder / "0000.json").write_text(json.dumps(source))
    run(folder, tmp_path / "out")
    row = Part(tmp_path / "out/parts/part-00000.gz").read(0)
    assert row.meta == {
        "key": "0000",
        "sha256": hashlib.sha256(row.image).hexdigest(),
        "width": 12,
        "height": 9,
        "original_width": 99,
        "original_height": 9,
        "url": "http://x",
        "similarity": 0.3,
    }


def test_alpha_palette_and_exif_rotation_pass_untouched(tmp_path):
    folder = make_folder(tmp_path / "in", 0)
    exif = Image.Exif()
    exif[0x0112] = 6
    images = {
        "alpha.png": make_image(mode="RGBA"),
        "grey.png": make_image(mode="L"),
        "rotated.jpg": make_image(image_format="JPEG", exif=exif),
    }
    for name, data in images.items():
        (folder / name).write_bytes(data)
        (folder / name).with_suffix(".txt").write_text("x")
    run(folder, tmp_path / "out")
    part = Part(tmp_path / "out/parts/part-00000.gz")
    assert [part.read(row).image for row in range(3)] == list(images.values())
    assert [(part.read(row).meta["width"], part.read(row).meta["height"]) for row in range(3)] == [
        (12, 9),
        (12, 9),
        (9, 12),
    ]


def save(image: Image.Image, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG", **options)
    return buffer.getvalue()


def oriented(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def test_normalised_only_what_other_readers_would_show_otherwise_is_encoded_anew(tmp_path):
    """Other readers: Pillow's pixels, neither turned nor laid on white."""
    folder = make_folder(tmp_path / "in", 0)
    palette = Image.new("P", (12, 9))
    palette.putpalette([0, 0, 0, 200, 30, 30])
    touched = {
        "alpha.png": make_image(mode="RGBA"),
        "alpha.webp": make_image(mode="RGBA", image_format="WEBP"),
        "grey-alpha.png": make_image(mode="LA"),
        "palette.png": save(palette, transparency=0),
        "keyed.png": make_image(transparency=(1, 2, 3)),
        **{f"turned{n}.jpg": make_image(image_format="JPEG", exif=oriented(n)) for n in range(2, 9)},
        "turned.png": make_image(exif=oriented(6)),
        "grey-turned.jpg": make_image(mode="L", image_format="JPEG", exif=oriented(8)),
    }
    untouched = {
        "upright.jpg": make_image(image_format="JPEG", exif=oriented(1)),
        "plain.jpg": make_image(image_format="JPEG"),
        "grey.jpg": make_image(mode="L", image_format="JPEG"),
        "opaque-palette.png": save(palette),
        "plain.png": make_image(),
        "plain.webp": make_image(image_format="WEBP"),
        "cmyk.jpg": make_image(mode="CMYK", image_format="JPEG"),
    }
    images = touched | untouched
    for row, (name, data) in enumerate(images.items()):
        (folder / f"{row:04}{Path(name).suffix}").write_bytes(data)
        (folder / f"{row:04}.txt").write_text(name)
    convert_source(folder, tmp_path / "out", num_workers=1, treatment=Treatment(normalise=True))
    part = Part(tmp_path / "out/parts/part-00000.gz")
    rows = [part.read(row) for row in range(len(part))]
    assert {row.caption for row in rows} == images.keys()
    for row in rows:
        before = images[row.caption]
        assert (row.image == before) == (row.caption in untouched), row.caption
        with Image.open(io.BytesIO(row.image)) as opened:
            seen = np.asarray(opened.convert("RGB")).astype(int)
            assert opened.format == Image.open(io.BytesIO(before)).format
        assert seen.shape == decode_pixels(before).shape == (row.meta["height"], row.meta["width"], 3)
        assert np.abs(seen - decode_pixels(before)).mean() < (
            40 if "jpg" in row.caption or "webp" in row.caption else 1
        )


def spoil(folder: Path) -> dict[str, int]:
    """Make one row bad in each way; the counts that are due."""
    (folder / "0001.png").write_bytes(make_image(1)[:-40])
    (folder / "0002.webp").write_bytes(b"<html>404</html>")
    (folder / "0003.txt").write_text(" \n")
    (folder / "0004.txt").unlink()
    (folder / "0005.json").write_text("{")
    (folder / "0006.webp").write_bytes(make_image(image_format="PCX", mode="L"))
    (folder / "0007.jpeg").write_bytes(b"")
    (folder / "0008.png").write_bytes(make_image())
    (folder / "9999.txt").write_text("no image")
    return {"image": 4, "empty_caption": 1, "no_caption": 1, "metadata": 1, "two_images": 1, "no_image": 1}


@pytest.mark.parametrize("rows_per_part", [1, 3, 8, 100])
def test_every_row_is_accounted_for(tmp_path, rows_per_part):
    folder = make_folder(tmp_path / "in", 20)
    skipped = spoil(folder)
    manifest = run(folder, tmp_path / "out", rows_per_part=rows_per_part)
    assert manifest["skipped"] == skipped
    assert manifest["rows_in"] == 21 == manifest["rows_out"] + sum(skipped.values())
    assert manifest["rows_out"] == sum(part["rows"] for part in manifest["parts"])
    assert {reason: len(texts) for reason, texts in manifest["examples"].items()} == skipped | {"image": 3}
    found = [row for part in manifest["parts"] for row in read_plainly(tmp_path / "out" / part["path"])]
    assert [caption for caption, _ in found] == [f"picture {row}" for row in (0, *range(9, 20))]


def test_membership_is_fixed_before_skipping(tmp_path):
    good, bad = make_folder(tmp_path / "good", 9), make_folder(tmp_path / "bad", 9)
    (bad / "0001.txt").write_text("")
    run(good, tmp_path / "a")
    run(bad, tmp_path / "b")
    a, b = read_output(tmp_path / "a"), read_output(tmp_path / "b")
    same = {name for name in a if name.startswith("parts/") and a[name] == b[name]}
    assert same == {f"parts/part-0000{n}.gz{suffix}" for n in (1, 2) for suffix in ("", ".idx", ".columns")}


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [2, 3])
def test_output_is_the_same_to_the_byte_for_any_number_of_workers(tmp_path, num_workers):
    folder = make_folder(tmp_path / "in", 20)
    spoil(folder)
    run(folder, tmp_path / "one", num_workers=1)
    run(folder, tmp_path / "many", num_workers=num_workers)
    assert read_output(tmp_path / "one") == read_output(tmp_path / "many")


@pytest.mark.parametrize(
    "damage",
    [
        lambda out: (out / "parts/part-00001.gz").unlink(),
        lambda out: (out / "parts/part-00001.gz.idx").unlink(),
        lambda out: (out / "parts/part-00001.gz").write_bytes(b"half"),
        lambda out: (out / ".convert/part-00001.gz.json").unlink(),
        lambda out: (out / "manifest.json").unlink(),
        lambda out: (out / "parts/.part-00001.gz.abc.tmp").write_bytes(b"half"),
        lambda out: shutil.rmtree(out / "parts"),
    ],
)
def test_the_same_command_mends_what_is_missing_and_keeps_what_is_finished(tmp_path, damage):
    folder, out = make_folder(tmp_path / "in", 9), tmp_path / "out"
    run(folder, out)
    before = read_output(out)
    kept = out / "parts/part-00002.gz"
    inode = kept.stat().st_ino
    damage(out)
    run(folder, out)
    assert read_output(out) == before
    assert kept.stat().st_ino == inode or "rmtree" in damage.__code__.co_names


def test_a_changed_source_gives_what_a_fresh_conversion_of_it_gives(tmp_path):
    folder, out = make_folder(tmp_path / "in", 9), tmp_path / "out"
    run(folder, out)
    (folder / "0004.txt").write_text("another caption")
    for path in folder.glob("000[678].*"):
        path.unlink()
    run(folder, out)
    run(folder, tmp_path / "fresh")
    assert read_output(out) == read_output(tmp_path / "fresh")


def test_a_part_without_usable_rows_is_left_out(tmp_path):
    folder, out = make_folder(tmp_path / "in", 9), tmp_path / "out"
    run(folder, out)
    for row in (3, 4, 5):
        (folder / f"{row:04}.txt").write_text("")
    manifest = run(folder, out)
    assert [part["path"] for part in manifest["parts"]] == ["parts/part-00000.gz", "parts/part-00002.gz"]
    assert sorted(path.name for path in (out / "parts").glob("*.gz")) == ["part-00000.gz", "part-00002.gz"]
    assert run(folder, out) == manifest


def test_the_output_folder_can_be_moved(tmp_path):
    run(make_folder(tmp_path / "in"), tmp_path / "out", name="mine")
    shutil.move(tmp_path / "out", tmp_path / "elsewhere")
    (item,) = read_filelist_list(tmp_path / "elsewhere/mine.filelist.list")
    assert all(path.is_file() for path in read_filelist(item.path))


@pytest.mark.parametrize("num_bad, num_rows", [(2, 4), (3, 6), (2, 5)])
def test_exactly_half_may_be_bad(tmp_path, num_bad, num_rows):
    folder = make_folder(tmp_path / "in", num_rows)
    for row in range(num_bad):
        (folder / f"{row:04}.txt").write_text("")
    assert run(folder, tmp_path / "out")["rows_out"] == num_rows - num_bad


def test_too_many_bad_rows_are_an_error_with_an_example(tmp_path):
    folder, out = make_folder(tmp_path / "in", 4), tmp_path / "out"
    run(folder, out)
    for row in range(3):
        (folder / f"{row:04}.txt").write_text("")
    with pytest.raises(DataError, match="3 of 4 rows.*empty_caption 3, for example '0000'"):
        run(folder, out)
    assert not (out / "manifest.json").exists()


def test_a_folder_takes_one_conversion(tmp_path):
    folder, out = make_folder(tmp_path / "in"), tmp_path / "out"
    run(folder, out)
    before = read_output(out)
    for options in ({"name": "other"}, {"rows_per_part": 2}):
        with pytest.raises(ConfigError, match="holds another conversion"):
            run(folder, out, **options)
    with pytest.raises(ConfigError, match="holds another conversion"):
        run(make_folder(tmp_path / "other"), out)
    with pytest.raises(ConfigError, match="cannot read the folder .*/inn .*did you mean .*/in"):
        run(tmp_path / "inn", out)  # which is no other conversion
    assert read_output(out) == before
    shutil.rmtree(out / ".convert")
    with pytest.raises(OutputError, match="unknown origin"):
        run(folder, out)


@pytest.mark.parametrize("options", [{"name": ""}, {"name": "a/b"}, {"rows_per_part": 0}, {"num_workers": -1}])
def test_bad_options_are_named(tmp_path, options):
    with pytest.raises(ConfigError):
        run(make_folder(tmp_path / "in"), tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_dry_run_writes_nothing_and_counts_what_is_finished(tmp_path, capsys):
    folder, out = make_folder(tmp_path / "in"), tmp_path / "out"
    convert(folder, str(out), rows_per_part=3, dry_run=True)
    assert "7 rows, 3 parts, 0 of them finished" in capsys.readouterr().out
    assert not out.exists()
    run(folder, out)
    (out / "parts/part-00000.gz").unlink()
    assert Conversion(folder, out, rows_per_part=3).plan() == {"rows_in": 7, "parts": 3, "parts_finished": 2}


def test_the_command_prints_a_summary_or_the_manifest(tmp_path, capsys):
    folder, out = make_folder(tmp_path / "in", 9), tmp_path / "out"
    (folder / "0001.txt").write_text("")
    convert(folder, str(out), num_workers=1)
    text = capsys.readouterr().out
    assert "8 of 9 rows in 1 part(s)" in text
    assert "skipped, empty_caption: 1, for example '0001'" in text
    assert f"--file_list {out}/custom.filelist.list" in text
    convert(folder, str(out), num_workers=1, json=True)
    assert json.loads(capsys.readouterr().out) == json.loads((out / "manifest.json").read_text())


def photograph(suffix: str, size=(1000, 750)) -> bytes:
    """Fine and coarse structure in colour."""
    rng, width, height = np.random.default_rng(0), *size
    layers = [Image.fromarray(rng.integers(0, 256, (height // k + 1, width // k + 1, 3), dtype=np.uint8)).resize(size)
              for k in (1, 4, 30, 200)]  # fmt: skip
    pixels = sum(
        weight * np.asarray(layer, float) for weight, layer in zip((0.1, 0.15, 0.25, 0.5), layers, strict=True)
    )
    buffer = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(buffer, suffix, **({"quality": 92} if suffix == "JPEG" else {}))
    return buffer.getvalue()


def as_trained(image: bytes, side: int) -> np.ndarray:
    """The centre of a picture as training has it, float64 [3, side, side]."""
    pixels = np.empty((3, side, side), np.uint8)
    crop_pixels(decode_pixels(image), 1.0, None, "lanczos", pixels)
    return pixels.astype(float)


@pytest.mark.parametrize(("suffix", "bounds"), [("png", {128: 0, 64: 0.3, 32: 0.2}), ("jpg", {128: 6, 64: 3, 32: 2})])
def test_training_hardly_tells_a_picture_that_was_made_smaller_once(tmp_path, suffix, bounds):
    """bounds: the mean difference of what training sees at each resolution, in 255ths; 0 for what loses nothing."""
    (tmp_path / "in").mkdir()
    image = photograph({"jpg": "JPEG"}.get(suffix, suffix))
    (tmp_path / f"in/a.{suffix}").write_bytes(image)
    (tmp_path / "in/a.txt").write_text("a")
    manifest = run(tmp_path / "in", tmp_path / "out", treatment=Treatment(size=128))
    row = Part(tmp_path / "out" / manifest["parts"][0]["path"]).read(0)
    assert (
        manifest["encoded_anew"] == 1
        and Image.open(io.BytesIO(row.image)).format == {"jpg": "JPEG", "png": "PNG"}[suffix]
    )
    assert [row.meta[name] for name in ("width", "height", "original_width", "original_height")] == [
        170,
        128,
        1000,
        750,
    ]
    for side, bound in bounds.items():
        assert np.abs(as_trained(row.image, side) - as_trained(image, side)).mean() <= bound, side
    with pytest.raises((ConfigError, OutputError), match="size"):
        run(tmp_path / "in", tmp_path / "out", treatment=Treatment(size=64))
    assert "encoded_anew" not in run(tmp_path / "in", tmp_path / "out", treatment=Treatment(size=2000), redo=True)

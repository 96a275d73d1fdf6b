"""Colour profiles are ignored by every reader, and `convert` says how many pictures have one that matters."""

import io

import numpy as np
import pytest
from PIL import Image, ImageCms

from ppldm.data.images import FORMATS, decode_pixels, has_other_profile
from ppldm.prepare.convert.convert import describe, merge_records
from ppldm.prepare.convert.part_task import OTHER_PROFILES
from ppldm.prepare.provenance.forgotten import read_manifest

PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8))
PROFILES = {
    "none": None,
    "sRGB": ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes(),
    "XYZ": ImageCms.ImageCmsProfile(ImageCms.createProfile("XYZ")).tobytes(),
    "damaged": b"no profile",
}


def encode(format: str, profile: bytes | None, mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    PICTURE.convert(mode).save(file, format, **({"icc_profile": profile} if profile else {}))
    return file.getvalue()


@pytest.mark.parametrize("format", [one for one in FORMATS if one not in ("GIF", "BMP")])
@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_changes_no_pixel_and_is_seen_where_it_is_not_srgb(format, name):
    image = encode(format, PROFILES[name])
    assert has_other_profile(image) == (name in ("XYZ", "damaged"))
    assert (decode_pixels(image) == decode_pixels(encode(format, None))).all()
    for length in range(0, len(image), 97):
        has_other_profile(image[:length])  # whatever is damaged


def test_convert_counts_them(tmp_path, capsys):
    from ppldm.cli.main import run

    source = tmp_path / "pictures"
    source.mkdir()
    for number, name in enumerate(["none", "sRGB", "XYZ", "XYZ"]):
        (source / f"{number}.png").write_bytes(encode("PNG", PROFILES[name]))
        (source / f"{number}.txt").write_text("a picture")
    run(["convert", str(source), "--out", str(tmp_path / "out"), "--num-workers", "1"])
    manifest = read_manifest(tmp_path / "out")
    assert manifest["rows_out"] == 4 and manifest[OTHER_PROFILES] == 2
    said = "colour profile other than sRGB, ignored: 2 pictures"
    assert said in capsys.readouterr().out and said in describe(manifest)
    assert OTHER_PROFILES not in merge_records([], [], "x", 1)

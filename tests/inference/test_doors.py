"""Every picture that enters is read alike: for training, drawing, requests, evaluation and downloads."""

import base64
import io
from functools import partial

import numpy as np
import pytest
from PIL import Image

from ppldm.data.images import FORMATS, CropRule, decode_pixels
from ppldm.evaluation.pictures import open_pictures
from ppldm.inference.beginning import read_control, read_image, read_mask
from ppldm.inference.serving.parameters import read_picture
from ppldm.prepare.convert.reencode import Resizer
from ppldm.utils.errors import ConfigError, RowError

SIDE = 32
SIZE = (SIDE, SIDE)
MODES = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "CMYK", "YCbCr", "I;16", "I", "LAB", "HSV", "F")
# In HTTP requests, and as a list of what else Pillow writes of a mode.
SENT = ("PNG", "JPEG", "WEBP")
SAVED = {"animated": {"save_all": True, "append_images": [Image.new("RGB", SIZE, "blue")]}}


def squares(mode):
    """Four flat squares, by rows black, red, hidden green and half-transparent blue; of 16 bits four greys."""
    if mode.startswith("I") or mode == "F":
        grey = np.repeat(np.repeat([[1000, 20000], [40000, 65535]], SIDE // 2, 0), SIDE // 2, 1)
        kind = {"I;16": np.uint16, "I": np.int32, "F": np.float32}[mode]
        return Image.fromarray(grey.astype(kind))
    colours = np.uint8([[[0, 0, 0, 255], [255, 0, 0, 255]], [[0, 255, 0, 0], [0, 0, 255, 128]]])
    whole = Image.fromarray(np.repeat(np.repeat(colours, SIDE // 2, 0), SIDE // 2, 1))
    if mode == "P":
        palette = whole.convert("RGB").convert("P", palette=Image.Palette.ADAPTIVE, colors=4)
        palette.info["transparency"] = palette.getpixel((0, SIDE - 1))
        return palette
    if mode == "PA":
        return whole.convert("RGB").convert("P").convert("PA")
    if mode == "LAB":
        return Image.new("LAB", SIZE)
    if mode in ("LA", "La"):
        return whole.convert("LA").convert(mode)
    return (whole if mode in ("RGBA", "RGBa") else whole.convert("RGB")).convert(mode)


def cases():
    exif = Image.Exif()
    exif[0x0112] = 6
    for format in FORMATS:
        for mode in MODES:
            for how, options in (("plain", {}), ("turned", {"exif": exif}), *SAVED.items()):
                yield format, mode, how, options


def seen_by(door, *arguments):
    try:
        return np.asarray(door(*arguments))
    except (RowError, ConfigError):
        return None


def last(pixels):
    return None if pixels is None else np.moveaxis(pixels, 0, -1)


@pytest.mark.parametrize("format", FORMATS)
def test_all_doors_give_the_same_pixels(tmp_path, format):
    count = 0
    for _, mode, how, options in (one for one in cases() if one[0] == format):
        file = io.BytesIO()
        try:
            squares(mode).save(file, format, **options)
        except (OSError, KeyError, ValueError, TypeError, NameError, RuntimeError):
            continue  # of this mode Pillow writes no such file
        content, count = file.getvalue(), count + 1
        folder = tmp_path / f"{mode}-{how}".replace(";", "")
        folder.mkdir()
        path = folder / "x.png"  # whatever it is
        path.write_bytes(content)
        due, where = seen_by(decode_pixels, content), (format, mode, how)
        crop = CropRule(fraction=1.0, random=False, enlarge=True)
        doors = {
            "training": seen_by(crop.decode, content),
            "--image": last(seen_by(read_image, path, SIZE)),
            "--image, Pillow's": last(seen_by(read_image, Image.open(path), SIZE)),
            "--control": last(seen_by(read_control, path, 3, SIZE)),
            "evaluation": seen_by(lambda where: open_pictures(where)[0], folder) if due is not None else None,
        }
        if format in SENT:
            sent = base64.b64encode(content).decode()
            doors |= {"a request": seen_by(read_picture, sent, "image")}
        for name, pixels in doors.items():
            assert (pixels is None) == (due is None) and (due is None or (pixels == due).all()), (*where, name)
        kept = seen_by(lambda image: decode_pixels(Resizer(0, 100).fit(image)[0]), content)
        assert (kept is None) == (due is None), where
        if due is None:
            continue
        assert np.abs(kept.astype(int) - due)[4:12, 4:12].max() <= 4, where
        light = np.asarray(Image.fromarray(due).convert("L")) >= 128
        for mask in (path, Image.open(path), due):
            drawn = seen_by(read_mask, mask, SIZE)
            assert light.any() if drawn is not None else not light.any(), where
            assert drawn is None or (drawn == light).all(), where
        if mode in ("RGBA", "LA", "RGBa") and format in ("PNG", "TIFF") and how == "plain":
            assert due[SIDE - 4, 4].tolist() == [255] * 3, where  # what is hidden under nothing is white
        if (mode, how) == ("I;16", "plain") and format in ("PNG", "TIFF"):
            assert due[4, 4, 0] == 1000 >> 8, where
    assert count >= 4


@pytest.mark.parametrize("mode", MODES)
def test_a_pillow_picture_is_what_its_file_is(tmp_path, mode):
    """Or is refused, where nothing says which values are black and white."""
    picture, refused = squares(mode), mode == "F"
    found = seen_by(read_image, picture, SIZE)
    assert (found is None) == refused
    if mode in ("L", "LA", "RGB", "RGBA", "P", "1", "I;16"):
        picture.save(tmp_path / "x.png")
        assert (found == read_image(tmp_path / "x.png", SIZE)).all()
    if mode in ("La", "RGBa", "RGBA"):
        assert found[:, SIDE - 1, 0].tolist() == [255] * 3


def test_bombs_and_damage_are_one_line_at_every_door(tmp_path):
    file = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(file, "PNG")
    contents = {"bomb": file.getvalue(), "cut": file.getvalue()[:60], "text": b"hello", "nothing": b""}
    for name, content in contents.items():
        path = tmp_path / f"{name}.png"
        path.write_bytes(content)
        doors = partial(read_image, path, SIZE), partial(read_mask, path, SIZE), partial(read_control, path, 3, SIZE)
        for door in doors:
            with pytest.raises(ConfigError, match=f"{name}.png cannot be read as a picture: .*; give another"):
                door()
        with pytest.raises(ConfigError, match="image is not a PNG, JPEG or WebP file in base64"):
            read_picture(base64.b64encode(content).decode(), "image")


def test_a_control_image_of_one_channel_is_the_brightness_of_a_picture():
    grey = np.random.default_rng(0).integers(0, 256, (32, 32), dtype=np.uint8)
    (seen,) = read_control(Image.fromarray(grey), 1, SIZE)
    assert np.array_equal(seen, read_control(Image.fromarray(grey), 3, SIZE)[0])
    red = np.zeros((*SIZE, 3), np.uint8)
    red[..., 0] = 255
    assert (read_control(Image.fromarray(red), 1, SIZE) == 76).all()

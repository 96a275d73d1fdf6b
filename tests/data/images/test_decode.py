import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from ppldm.data.images import check_pixels, decode_image, decode_pixels, image_size
from ppldm.utils.errors import RowError


def encode(image, format="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


FORMAT_MODES = [(format, mode) for format in ("JPEG", "PNG", "WEBP", "GIF", "BMP") for mode in ("RGB", "L", "P", "1")]


@pytest.mark.parametrize("format, mode", [pair for pair in FORMAT_MODES if pair != ("JPEG", "P")] + [("JPEG", "CMYK")])
def test_every_format_and_mode_becomes_rgb(format, mode):
    data = encode(Image.new("RGB", (5, 4), (204, 204, 204)).convert(mode, dither=Image.Dither.NONE), format)
    decoded = decode_image(data)
    assert decoded.mode == "RGB" and decoded.size == image_size(data) == (5, 4)
    assert np.abs(np.asarray(decoded).astype(int) - (255 if mode == "1" else 204)).max() <= 2


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_transparency_shows_white(mode):
    image = Image.new("RGBA", (2, 1), (0, 0, 0, 255))
    image.putpixel((1, 0), (0, 0, 0, 0))
    assert np.asarray(decode_image(encode(image.convert(mode))))[0].tolist() == [[0, 0, 0], [255, 255, 255]]


def test_a_transparent_palette_colour_shows_white():
    image = Image.new("P", (2, 1))
    image.putpalette([0, 0, 0, 9, 9, 9])
    image.putpixel((1, 0), 1)
    assert np.asarray(decode_image(encode(image, transparency=1)))[0].tolist() == [[0, 0, 0], [255, 255, 255]]


def test_16_bit_grey_is_scaled_not_clipped():
    image = Image.fromarray(np.array([[0, 0x80FF, 0xFFFF]], dtype=np.uint16))
    assert np.asarray(decode_image(encode(image)))[0, :, 0].tolist() == [0, 0x80, 0xFF]


def test_exif_turns_the_image():
    image, exif = Image.new("RGB", (6, 4), "white"), Image.Exif()
    exif[0x0112] = 6
    data = encode(image, "JPEG", exif=exif)
    assert decode_image(data).size == image_size(data) == (4, 6)


@pytest.mark.parametrize("damage", [lambda d: b"", lambda d: b"hello", lambda d: d[: len(d) // 2], lambda d: d[:30]])
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_a_damaged_image_is_a_bad_row(make_image, damage, format):
    with pytest.raises(RowError) as caught:
        decode_image(damage(make_image(size=(64, 64), format=format)))
    assert caught.value.reason == "image"


def test_a_decompression_bomb_is_a_bad_row():
    bomb = encode(Image.new("1", (20_000, 20_000)))
    with pytest.raises(RowError) as caught:
        decode_image(bomb)
    assert caught.value.reason == "image" and image_size(bomb) == (0, 0)


@settings(deadline=None, max_examples=400)
@given(st.sampled_from(["JPEG", "PNG", "WEBP", "GIF", "BMP"]), st.data())
def test_any_bytes_are_an_image_or_a_row_error(make_image, format, data):
    image = bytearray(make_image(size=(16, 16), format=format))
    for _ in range(data.draw(st.integers(1, 4))):
        image[data.draw(st.integers(0, len(image) - 1))] = data.draw(st.integers(0, 255))
    image_size(bytes(image))
    try:
        assert decode_image(bytes(image)).mode == "RGB"
    except RowError as error:
        assert error.reason == "image"


def pixels_or_reason(decode, image):
    try:
        return np.asarray(decode(image))
    except RowError as error:
        return error.reason


def photograph(size, mode="RGB"):
    pixels = np.random.default_rng(0).integers(0, 256, (size[1] // 4 + 1, size[0] // 4 + 1, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC).convert(mode)


@pytest.mark.parametrize("size", [(1, 1), (7, 5), (64, 48), (129, 67)])
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("options", [{"subsampling": n} for n in range(3)] + [{"progressive": True}, {"quality": 20}])
def test_jpeg_pixels_are_pillows(size, mode, options):
    data = encode(photograph(size, mode), "JPEG", **options)
    pixels = decode_pixels(data)
    assert pixels.dtype == np.uint8 and pixels.shape == (size[1], size[0], 3)
    assert (pixels == np.asarray(decode_image(data))).all()


def test_jpeg_pixels_are_turned_as_exif_or_xmp_says():
    exif = Image.Exif()
    exif[0x0112] = 6
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><d tiff:Orientation="6"/></x:xmpmeta>'
    for options in ({"exif": exif}, {"xmp": xmp}):
        data = encode(photograph((32, 16)), "JPEG", **options)
        assert (
            decode_pixels(data).shape == (32, 16, 3) and (decode_pixels(data) == np.asarray(decode_image(data))).all()
        )


def test_exif_is_found_behind_whatever_segments_come_first():
    exif = Image.Exif()
    exif[0x0112] = 6
    plain, turned = (encode(photograph((32, 16)), "JPEG", exif=e) for e in (Image.Exif(), exif))
    filler = b"\xff\xed\x00\x0c" + b"\xff\xda" * 5  # a segment that holds the mark of the pixels' beginning
    assert decode_pixels(turned[:2] + filler + turned[2:]).shape == (32, 16, 3)
    assert decode_pixels(plain[:2] + filler + plain[2:]).shape == (16, 32, 3)


def test_inexact_pixels_differ_little_and_only_in_colour():
    data = encode(photograph((16, 16)).resize((129, 67), Image.Resampling.BICUBIC), "JPEG", quality=90)
    exact, pixels = decode_pixels(data).astype(int), decode_pixels(data, exact=False).astype(int)
    difference = pixels - exact
    brightness = np.abs(difference @ [0.299, 0.587, 0.114]).mean()
    assert pixels.shape == exact.shape and 0 < 4 * brightness < np.abs(difference).mean() < 8
    grey = encode(photograph((129, 67), "L"), "JPEG")
    assert (decode_pixels(grey, exact=False) == decode_pixels(grey)).all()


def test_a_huge_jpeg_is_a_bad_row(monkeypatch):
    data = encode(photograph((64, 64)), "JPEG")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    assert pixels_or_reason(decode_pixels, data) == pixels_or_reason(decode_image, data) == "image"


@settings(deadline=None, max_examples=400)
@given(st.sampled_from(["RGB", "L", "CMYK"]), st.booleans(), st.data())
def test_what_pillow_makes_of_damaged_jpeg_is_made_of_it(mode, progressive, data):
    image = bytearray(encode(photograph((40, 24), mode), "JPEG", progressive=progressive))
    for _ in range(data.draw(st.integers(0, 3))):
        image[data.draw(st.integers(0, len(image) - 1))] = data.draw(st.integers(0, 255))
    image = bytes(image[: data.draw(st.integers(0, len(image)))]) if data.draw(st.booleans()) else bytes(image)
    expected, pixels = pixels_or_reason(decode_image, image), pixels_or_reason(decode_pixels, image)
    # Pillow refuses some headers that the library under both can read.
    assert isinstance(expected, str) or (np.shape(pixels) == expected.shape and (pixels == expected).all())
    assert isinstance(pixels, np.ndarray) or pixels == "image"
    checked = pixels_or_reason(check_pixels, image)
    assert checked == pixels if isinstance(pixels, str) else checked.shape[:2] == pixels.shape[:2]

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from ppldm.data.image import decode_image, image_size
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

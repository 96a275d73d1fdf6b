"""Laws: small JPEG files untouched; everything else as training sees it, shrunk, never enlarged or padded; by the flags
of img2dataset's names what its own Resizer makes."""

import io
import time

import numpy as np
import pytest
import web
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from ppldm.data.images import FORMATS, decode_pixels, image_size
from ppldm.prepare.convert.reencode import RESIZE_MODES, Resizer
from ppldm.prepare.download.failures import classify
from ppldm.utils.errors import ConfigError, RowError


def fit(image: bytes, **options) -> tuple:
    """What `Resizer.fit` gives, and None; or five None, and why it refuses the picture."""
    try:
        return *Resizer(**options).fit(image), None
    except RowError as error:
        return *[None] * 5, str(error)


@pytest.mark.parametrize("image", [web.encode(web.picture(0)), web.turned(web.picture(1)), web.PICTURES["cmyk.jpg"]])
def test_small_jpeg_files_are_untouched(image):
    encoded, width, height, *_, message = fit(image, image_size=64)
    assert encoded == image and message is None
    assert (height, width) == decode_pixels(image).shape[:2]


@settings(deadline=None, max_examples=40)
@given(width=st.integers(1, 300), height=st.integers(1, 300), size=st.integers(8, 120))
def test_the_short_side_is_at_most_the_size_and_nothing_grows(width, height, size):
    image = web.encode(web.picture(0, (width, height)), "PNG")
    encoded, new_width, new_height, *original, message = fit(image, image_size=size)
    assert message is None and original == [width, height]
    assert Image.open(io.BytesIO(encoded)).size == (new_width, new_height)
    assert min(new_width, new_height) == min(width, height, size)
    assert abs(new_width * height - new_height * width) <= max(width, height)


@pytest.mark.parametrize("name", web.PICTURES)
def test_pixels_are_those_that_training_sees(name):
    image = web.PICTURES[name]
    encoded, *_, message = fit(image, encode_quality=100)
    assert message is None
    # The blocks have sharp edges, which JPEG blurs in colour; another frame or orientation differs by over 50.
    assert np.abs(decode_pixels(encoded).astype(int) - decode_pixels(image)).mean() < 12


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("image_format", [name for name in ("JPEG", "PNG", "WEBP", "TIFF", "AVIF") if name in FORMATS])
def test_the_size_is_that_of_the_picture_as_shown(image_format, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = web.encode(web.picture(0, (60, 40)), image_format, exif=exif)
    shown = (60, 40) if orientation < 5 else (40, 60)
    assert image_size(image) == shown
    assert decode_pixels(image).shape == (*shown[::-1], 3)
    encoded, *sizes, message = fit(image, image_size=20)
    assert message is None and tuple(sizes[2:]) == shown and Image.open(io.BytesIO(encoded)).format == "JPEG"


@pytest.mark.parametrize("dtype, top", [(np.float32, 1.0), (np.int32, 2**20), (np.int32, -5)])
def test_pixels_of_unknown_range_are_refused(dtype, top):
    image = web.encode(Image.fromarray(np.linspace(0, top, 64).reshape(8, 8).astype(dtype)), "TIFF")
    encoded, *_, message = fit(image)
    assert encoded is None and "pixel" in message and classify("failed_to_resize", message) == "decode"


def test_exif_rotation_is_applied_where_a_picture_is_encoded_again():
    source = web.picture(5, (90, 72))
    encoded, width, height, *original, _ = fit(web.turned(source), image_size=36)
    assert (width, height, *original) == (36, 45, 72, 90)
    expected = np.asarray(source.transpose(Image.Transpose.ROTATE_270).resize((36, 45), Image.Resampling.LANCZOS))
    assert np.abs(decode_pixels(encoded).astype(int) - expected).mean() < 8


def test_sixteen_bits_are_scaled_not_clipped():
    pixels = decode_pixels(fit(web.sixteen_bit())[0])
    assert pixels.min() < 5 and pixels.max() > 250 and 120 < pixels.mean() < 135


def test_no_resizing_leaves_the_size():
    image = web.encode(web.picture(0, (200, 100)))
    assert fit(image, image_size=0)[0] == image


@pytest.mark.parametrize(
    "image, options, name",
    [
        (b"<html>", {}, "decode"),
        (b"", {}, "decode"),
        (web.encode(web.picture(0, (64, 64)))[:-50], {}, "decode"),
        (web.huge_png_header(), {}, "too_large"),
        (web.encode(web.picture(0, (64, 64))), {"max_image_area": 4095}, "too_large"),
        (web.encode(web.picture(0, (64, 32))), {"min_image_size": 33}, "too_small"),
        (web.encode(web.picture(0, (64, 32))), {"max_aspect_ratio": 1.9}, "aspect"),
    ],
)
def test_what_is_left_out_says_why(image, options, name):
    *nothing, message = fit(image, **options)
    assert nothing == [None] * 5 and classify("failed_to_resize", message) == name


def test_bounds_are_inclusive():
    options = {"max_image_area": 64 * 32, "min_image_size": 32, "max_aspect_ratio": 2}
    assert fit(web.encode(web.picture(0, (64, 32))), **options)[-1] is None


def test_a_bomb_is_known_from_its_header():
    started = time.process_time()
    fit(web.huge_png_header())
    assert time.process_time() - started < 1  # decoding it would take minutes and 12 GB


MODES = {
    "resize_mode": st.sampled_from(RESIZE_MODES),
    "resize_only_if_bigger": st.booleans(),
    "image_size": st.integers(8, 80),
    "upscale_interpolation": st.sampled_from(["lanczos", "cubic", "nearest"]),
    "skip_reencode": st.booleans(),
    "encode_format": st.sampled_from(["jpg", "png"]),
    "min_image_size": st.sampled_from([0, 20]),
    "max_aspect_ratio": st.sampled_from([float("inf"), 2.0]),
}


@settings(deadline=None, max_examples=100)
@given(width=st.integers(1, 160), height=st.integers(1, 160), options=st.fixed_dictionaries(MODES))
def test_each_mode_makes_the_sides_that_its_name_says(width, height, options):
    options = options | {"min_image_size": 0, "max_aspect_ratio": float("inf"), "encode_quality": 9}
    encoded, new_width, new_height, *original, _ = fit(web.encode(web.picture(0, (width, height)), "PNG"), **options)
    assert original == [width, height] and Image.open(io.BytesIO(encoded)).size == (new_width, new_height)
    mode, size = options["resize_mode"], options["image_size"]
    side = (max if mode in ("border", "keep_ratio_largest") else min)(width, height)
    if mode == "no" or (side <= size and options["resize_only_if_bigger"]):
        assert (new_width, new_height) == (width, height)
    elif mode in ("border", "center_crop"):
        assert (new_width, new_height) == (size, size)
    else:
        assert (min if mode == "keep_ratio" else max)(new_width, new_height) == size
        assert abs(new_width - max(1, width * size / side)) < 1 and abs(new_height - max(1, height * size / side)) < 1


GREY = {
    "resize_mode": "keep_ratio", "resize_only_if_bigger": False, "image_size": 13, "upscale_interpolation": "cubic",
    "skip_reencode": False, "encode_format": "png", "min_image_size": 0, "max_aspect_ratio": float("inf"),
}  # fmt: skip


@pytest.mark.needs("resizer")
@settings(deadline=None, max_examples=200)
@example(width=1, height=23, seed=0, mode="L", options=GREY, shrunk="area")
@given(
    width=st.integers(1, 160), height=st.integers(1, 160), seed=st.integers(0, 99),
    mode=st.sampled_from(["RGB", "L", "RGBA"]), options=st.fixed_dictionaries(MODES),
    shrunk=st.sampled_from(["area", "linear", "lanczos4"]),
)  # fmt: skip
def test_pictures_are_those_of_img2dataset(width, height, seed, mode, options, shrunk):
    import albumentations
    from img2dataset import resizer

    resizer.A = albumentations  # which other tests have imported it without
    options = options | {"downscale_interpolation": shrunk, "encode_quality": 9}
    channels = {"RGB": (3,), "L": (), "RGBA": (4,)}[mode]
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, *channels), np.uint8)
    picture = Image.fromarray(pixels, mode)
    image = web.encode(picture, "PNG")
    ours, *own_sizes, own_problem = fit(image, **options)
    # OpenCV rounds one channel otherwise than three, and white is laid under by another rounding.
    for told, most in [(image, mode != "RGB"), *([(web.encode(picture.convert("RGB"), "PNG"), 0)] * (mode == "L"))]:
        theirs, *sizes, problem = resizer.Resizer(**options)(io.BytesIO(told))
        assert sizes == own_sizes and (problem is None) == (own_problem is None)
        if problem is None and options["encode_format"] == "png":
            assert np.abs(decode_pixels(ours).astype(int) - decode_pixels(theirs)).max() <= most
            assert (theirs == told) == (ours == image)


@pytest.mark.parametrize("image_format, name", [("JPEG", "jpg"), ("PNG", "png"), ("WEBP", "webp")])
def test_files_of_the_format_stay_unless_they_are_to_be_encoded(image_format, name):
    image = web.encode(web.picture(0, (40, 30)), image_format)
    options = {"encode_format": name, "encode_quality": 9}
    assert fit(image, **options)[0] == image
    encoded = fit(image, **options, skip_reencode=False)[0]
    assert encoded != image and Image.open(io.BytesIO(encoded)).format == image_format
    assert Image.open(io.BytesIO(fit(image, encode_format="webp" if name == "png" else "png", encode_quality=9)[0]))


@pytest.mark.parametrize(
    "options",
    [
        {"image_size": -1}, {"encode_quality": 101}, {"encode_quality": 10, "encode_format": "png"},
        {"resize_mode": "crop"}, {"downscale_interpolation": "best"}, {"encode_format": "gif"},
    ],
)  # fmt: skip
def test_bad_settings_are_refused(options):
    with pytest.raises(ConfigError, match="--" + next(iter(options)).replace("_", "-")):
        Resizer(**options)

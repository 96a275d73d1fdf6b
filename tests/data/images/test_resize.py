import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from ppldm.data.kernels import INTERPOLATIONS, resize_crop

FILTERS = {name: Image.Resampling[name.upper()] for name in ("lanczos", "bicubic", "bilinear")}


def resize(pixels, scaled, interpolation, left=0, top=0, shape=None):
    crop = np.empty((3, *(shape or scaled[::-1])), np.uint8)
    resize_crop(pixels, scaled, left, top, interpolation, crop)
    return crop


@settings(deadline=None, max_examples=150)
@given(st.data(), st.sampled_from(sorted(FILTERS)), *[st.integers(1, 70)] * 4)
def test_the_pixels_are_those_of_pillows_whole_image(data, interpolation, width, height, new_width, new_height):
    # Black and white overshoot, and are clipped, wherever they meet.
    values = data.draw(st.sampled_from([256, 2]))
    pixels = np.random.default_rng(data.draw(st.integers(0, 9))).integers(0, values, (height, width, 3), dtype=np.uint8)
    pixels *= 255 // (values - 1)
    shape = data.draw(st.integers(1, new_height)), data.draw(st.integers(1, new_width))
    left, top = data.draw(st.integers(0, new_width - shape[1])), data.draw(st.integers(0, new_height - shape[0]))
    whole = np.asarray(Image.fromarray(pixels).resize((new_width, new_height), FILTERS[interpolation]))
    expected = whole[top : top + shape[0], left : left + shape[1]].transpose(2, 0, 1)
    assert (resize(pixels, (new_width, new_height), interpolation, left, top, shape) == expected).all()


def mean_matrix(size, scaled):
    """Row i holds the share of each input pixel in what output pixel i covers, counted in common fractions."""
    owners = np.arange(size * scaled) // scaled
    return np.array([np.bincount(run, minlength=size) for run in owners.reshape(scaled, size)]) / size


@settings(deadline=None, max_examples=30)
@given(*[st.integers(1, 12)] * 4)
@example(12, 7, 12, 7)
def test_area_is_the_mean_of_what_is_covered(width, height, new_width, new_height):
    width, height = max(width, new_width), max(height, new_height)
    pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    expected = np.einsum(
        "yh,xw,hwc->cyx", mean_matrix(height, new_height), mean_matrix(width, new_width), pixels.astype(float)
    )
    # Columns and rows are rounded one after the other.
    assert np.abs(resize(pixels, (new_width, new_height), "area") - expected).max() < 1.01


def test_area_is_bilinear_where_it_enlarges():
    pixels = np.random.default_rng(0).integers(0, 256, (9, 7, 3), dtype=np.uint8)
    assert (resize(pixels, (20, 24), "area") == resize(pixels, (20, 24), "bilinear")).all()


@pytest.mark.parametrize("shape", [(256, 256), (320, 192), (192, 320), (77, 130)])
def test_large_rectangles_are_pillows_too(shape):
    pixels = np.random.default_rng(1).integers(0, 256, (431, 517, 3), dtype=np.uint8)
    scaled = (345, 333)
    whole = np.asarray(Image.fromarray(pixels).resize(scaled, Image.Resampling.LANCZOS))
    expected = whole[13 : 13 + shape[0], 7 : 7 + shape[1]].transpose(2, 0, 1)
    assert (resize(pixels, scaled, "lanczos", 7, 13, shape) == expected).all()


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize("value", [0, 1, 128, 255])
def test_one_colour_stays_that_colour(interpolation, value):
    pixels = np.full((40, 61, 3), value, np.uint8)
    for scaled in ((7, 7), (33, 33), (90, 90)):
        assert (resize(pixels, scaled, interpolation) == value).all()

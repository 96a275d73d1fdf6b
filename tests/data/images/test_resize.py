import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from ppldm.data.images.resize import INTERPOLATIONS, resize_crop

FILTERS = {name: Image.Resampling[name.upper()] for name in ("lanczos", "bicubic", "bilinear")}


def resize(pixels, scaled, interpolation, left=0, top=0, size=None):
    crop = np.empty((3, size or scaled[0], size or scaled[1]), np.uint8)
    resize_crop(pixels, scaled, left, top, interpolation, crop)
    return crop


@settings(deadline=None, max_examples=150)
@given(st.data(), st.sampled_from(sorted(FILTERS)), *[st.integers(1, 70)] * 4)
def test_the_pixels_are_those_of_pillows_whole_image(data, interpolation, width, height, new_width, new_height):
    # Black and white overshoot, and are clipped, wherever they meet.
    values = data.draw(st.sampled_from([256, 2]))
    pixels = np.random.default_rng(data.draw(st.integers(0, 9))).integers(0, values, (height, width, 3), dtype=np.uint8)
    pixels *= 255 // (values - 1)
    size = data.draw(st.integers(1, min(new_width, new_height)))
    left, top = data.draw(st.integers(0, new_width - size)), data.draw(st.integers(0, new_height - size))
    whole = np.asarray(Image.fromarray(pixels).resize((new_width, new_height), FILTERS[interpolation]))
    expected = whole[top : top + size, left : left + size].transpose(2, 0, 1)
    assert (resize(pixels, (new_width, new_height), interpolation, left, top, size) == expected).all()


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
    size = min(new_width, new_height)
    expected = np.einsum(
        "yh,xw,hwc->cyx", mean_matrix(height, new_height), mean_matrix(width, new_width), pixels.astype(float)
    )
    # Columns and rows are rounded one after the other.
    assert np.abs(resize(pixels, (new_width, new_height), "area", size=size) - expected[:, :size, :size]).max() < 1.01


def test_area_is_bilinear_where_it_enlarges():
    pixels = np.random.default_rng(0).integers(0, 256, (9, 7, 3), dtype=np.uint8)
    assert (resize(pixels, (20, 20), "area") == resize(pixels, (20, 20), "bilinear")).all()


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize("value", [0, 1, 128, 255])
def test_one_colour_stays_that_colour(interpolation, value):
    pixels = np.full((40, 61, 3), value, np.uint8)
    for scaled in ((7, 7), (33, 33), (90, 90)):
        assert (resize(pixels, scaled, interpolation) == value).all()

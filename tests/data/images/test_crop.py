import io
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from ppldm.data import images as transforms
from ppldm.data.images import CropRule, DrawnCrop, find_corner, scale_to_cover
from ppldm.utils.errors import ConfigError, RowError
from ppldm.utils.rng import make_rng


def crop_pixels(image, resolution, crop_fraction, random, interpolation="lanczos"):
    crop = np.empty((3, resolution, resolution), np.uint8)
    transforms.crop_pixels(np.asarray(image), crop_fraction, random, interpolation, crop)
    return crop


def smooth(width, height):
    """Something like a photograph."""
    pixels = np.random.default_rng(0).integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)


@pytest.mark.parametrize("size", [(700, 512), (512, 900), (256, 256), (284, 284), (1000, 257), (300, 299)])
@pytest.mark.parametrize("random", [(0.0, 0.0), (0.3, 0.6), (0.9999999, 0.9999999)])
def test_the_crop_is_that_of_the_whole_resized_image(size, random):
    image = smooth(*size)
    scaled = [284 * side // min(size) for side in size]
    left, top = (int(where * (side - 255)) for where, side in zip(random, scaled, strict=True))
    whole = np.asarray(image.resize(scaled, Image.Resampling.LANCZOS)).transpose(2, 0, 1)
    expected = whole[:, top : top + 256, left : left + 256]
    pixels = crop_pixels(image, 256, 0.9, random)
    assert (pixels == expected).all()


@settings(deadline=None, max_examples=300)
@given(*(st.integers(1, 3000) for _ in range(2)), *(st.integers(1, 512) for _ in range(2)), st.floats(0.3, 1))
def test_what_is_resized_covers_the_crop_and_is_not_distorted(height, width, crop_height, crop_width, fraction):
    new_width, new_height = scale_to_cover(height, width, crop_height, crop_width, fraction)
    assert new_width >= crop_width and new_height >= crop_height
    assert new_width == int(crop_width / fraction) or new_height == int(crop_height / fraction)
    # Each side is that of the other's scale, rounded by less than a pixel.
    by_width, by_height = new_width / width * height, new_height / height * width
    assert abs(by_width - new_height) < 1 or abs(by_height - new_width) < 1


@pytest.mark.parametrize("size", [(700, 512), (512, 900), (192, 128), (300, 129), (193, 1000)])
@pytest.mark.parametrize("shape", [(128, 192), (120, 56), (40, 180)])
@pytest.mark.parametrize("random", [(0.3, 0.6), (0.9999999, 0.9999999), None])
def test_a_rectangle_is_that_of_the_whole_resized_image(size, shape, random):
    image = smooth(*size)
    for interpolation, tolerance in (("lanczos", 0), ("area", 8)):
        crop = np.empty((3, *shape), np.uint8)
        transforms.crop_pixels(np.asarray(image), 0.9, random, interpolation, crop)
        scaled = scale_to_cover(*size[::-1], *shape, 0.9)
        u, v = random or (0.5, 0.5)
        left, top = int(u * (scaled[0] - shape[1] + 1)), int(v * (scaled[1] - shape[0] + 1))
        whole = np.asarray(image.resize(scaled, Image.Resampling.LANCZOS)).transpose(2, 0, 1)
        expected = whole[:, top : top + shape[0], left : left + shape[1]]
        assert np.abs(crop.astype(int) - expected).mean() <= tolerance


def test_a_small_image_is_enlarged_where_that_is_asked_for():
    image = smooth(60, 20)
    crop = np.empty((3, 80, 96), np.uint8)
    with pytest.raises(RowError, match="60 x 20 pixels, a side under 96 x 80"):
        transforms.crop_pixels(np.asarray(image), 1.0, None, "lanczos", crop)
    transforms.crop_pixels(np.asarray(image), 1.0, None, "lanczos", crop, enlarge=True)
    whole = np.asarray(image.resize((240, 80), Image.Resampling.LANCZOS)).transpose(2, 0, 1)
    assert (crop == whole[:, :, 72:168]).all()


def with_noise(width, height, left, top, side):
    """A flat picture, [height, width, 3], with a square of noise in it."""
    pixels = np.full((height, width, 3), 90, np.uint8)
    pixels[top : top + side, left : left + side] = np.random.default_rng(0).integers(0, 256, (side, side, 3))
    return pixels


@pytest.mark.parametrize(
    "size, crop", [((300, 100), (3, 50, 50)), ((100, 300), (3, 64, 48)), ((640, 480), (3, 96, 96))]
)
@pytest.mark.parametrize("fraction", [1.0, 0.7])
@pytest.mark.parametrize("where", [(0.0, 0.0), (1.0, 1.0), (0.3, 0.8)])
def test_a_smart_crop_holds_what_there_is_to_see(size, crop, fraction, where):
    width, height = size
    side = min(size) // 5
    left, top = (int(share * (one - side)) for share, one in zip(where, size, strict=True))
    pixels = with_noise(width, height, left, top, side)
    scaled = scale_to_cover(height, width, *crop[1:], fraction)
    corner = find_corner(pixels, scaled, crop)
    for share, begin, whole, new, kept in zip(corner, (left, top), size, scaled, crop[:0:-1], strict=True):
        assert 0 <= share < 1
        start = int(share * (new - kept + 1)) * whole / new
        room = 2 * max(1, min(size) // 64)  # the profile's pixels
        assert start <= begin + room and begin + side <= start + kept * whole / new + room


def test_a_smart_crop_of_nothing_to_see_is_the_centre():
    assert find_corner(np.full((90, 200, 3), 7, np.uint8), (100, 45), (3, 45, 45)) == (0.5, 0.5)


def test_a_smart_crop_draws_nothing_and_is_the_same_each_time():
    file = io.BytesIO()
    Image.fromarray(with_noise(300, 100, 250, 20, 40)).save(file, "PNG")
    rule, crop = CropRule(1.0, random=False, smart=True), np.empty((3, 50, 50), np.uint8)
    assert rule.draw(None) == DrawnCrop() and rule.kind == "smart" and rule.num_variants == 1
    rule.cut(rule.decode(file.getvalue()), DrawnCrop(), 0, crop)
    assert crop[:, :, 30:].std() > 20
    mirrored = np.empty_like(crop)
    rule.cut(rule.decode(file.getvalue()), DrawnCrop(mirrored=True), 7, mirrored)
    assert (crop[:, :, ::-1] == mirrored).all()
    with pytest.raises(ConfigError, match="choose one"):
        CropRule(smart=True)


def test_without_random_numbers_the_crop_is_the_centre():
    image = Image.new("RGB", (30, 10))
    image.paste("white", (10, 0, 20, 10))
    assert (crop_pixels(image, 10, 1.0, None) == 255).all()


def test_every_offset_can_be_drawn():
    image = Image.fromarray(np.arange(12, dtype=np.uint8)[None, :, None].repeat(10, 0).repeat(3, 2))
    lefts = {int(crop_pixels(image, 10, 1.0, (u, 0.0))[0, 0, 0]) for u in np.linspace(0, 0.9999, 50)}
    assert lefts == {0, 1, 2}


@pytest.mark.parametrize("size", [(255, 300), (300, 255), (1, 1)])
def test_a_small_image_is_a_bad_row(size):
    with pytest.raises(RowError, match="under 256") as caught:
        crop_pixels(Image.new("RGB", size), 256, 0.9, None)
    assert caught.value.reason == "too_small"


def generators(seed, epoch, row):
    return lambda stream: make_rng(seed, stream, epoch, row)


@pytest.mark.parametrize(
    "rule", [CropRule(random=False, flip=True), CropRule(num_crops=3), CropRule(num_crops=2, flip=True)]
)
def test_enumerated_crops_are_drawn_equally_often_and_lie_where_their_row_says(rule):
    drawn = [rule.draw(generators(seed, 1, 5)) for seed in range(600)]
    variants = [rule.variant(crop) for crop in drawn]
    assert rule.list_variants() == [next(c for c, v in zip(drawn, variants, strict=True) if v == n)
                                    for n in range(rule.num_variants)]  # fmt: skip
    assert np.bincount(variants).min() > 0.7 * 600 / rule.num_variants
    # Whatever the seed and the epoch, a crop of a row lies at one place; those of other crops and rows elsewhere.
    places = {(crop.number, row): rule.find_corner(crop, row) for crop in drawn for row in range(4)}
    assert all(rule.find_corner(crop, row) == places[crop.number, row] for crop in drawn for row in range(4))
    if rule.random:
        assert len({*places.values()}) == len(places) and all(0 <= x < 1 for place in places.values() for x in place)


def test_a_mirrored_crop_is_the_crop_mirrored(make_image):
    rule, image = CropRule(num_crops=2, flip=True), make_image(0, (40, 30))
    for crop in rule.list_variants():
        pixels, other = np.empty((2, 3, 16, 16), np.uint8)
        rule.cut(rule.decode(image), crop, 3, pixels)
        rule.cut(rule.decode(image), replace(crop, mirrored=not crop.mirrored), 3, other)
        assert (pixels == other[:, :, ::-1]).all() and (pixels != other).any()


def test_without_enumeration_crops_have_no_number():
    assert CropRule().num_variants == CropRule(flip=True).num_variants == 0
    assert CropRule().kind == "random" and CropRule(num_crops=4).kind == "4"
    assert CropRule(random=False, num_crops=4).kind == "center"

import numpy as np
import pytest
from PIL import Image

from ppldm.data.images import crop as transforms
from ppldm.utils.errors import RowError


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

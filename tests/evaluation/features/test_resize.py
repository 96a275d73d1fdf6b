"""Every convention equals the tool that it is named for, pixel by pixel."""

import importlib

import needs
import numpy as np
import pytest
from fidelity import torch_fidelity
from PIL import Image

from ppldm.evaluation.features.base import CONVENTIONS, find_convention
from ppldm.utils.errors import ConfigError

# (height, width): enlarged, reduced, as it is, both, and odd rests of the crop on either axis.
SIZES = [(32, 32), (299, 299), (512, 640), (700, 233), (97, 341), (225, 450), (300, 229), (224, 227), (1, 5)]


def picture(height, width):
    """Noise with black, white and hard edges, where filters overshoot."""
    pixels = np.random.default_rng(height * width).integers(0, 256, (height, width, 3), np.uint8)
    pixels[: height // 3] = 255 * (pixels[: height // 3] > 200)
    return pixels


def prepare(name, pixels, side):
    result = find_convention(name).prepare(pixels, side)
    assert result.shape == (3, side, side)
    assert result.dtype == np.float32
    return result


@pytest.fixture(scope="module")
def references():
    needs.need("parity")
    with torch_fidelity() as module:
        yield importlib.import_module("cleanfid.resize"), module("interpolate_compat_tensorflow")


@pytest.mark.parametrize("size", SIZES)
def test_those_of_inception_are_those_of_clean_fid_and_torch_fidelity(size, references):
    import torch

    clean_fid, tensorflow = references
    pixels = picture(*size)
    clean = clean_fid.build_resizer("clean")(pixels).transpose(2, 0, 1)
    assert (prepare("clean-fid", pixels, 299) == (clean - 128) / 128).all()
    legacy = clean_fid.build_resizer("legacy_pytorch")(pixels).transpose(2, 0, 1) / 255
    np.testing.assert_allclose(prepare("legacy", pixels, 299), 2 * legacy - 1, rtol=0, atol=1e-6)
    plane = torch.tensor(pixels.transpose(2, 0, 1)[None].astype(np.float32))
    shifted = tensorflow.interpolate_bilinear_2d_like_tensorflow1x(plane, (299, 299), align_corners=False)
    assert (prepare("legacy_tensorflow", pixels, 299) == ((shifted - 128) / 128).numpy()[0]).all()


@pytest.mark.parametrize("size", [size for size in SIZES if size != (1, 5)])
def test_those_of_clip_and_dinov2_are_those_of_transformers(size):
    needs.need("parity")
    from transformers import BitImageProcessor, CLIPImageProcessor

    pixels = picture(*size)
    for name, processor in (
        ("clip", CLIPImageProcessor()),
        ("dinov2", BitImageProcessor(size={"shortest_edge": 256}, crop_size=224, resample=Image.Resampling.BICUBIC,
                                     image_mean=[0.485, 0.456, 0.406], image_std=[0.229, 0.224, 0.225])),
    ):  # fmt: skip
        theirs = processor(pixels, return_tensors="np")["pixel_values"][0]
        # transformers crops half a pixel further left or up than torchvision, where the rest is 3 modulo 4.
        shorter = 224 if name == "clip" else 256
        rests = [int(shorter * length / min(size)) - 224 for length in size]
        if not any(rest % 4 == 3 for rest in rests):
            np.testing.assert_allclose(prepare(name, pixels, 224), theirs, rtol=0, atol=2e-6)


@pytest.mark.parametrize("rest, start", [(0, 0), (1, 0), (2, 1), (3, 2), (4, 2), (5, 2), (7, 4)])
def test_the_middle_is_torchvisions(rest, start):
    """int(round((longer - side) / 2)), to the even number of two."""
    pixels = np.zeros((224, 224 + rest, 3), np.uint8)
    pixels[:, start] = 255
    assert np.argmax(prepare("clip", pixels, 224)[0, 0]) == 0
    assert np.argmax(prepare("clip", pixels.transpose(1, 0, 2), 224)[0, :, 0]) == 0


@pytest.mark.parametrize("name", sorted(CONVENTIONS.keys() - {"whole"}))
def test_a_picture_of_one_colour_stays_so(name):
    for size in SIZES:
        for colour in (0, 77, 255):
            result = prepare(name, np.full((*size, 3), colour, np.uint8), 16)
            assert np.ptp(result, axis=(1, 2)).max() < 1e-6


@pytest.mark.parametrize("shape", [(8, 8), (16, 24), (80, 40)])
def test_pixels_are_means_of_areas(shape):
    pixels = picture(*shape)
    areas = pixels.reshape(8, shape[0] // 8, 8, shape[1] // 8, 3).mean((1, 3)).transpose(2, 0, 1)
    np.testing.assert_allclose(prepare("pixels", pixels, 8), areas / 255, rtol=0, atol=1e-6)


def test_an_unknown_convention_is_named():
    with pytest.raises(ConfigError, match="no convention 'clena' is known; did you mean clean"):
        find_convention("clena")

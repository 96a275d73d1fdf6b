"""Conventions: how a picture comes to the size and the numbers that a feature network takes.

Each is that of a published tool, to the pixel, for published values are comparable under the same convention only:

    clean               clean-fid's (Parmar et al. 2022, arXiv:2104.11222)
    legacy_pytorch      pytorch-fid's, and that of older PyTorch scripts: bilinear without a prefilter, so it aliases
    legacy_tensorflow   TensorFlow 1's, which the first FIDs had, and torch-fidelity's: as above, and shifted
    clip                OpenAI's for CLIP (Radford et al. 2021, arXiv:2103.00020)
    dinov2              Meta's for DINOv2 (Oquab et al. 2023, arXiv:2304.07193)
    pixels              ours, for features without a network
    whole               none: a picture as it is

A convention takes a picture, uint8 [H, W, 3], and a side, and gives float32 [3, side, side].
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from PIL import Image
from PIL.Image import Resampling

from ...utils.errors import ConfigError
from ...utils.text import did_you_mean


@dataclass(frozen=True)
class Convention:
    """`words` say what `prepare(picture, side)` does."""

    name: str
    words: str
    prepare: Callable[[np.ndarray, int], np.ndarray]


def find_convention(name: str) -> Convention:
    """The convention of this name, or of another name for it: clean-fid, legacy. Raises ConfigError."""
    own = _ALIASES.get(name, name)
    if own not in CONVENTIONS:
        raise ConfigError(f"no convention {name!r} is known; {did_you_mean(name, [*CONVENTIONS, *_ALIASES])}")
    return CONVENTIONS[own]


def _resize_channels(picture: np.ndarray, side: int, resample: Resampling) -> np.ndarray:
    """[3, side, side], Pillow's filter on float32: nothing is rounded to 8 bits."""
    channels = (Image.fromarray(channel) for channel in picture.transpose(2, 0, 1).astype(np.float32))
    return np.stack([np.asarray(channel.resize((side, side), resample)) for channel in channels])


def _bilinear(picture: np.ndarray, side: int, centre: float) -> np.ndarray:
    """[3, side, side]: between the four pixels around each position, however many lie between two positions.

    `centre`: where in a pixel its value holds, 0.5 in PyTorch and 0 in TensorFlow 1.
    """
    (top, bottom, down), (left, right, along) = (_neighbours(length, side, centre) for length in picture.shape[:2])
    planes = picture.transpose(2, 0, 1).astype(np.float32)
    rows = planes[:, :, left] + (planes[:, :, right] - planes[:, :, left]) * along
    return rows[:, top] + (rows[:, bottom] - rows[:, top]) * down[:, None]


def _neighbours(length: int, side: int, centre: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(pixel before, pixel after, distance from the one before) of each of `side` positions in `length` pixels."""
    places = (np.arange(side) + centre) * float(np.float32(length / side)) - centre
    places = np.maximum(places, 0).astype(np.float32)  # rounded where both libraries round
    before = places.astype(np.int64)
    return before, np.minimum(before + 1, length - 1), places - before.astype(np.float32)


def _resize_and_crop(picture: np.ndarray, side: int, margin: float, mean: tuple, std: tuple) -> np.ndarray:
    """The shorter side to `margin` times `side` by Pillow's bicubic filter in 8 bits, the middle of that, normalised.

    Sizes and places are rounded as torchvision does: the longer side down, the place to the nearest even number.
    """
    height, width = picture.shape[:2]
    shorter, least = round(side * margin), min(height, width)
    size = int(shorter * width / least), int(shorter * height / least)
    resized = np.asarray(Image.fromarray(picture).resize(size, Resampling.BICUBIC))
    top, left = (round((length - side) / 2) for length in resized.shape[:2])
    crop = resized[top : top + side, left : left + side].transpose(2, 0, 1).astype(np.float32) / 255
    return (crop - np.array(mean, np.float32)[:, None, None]) / np.array(std, np.float32)[:, None, None]


_OPENAI = {"mean": (0.48145466, 0.4578275, 0.40821073), "std": (0.26862954, 0.26130258, 0.27577711)}
_IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
_MARGIN = 256 / 224  # of DINOv2's crop

CONVENTIONS = {
    convention.name: convention
    for convention in (
        Convention(
            "clean",
            "Pillow's bicubic on float32 channels to {side} x {side}, not rounded; -1 .. 1 by (x - 128) / 128",
            lambda picture, side: (_resize_channels(picture, side, Resampling.BICUBIC).clip(0, 255) - 128) / 128,
        ),
        Convention(
            "legacy_pytorch",
            "bilinear without a prefilter, half-pixel centres, to {side} x {side}; -1 .. 1 by 2 x / 255 - 1",
            lambda picture, side: 2 * (_bilinear(picture, side, 0.5) / 255) - 1,
        ),
        Convention(
            "legacy_tensorflow",
            "bilinear without a prefilter, TensorFlow 1's pixel corners: {side} x {side}; -1 .. 1 by (x - 128) / 128",
            lambda picture, side: (_bilinear(picture, side, 0.0) - 128) / 128,
        ),
        Convention(
            "clip",
            "Pillow's bicubic in 8 bits, the shorter side to {side}, centre crop; OpenAI's mean and deviation",
            partial(_resize_and_crop, margin=1.0, **_OPENAI),
        ),
        Convention(
            "dinov2",
            "Pillow's bicubic in 8 bits, the shorter side to 8/7 of {side}, centre crop; ImageNet's mean and deviation",
            partial(_resize_and_crop, margin=_MARGIN, **_IMAGENET),
        ),
        Convention(
            "whole",
            "as it is; -1 .. 1 by x / 127.5 - 1",
            lambda picture, _: picture.transpose(2, 0, 1).astype(np.float32) / np.float32(127.5) - 1,
        ),
        Convention(
            "pixels",
            "means of {side} x {side} areas; 0 .. 1",
            lambda picture, side: _resize_channels(picture, side, Resampling.BOX) / 255,
        ),
    )
}
_ALIASES = {"clean-fid": "clean", "legacy": "legacy_pytorch"}

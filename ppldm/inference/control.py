"""The control image that pictures are drawn after: a picture of one's own, or what a filter makes of it."""

import io
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from ..data.control.filters import with_hole
from ..data.control.spec import apply_filter, make_filter
from ..data.images.crop import CropRule, DrawnCrop
from ..utils.errors import ConfigError, RowError
from ..utils.rng import Stream, make_rng

_WITH_HOLE = 4  # channels
_CENTRE = CropRule(fraction=1.0, random=False, enlarge=True)


def read_control(
    path, num_channels: int, size: tuple[int, int], made_by: str | None = None, seed: int = 0
) -> np.ndarray:
    """The control image, uint8 [num_channels, H, W], of `size` (H, W) in a picture's file: its centre, resized to cover
    that; or what the filter `made_by` makes of it, with draws of `seed`.

    Of four channels the last is the hole that is to be drawn: where a picture is transparent. Raises ConfigError.
    """
    try:
        image = Image.open(io.BytesIO(Path(path).read_bytes()))
        image = ImageOps.exif_transpose(image)
        has_hole, image = image.has_transparency_data, image.convert("RGBA")
        pixels = _cut(np.asarray(image.convert("RGB")), size)
    except (OSError, ValueError, SyntaxError, RowError) as error:
        raise ConfigError(f"--control {path} cannot be read as a picture: {error}; give another") from error
    if made_by:
        control = apply_filter(make_filter(made_by), pixels, make_rng(seed, Stream.CONTROL))
    elif num_channels == _WITH_HOLE and has_hole:
        alpha = np.asarray(image.getchannel("A"))
        control = with_hole(pixels, _cut(np.repeat(alpha[..., None], 3, axis=2), size)[0] < 128)
    else:
        control = pixels
    if len(control) != num_channels:
        hint = "a picture that is transparent where it is to be drawn, or " if num_channels == _WITH_HOLE else ""
        raise ConfigError(
            f"--control {path}: {len(control)} channels, and the model takes {num_channels}; give {hint}the filter "
            "that it was trained with: --control_filter"
        )
    return control


def _cut(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    found = np.empty((3, *size), np.uint8)
    _CENTRE.cut(np.ascontiguousarray(image), DrawnCrop(), 0, found)
    return found

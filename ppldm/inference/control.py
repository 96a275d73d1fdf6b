"""The control image that pictures are drawn after: a picture of one's own, or what a filter makes of it."""

import numpy as np

from ..data.control.filters import with_hole
from ..data.control.spec import apply_filter, make_filter
from ..data.images.decode import lay_on_white
from ..utils.errors import ConfigError
from ..utils.rng import Stream, make_rng
from .beginning import cut_centre, open_image

_WITH_HOLE = 4  # channels


def read_control(
    path, num_channels: int, size: tuple[int, int], made_by: str | None = None, seed: int = 0
) -> np.ndarray:
    """The control image, uint8 [num_channels, H, W], of `size` (H, W) in a picture's file: its centre, resized to cover
    that; or what the filter `made_by` makes of it, with draws of `seed`.

    Of four channels the last is the hole that is to be drawn: where a picture is transparent. Raises ConfigError.
    """
    image = open_image(path, "--control")
    pixels = cut_centre(np.asarray(lay_on_white(image)), size)
    if made_by:
        control = apply_filter(make_filter(made_by), pixels, make_rng(seed, Stream.CONTROL))
    elif num_channels == _WITH_HOLE and image.mode == "RGBA":
        alpha = np.asarray(image.getchannel("A"))
        control = with_hole(pixels, cut_centre(np.repeat(alpha[..., None], 3, axis=2), size)[0] < 128)
    else:
        control = pixels
    if len(control) != num_channels:
        hint = "a picture that is transparent where it is to be drawn, or " if num_channels == _WITH_HOLE else ""
        raise ConfigError(
            f"--control {path}: {len(control)} channels, and the model takes {num_channels}; give {hint}the filter "
            "that it was trained with: --control_filter"
        )
    return control

"""Pictures that a drawing is given, from a file, a PIL picture or an array: the one that is drawn over, the mask of
what is drawn anew, and the control image, which is a picture of one's own or what a filter makes of it."""

import numbers
from pathlib import Path
from typing import TypeAlias

import numpy as np
from PIL import Image

from ..data.control import apply_filter, make_filter, with_hole
from ..data.images import CropRule, DrawnCrop, lay_on_white, open_upright
from ..utils.errors import ConfigError, RowError
from ..utils.rng import Stream, make_rng

_WITH_HOLE = 4  # channels
Picture: TypeAlias = str | Path | Image.Image | np.ndarray
_CENTRE = CropRule(fraction=1.0, random=False, enlarge=True)
_LARGEST_SIDE, _SHOWN = 1 << 14, 60  # pixels; letters of a value in a message
_DRAWN = 128  # and lighter


def read_control(
    path, num_channels: int, size: tuple[int, int], made_by: str | None = None, seed: int = 0
) -> np.ndarray:
    """The control image, uint8 [num_channels, H, W], of `size` (H, W) in a picture's file: its centre, resized to cover
    that, of one channel its brightness; or what the filter `made_by` makes of it, with draws of `seed`. Of four
    channels the last is the hole that is to be drawn: where a picture is transparent. Raises ConfigError."""
    image = open_image(path, "--control")
    pixels = cut_centre(lay_on_white(image), size)
    if made_by:
        control = apply_filter(make_filter(made_by), pixels, make_rng(seed, Stream.CONTROL))
    elif num_channels == _WITH_HOLE and image.mode == "RGBA":
        control = with_hole(pixels, cut_centre(image.getchannel("A"), size)[0] < 128)
    elif num_channels == 1:
        control = cut_centre(lay_on_white(image).convert("L"), size)[:1]
    else:
        control = pixels
    if len(control) != num_channels:
        hint = "a picture that is transparent where it is to be drawn, or " if num_channels == _WITH_HOLE else ""
        raise ConfigError(
            f"--control {path}: {len(control)} channels, and the model takes {num_channels}; give {hint}the filter "
            "that it was trained with: --control_filter"
        )
    return control


def check_sides(**sides) -> None:
    """Raises ConfigError for sides of a picture that are not whole numbers, or too large for any machine."""
    for name, side in sides.items():
        if isinstance(side, bool) or not isinstance(side, numbers.Integral) or side > _LARGEST_SIDE:
            raise ConfigError(f"--{name} {str(side)[:_SHOWN]} must be a whole number from 1 to {_LARGEST_SIDE}")


def read_image(image: Picture, size: tuple[int, int]) -> np.ndarray:
    """uint8 [3, H, W] of `size` (H, W): the picture's centre, resized to cover that. Raises ConfigError."""
    return cut_centre(lay_on_white(open_image(image, "--image")), size)


def read_mask(mask: Picture, size: tuple[int, int]) -> np.ndarray:
    """bool [H, W], cut so: True where a picture is light, and is drawn anew; or of [H, W] bool. Raises ConfigError."""
    if isinstance(mask, np.ndarray) and mask.dtype == bool:
        mask = mask.astype(np.uint8) * 255
    drawn = cut_centre(lay_on_white(open_image(mask, "--mask")).convert("L"), size)[0] >= _DRAWN
    if not drawn.any():
        raise ConfigError("--mask is dark everywhere, so that nothing is drawn; paint white what is to be drawn anew")
    return drawn


def read_beginning(image: Picture | None, mask: Picture | None, size: tuple[int, int]) -> dict[str, np.ndarray]:
    """`image` and `mask`, as they are read, of those that are given. Raises ConfigError."""
    if mask is not None and image is None:
        raise ConfigError("--mask says what of a picture is drawn anew; give the picture too: --image")
    given = {} if image is None else {"image": read_image(image, size)}
    return given if mask is None else given | {"mask": read_mask(mask, size)}


def open_image(image: Picture, flag: str) -> Image.Image:
    """A picture as training decodes it: RGBA where it may be transparent, else RGB. Raises ConfigError."""
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim not in (2, 3) or image.shape[2:] not in ((), (3,)):
            raise ConfigError(f"{flag} is {list(image.shape)} of {image.dtype}; [H, W, 3] of uint8 is due")
        image = Image.fromarray(image)
    given = "" if isinstance(image, Image.Image) else f" {image}"
    try:
        return open_upright(Path(image).read_bytes() if given else image)
    except (OSError, TypeError, ValueError, RowError) as error:
        raise ConfigError(f"{flag}{given} cannot be read as a picture: {error}; give another") from error


def cut_centre(image: Image.Image, size: tuple[int, int]) -> np.ndarray:
    """A picture to uint8 [3, *size], as RGB. Raises ConfigError for one that cannot be resized."""
    found = np.empty((3, *size), np.uint8)
    try:
        _CENTRE.cut(np.asarray(image.convert("RGB"), order="C"), DrawnCrop(), 0, found)
    except RowError as error:
        raise ConfigError(f"a picture of {image.width} x {image.height} cannot be used: {error}") from error
    return found

"""A crop beside its control image, for people."""

from dataclasses import dataclass
from functools import cache, partial

import numpy as np
from PIL import Image

from ...utils.rng import Stream, make_rng
from ..formats.row import Row
from ..images.crop import CropRule, DrawnCrop
from ..inputs import ControlFilter
from .cut import Cut, make_control

_HOLE_COLOUR = (230, 60, 200)
_centre = cache(partial(CropRule, fraction=1.0, random=False, enlarge=True))


@dataclass(frozen=True)
class ControlPreview:
    """Of what a filter makes of the centre of pictures, `resolution` pixels a side."""

    made_by: ControlFilter
    resolution: int
    seed: int

    def draw(self, row: Row, number: int) -> Image.Image:
        """Both, side by side, of row `number` of all. Raises RowError, ConfigError."""
        image, pixels = _centre().decode(row.image), np.empty((3, self.resolution, self.resolution), np.uint8)
        cut = Cut(image.shape[:2], _centre().cut(image, DrawnCrop(), 0, pixels), mirrored=False)
        draws = make_rng(self.seed, Stream.CONTROL, row=number)
        control = make_control(self.made_by, row, pixels, cut, _centre(), draws)
        return Image.fromarray(np.concatenate([pixels.transpose(1, 2, 0), to_picture(control)], axis=1))


def to_picture(control: np.ndarray) -> np.ndarray:
    """[channels, H, W] uint8 as a picture, [H, W, 3]: of four the last as a colour over the others; else the first
    three, or the first alone in grey."""
    shown = control[np.minimum(np.arange(3), len(control) - 1)].transpose(1, 2, 0)
    if len(control) != 4:
        return shown
    return np.where(control[3][..., None] > 127, np.uint8(_HOLE_COLOUR), shown)

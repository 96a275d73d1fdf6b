"""The control image of a row's crop: made of its pixels, or cut out of the row's second image where those were."""

from dataclasses import dataclass

import numpy as np

from ...utils.errors import RowError
from ..formats.row import Row
from ..images.crop import CropRule, scale_to_cover
from ..inputs import ControlFilter
from .filters import RowImage
from .spec import apply_filter

_SHAPE_TOLERANCE = 0.02  # by which ratios of width to height may differ


@dataclass(frozen=True)
class Cut:
    """Where pixels come from. size: (height, width) of the picture; corner: (top, left) in the resized picture."""

    size: tuple[int, int]
    corner: tuple[int, int]
    mirrored: bool


def check_shape(second: tuple[int, int], first: tuple[int, int]) -> None:
    """Raises RowError "control" where a second image is of another shape than the first. Both (height, width)."""
    if abs(second[1] * first[0] / (second[0] * first[1]) - 1) > _SHAPE_TOLERANCE:
        sides = f"{second[1]} x {second[0]} pixels, another shape than {first[1]} x {first[0]}"
        raise RowError("control", f"the second image has {sides}")


def make_control(
    made_by: ControlFilter, row: Row, pixels: np.ndarray, cut: Cut, crops: CropRule, generator: np.random.Generator
) -> np.ndarray:
    """The control image, uint8 [num_channels, H, W], of the crop `pixels`, uint8 [3, H, W]. Raises RowError "control"
    for a row whose second image is not there or of another shape, and "image" where it is damaged."""
    from ..images.resize import resize_crop

    if not isinstance(made_by, RowImage):
        return apply_filter(made_by, pixels, generator)
    if not row.control:
        raise RowError("control", "the row has no second image for --control row; say layout=control of its list")
    image, (height, width) = crops.decode(row.control), cut.size
    check_shape(image.shape[:2], cut.size)
    scaled = scale_to_cover(height, width, *pixels.shape[1:], crops.fraction)  # type: ignore[call-arg]
    found, (top, left) = np.empty_like(pixels), cut.corner
    resize_crop(image, scaled, left, top, crops.interpolation, found)
    return found[:, :, ::-1] if cut.mirrored else found

"""From a decoded image to the pixels of a sample, with every random number handed in."""

import numpy as np

from ...utils.errors import RowError
from .resize import resize_crop


def crop_pixels(
    image: np.ndarray,
    crop_fraction: float,
    random: tuple[float, float] | None,
    interpolation: str,
    crop: np.ndarray,
) -> None:
    """Fill `crop`, uint8 [3, resolution, resolution], with a square of an RGB image, uint8 [height, width, 3].

    The image is resized so that its short side is int(resolution / crop_fraction), and cropped at the offset that
    `random`, two numbers of [0, 1) for x and y, chooses; in the centre where it is None. Only what the crop keeps is
    resized (`ppldm.data.images.resize`). Raises RowError "too_small" where a side is under the resolution.
    """
    height, width, _ = image.shape
    resolution = crop.shape[1]
    if min(width, height) < resolution:
        raise RowError("too_small", f"the image has {width} x {height} pixels, a side under {resolution}")
    short_side = int(resolution / crop_fraction)
    scaled = tuple(short_side * side // min(width, height) for side in (width, height))
    u, v = random or (0.5, 0.5)
    left, top = (int(where * (side - resolution + 1)) for where, side in zip((u, v), scaled, strict=True))
    resize_crop(image, scaled, left, top, interpolation, crop)

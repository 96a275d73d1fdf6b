"""From a decoded image to the pixels of a sample, with every random number handed in."""

import numpy as np
from PIL import Image

from ..utils.errors import RowError


def crop_pixels(
    image: Image.Image, resolution: int, crop_fraction: float, random: tuple[float, float] | None
) -> np.ndarray:
    """A square crop of an RGB image: uint8 [3, resolution, resolution].

    The image is resized (Lanczos) so that its short side is int(resolution / crop_fraction), and cropped at the offset
    that `random`, two numbers of [0, 1) for x and y, chooses; in the centre where it is None. Only what the crop keeps
    is resized. Raises RowError "too_small" where a side is under `resolution`.
    """
    width, height = image.size
    if min(width, height) < resolution:
        raise RowError("too_small", f"the image has {width} x {height} pixels, a side under {resolution}")
    short_side = int(resolution / crop_fraction)
    scaled = [short_side * side // min(width, height) for side in (width, height)]
    u, v = random or (0.5, 0.5)
    left, top = (int(where * (side - resolution + 1)) for where, side in zip((u, v), scaled, strict=True))
    x, y = width / scaled[0], height / scaled[1]
    box = (left * x, top * y, min((left + resolution) * x, width), min((top + resolution) * y, height))
    cropped = image.resize((resolution, resolution), Image.Resampling.LANCZOS, box=box)
    return np.ascontiguousarray(np.asarray(cropped).transpose(2, 0, 1))

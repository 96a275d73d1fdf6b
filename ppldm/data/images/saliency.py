"""Where in a picture there is something to see: the crop that has most edges, for `--smart_crop`.

The energy of a pixel is |dI/dx| + |dI/dy|, I its brightness (e1 of Avidan and Shamir, "Seam Carving for Content-Aware
Image Resizing", 2007). It is taken of the picture shrunk to about 64 pixels, summed over columns and over rows, and
along each axis the crop lies where its window holds most of it; of equals nearest to the middle. In whole numbers, so
that it is the same everywhere.
"""

import numpy as np
from PIL import Image

_SIDE = 64  # pixels, about, of the shorter side that is looked at
_BELOW_1 = 1 - 2**-53


def find_corner(pixels: np.ndarray, scaled: tuple[int, int], crop: tuple[int, int, int]) -> tuple[float, float]:
    """Two numbers of [0, 1) for x and y, as those that draw a crop, of an RGB image, uint8 [height, width, 3], that is
    resized to `scaled`, (width, height), and cropped to `crop`, (3, H, W)."""
    shrink = max(1, min(pixels.shape[:2]) // _SIDE)
    light = np.asarray(Image.fromarray(pixels).convert("L").reduce(shrink), np.int32)
    energy = np.zeros_like(light)
    energy[:, 1:] += np.abs(np.diff(light, axis=1))
    energy[1:] += np.abs(np.diff(light, axis=0))
    return _find_window(energy.sum(axis=0), crop[2] / scaled[0]), _find_window(energy.sum(axis=1), crop[1] / scaled[1])


def _find_window(profile: np.ndarray, share: float) -> float:
    """Where in [0, 1) the window of `share` of a profile begins, among all places that it can have."""
    length = min(max(1, round(len(profile) * share)), len(profile))
    sums = np.cumsum(np.concatenate([[0], profile]))
    windows = sums[length:] - sums[:-length]
    if len(windows) == 1:
        return 0.5
    best = np.flatnonzero(windows == windows.max())
    middle = (len(windows) - 1) / 2
    return min(float(best[np.argmin(np.abs(best - middle))] / (len(windows) - 1)), _BELOW_1)

"""What latents look like, without decoding them: a linear map from latents to colours, fitted to the decoder once.

A decoder makes of each place of the latents f x f pixels, by that place and its neighbours; the mean colours of the
four quarters are nearly a linear function of the 3 x 3 places around. So the map is fitted by least squares to what the
decoder makes of random latents, coarse and fine, and costs a matrix product for each preview. docs/drawing.md says how
near it comes.
"""

from collections.abc import Callable

import numpy as np

from ...utils.rng import Stream, make_rng

_SIDE, _PROBES = 16, 8  # of the latents that are decoded; their number
_PATCHES = (2, 4, 8)  # sides of the patches of one value of which they are the sum: surfaces, edges, details


class Preview:
    """The map of one decoder. decode: latents [B, C, h, w] float32 to pictures [B, f h, f w, 3] uint8."""

    def __init__(self, decode: Callable[[np.ndarray], np.ndarray], channels: int):
        rng = make_rng(0, Stream.SAMPLE)
        latents = np.zeros((_PROBES, channels, _SIDE, _SIDE), np.float32)
        for side in _PATCHES:
            shape = (_PROBES, channels, _SIDE // side, _SIDE // side)
            latents += rng.standard_normal(shape, dtype=np.float32).repeat(side, axis=2).repeat(side, axis=3)
        latents /= np.float32(len(_PATCHES) ** 0.5)
        pictures = decode(latents)
        factor = pictures.shape[1] // _SIDE
        self.fine = 2 if factor % 2 == 0 else 1  # pixels of a preview along a side of a place
        cells = pictures.reshape(_PROBES, _SIDE, self.fine, factor // self.fine, _SIDE, self.fine, -1, 3)
        colours = cells.mean(axis=(3, 6), dtype=np.float32).transpose(0, 1, 3, 2, 4, 5)
        self.matrix = np.linalg.lstsq(_surroundings(latents), colours.reshape(-1, 3 * self.fine**2), rcond=None)[0]

    def __call__(self, latents: np.ndarray) -> np.ndarray:
        """Latents [B, C, h, w], of any scale, as one small picture uint8 [k h, B k w, 3], where k is `fine`: they stand
        side by side.

        Latents on their way hold noise of some other size, so each is brought to the variance of the last ones, 1.
        """
        latents = np.asarray(latents, np.float32)
        latents = latents / np.maximum(latents.std(axis=(1, 2, 3), keepdims=True), 1e-6)
        (count, _, height, width), fine = latents.shape, self.fine
        colours = _surroundings(latents) @ self.matrix
        shown = np.clip(np.rint(np.nan_to_num(colours)), 0, 255).astype(np.uint8)
        cells = shown.reshape(count, height, width, fine, fine, 3).transpose(1, 3, 0, 2, 4, 5)
        return np.ascontiguousarray(cells).reshape(fine * height, count * fine * width, 3)


def _surroundings(latents: np.ndarray) -> np.ndarray:
    """[B h w, 9 C + 1]: the values of each place and of its neighbours, the border repeated, and 1."""
    height, width = latents.shape[2:]
    padded = np.pad(latents, ((0, 0), (0, 0), (1, 1), (1, 1)), mode="edge")
    around = [padded[:, :, top : top + height, left : left + width] for top in range(3) for left in range(3)]
    places = np.moveaxis(np.concatenate(around, axis=1), 1, -1).reshape(-1, 9 * latents.shape[1])
    return np.concatenate([places, np.ones((len(places), 1), np.float32)], axis=1)

"""What latents look like, without decoding them: a linear map from latents to colours, fitted to the decoder once.

A decoder makes of each place of the latents f x f pixels; their mean colour is nearly a linear function of that place
where its surroundings are alike. So the map is fitted by least squares to what the decoder makes of plain patches of
random values, and costs a matrix product for each preview.
"""

from collections.abc import Callable

import numpy as np

from ...utils.rng import Stream, make_rng

_PATCH, _PATCHES, _PROBES = 4, 4, 4  # side of a patch in latents, patches along a side, latents that are decoded


class Preview:
    """The map of one decoder. decode: latents [B, C, h, w] float32 to pictures [B, f h, f w, 3] uint8."""

    def __init__(self, decode: Callable[[np.ndarray], np.ndarray], channels: int):
        rng = make_rng(0, Stream.SAMPLE)
        values = rng.standard_normal((_PROBES, channels, _PATCHES, _PATCHES), dtype=np.float32)
        latents = values.repeat(_PATCH, axis=2).repeat(_PATCH, axis=3)
        pictures = decode(latents)
        side = _PATCH * _PATCHES
        factor = pictures.shape[1] // side
        colours = pictures.reshape(_PROBES, side, factor, side, factor, 3).mean(axis=(2, 4), dtype=np.float32)
        self.matrix = np.linalg.lstsq(_with_one(latents), colours.reshape(-1, 3), rcond=None)[0]

    def __call__(self, latents: np.ndarray) -> np.ndarray:
        """Latents [B, C, h, w], of any scale, as one small picture [h, B w, 3] uint8: they stand side by side.

        Latents on their way hold noise of some other size, so each is brought to the variance of the last ones, 1.
        """
        latents = np.asarray(latents, np.float32)
        latents = latents / np.maximum(latents.std(axis=(1, 2, 3), keepdims=True), 1e-6)
        colours = _with_one(latents) @ self.matrix
        shown = np.clip(np.rint(np.nan_to_num(colours)), 0, 255).astype(np.uint8)
        return np.concatenate(list(shown.reshape(len(latents), *latents.shape[2:], 3)), axis=1)


def _with_one(latents: np.ndarray) -> np.ndarray:
    """[B h w, C + 1]: the values of each place, and 1."""
    places = np.moveaxis(latents, 1, -1).reshape(-1, latents.shape[1])
    return np.concatenate([places, np.ones((len(places), 1), np.float32)], axis=1)

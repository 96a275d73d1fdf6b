"""LPIPS on VGG16 (`ppldm.networks.losses`), which compares pictures of one size as they are."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import paddle

from ...weights.losses import load_lpips
from .base import BATCH_SIZE, layer_digest
from .resize import Convention


class PairNetwork:
    """Distances of pictures, uint8 [H, W, 3], pair by pair. `digest`: of the weights, as of a `FeatureNetwork`."""

    def __init__(self, layer, convention: Convention):
        self.digest, self.convention = layer_digest(layer), f"{convention.name}: {convention.words}"
        self._layer, self._prepare = layer, convention.prepare

    @paddle.no_grad()
    def distances(self, generated: Sequence[np.ndarray], real: Sequence[np.ndarray]) -> np.ndarray:
        """[N] float64."""
        found = []
        for start in range(0, len(real), BATCH_SIZE):
            numbers = range(start, min(start + BATCH_SIZE, len(real)))
            sides = (np.stack([self._prepare(pictures[i], 0) for i in numbers]) for pictures in (generated, real))
            found.append(self._layer(*map(paddle.to_tensor, sides)).numpy())
        return np.concatenate(found).astype(np.float64)


def load(path: Path, convention: Convention) -> PairNetwork:
    """LPIPS with the weights at `path`. Raises ModelError."""
    return PairNetwork(load_lpips(path), convention)

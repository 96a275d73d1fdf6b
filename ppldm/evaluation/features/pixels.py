"""A picture's own colours, without any network: averaged to 8 x 8 pixels, 192 numbers in 0 .. 1.

Distances on them see colours, brightness and rough layout only, and are comparable with no published number. They let
every metric on features be computed where no weights are at hand.
"""

import numpy as np

from .base import FeatureNetwork
from .resize import Convention

SIDE = 8


def load(convention: Convention) -> FeatureNetwork:
    """The features that need no weights."""
    return FeatureNetwork("pixels", 3 * SIDE * SIDE, "", convention, SIDE, _flatten)


def _flatten(batch: np.ndarray) -> np.ndarray:
    return batch.reshape(len(batch), -1)

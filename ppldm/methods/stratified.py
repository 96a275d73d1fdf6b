"""Levels that are spread evenly over an update (`--stratified_timesteps`).

    of B samples of an update one in each of B equal parts of the levels, all shifted alike

Kingma et al. 2021 (arXiv:2107.00630, appendix I.1). Neighbours are a golden section of the batch apart, so that a part
of it is spread too. Published: a steadier loss, no figure of pictures."""

import math

import numpy as np

_GOLDEN = (math.sqrt(5) - 1) / 2


def spread(first: int, count: int, size: int, shift: float) -> np.ndarray:
    """u [count] float64 in [0, 1) of the places from `first` on among the `size` samples of an update."""
    stride = max(1, round(size * _GOLDEN))
    while math.gcd(stride, size) != 1:
        stride += 1
    places = np.arange(first, first + count) * stride % size
    return np.minimum((places + shift) / size, np.nextafter(1.0, 0.0))

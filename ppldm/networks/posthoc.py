"""Averages of weights that are made after the training, from snapshots of a few that were tracked.

The average of relative standard deviation s (EDM2: Karras et al. 2023, arXiv:2312.02696, section 3.1) after n updates
weights them by the profile p(t) = (g + 1) t^g / n^(g + 1) on 0 .. n, whose standard deviation is s n. Update k has the
profile's integral over k - 1 .. k, (k^(g + 1) - (k - 1)^(g + 1)) / n^(g + 1), and the weights before the first update
have no share. `power_decay` tracks it to the letter.

Any other profile is put together from those of the snapshots by least squares (appendix C of the same), here under the
condition that the coefficients add up to 1: weights that never change come out as they are, however small the rest.
"""

from functools import cache

import numpy as np

from ..config.training import LARGEST_STD

_GRID = np.round(np.arange(0.01, LARGEST_STD + 0.001, 0.005), 3)


@cache
def exponent_of(std: float) -> float:
    """The g of a relative standard deviation in 0 < std <= LARGEST_STD, from std^2 = (g + 1) / ((g + 2)^2 (g + 3))."""
    inverse = std**-2
    roots = np.roots([1, 7, 16 - inverse, 12 - inverse])
    return float(max(roots.real[np.abs(roots.imag) < 1e-6 * np.abs(roots)]))


def power_decay(std: float, update: int) -> float:
    """The decay of the `update`-th update, counted from 1, by which the average of `std` is tracked."""
    return (1 - 1 / update) ** (exponent_of(std) + 1)


def combine(stored: list[tuple[float, int]], wanted: list[tuple[float, int]]) -> tuple[np.ndarray, np.ndarray]:
    """(coefficients [len(stored), len(wanted)] float64, whose columns each add up to 1; errors [len(wanted)]).

    stored, wanted: (standard deviation, number of updates) of each snapshot, and of each average to make. error: the L2
    norm of what the profile is off, by that of the profile itself; of weights that vary independently around a mean, it
    is how far their average is off, by how far an average is from the mean.
    """
    powers, ends = np.array([(exponent_of(std), end) for std, end in [*stored, *wanted]], np.float64).T
    inner, count = _inner(powers, ends), len(stored)
    scale = np.sqrt(np.diag(inner))
    inner /= np.outer(scale, scale)
    own, new = scale[:count].min() / scale[:count], scale[:count].min() / scale[count:]
    system = np.block([[inner[:count, :count], own[:, None]], [own, np.zeros(1)]])  # own: that they add up to 1
    found = np.linalg.lstsq(system, np.vstack([inner[:count, count:], new]), rcond=None)[0][:count]
    squares = 1 + np.sum(found * (inner[:count, :count] @ found - 2 * inner[:count, count:]), axis=0)
    return found * own[:, None] / new, np.sqrt(np.maximum(squares, 0))


def makeable(stored: list[tuple[float, int]], num_updates: int, worst: float) -> list[float]:
    """Of standard deviations from 0.01 up, in steps of 0.005, those whose error is `worst` or less."""
    _, errors = combine(stored, [(std, num_updates) for std in _GRID])
    return [float(std) for std, error in zip(_GRID, errors, strict=True) if error <= worst]


def _inner(powers: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The integrals of p_i p_j over 0 .. min(n_i, n_j), [len(powers), len(powers)]."""
    one, other = powers[:, None] + 1, powers + 1
    log_end, sums = np.log(ends), one + other - 1
    shared = np.minimum(log_end[:, None], log_end)
    return one * other / sums * np.exp(sums * shared - one * log_end[:, None] - other * log_end)

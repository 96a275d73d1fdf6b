"""Sliced Wasserstein distance: the mean over directions of the W1 distance of what two sets project to.

In one dimension W1 is the area between the two distribution functions (Rabin et al. 2011; Bonneel et al. 2015), the
mean distance of sorted values where both sets are of one length. It needs no covariance, and so few samples. Terms: a
value x of the first set adds the area to its left where the second function is above, less that where it is below.
Directions are drawn from the seed; two results of one seed were seen from the same ones.
"""

import numpy as np

from ...utils.rng import Stream, make_rng
from .bootstrap import Measured, measure

DIRECTIONS = 512
_AT_ONCE = 16


def sliced_wasserstein(generated: np.ndarray, real: np.ndarray, *, seed: int) -> Measured:
    """Of features [N, D] and [M, D], in their unit, over 512 directions."""
    distances, terms, _ = sliced_distances(generated, real, seed)
    return measure(distances.mean(), *terms, seed=seed, bounds=(0, np.inf))


def sliced_distances(
    left: np.ndarray, right: np.ndarray, seed: int, groups: int = 0
) -> tuple[np.ndarray, list[np.ndarray], np.ndarray]:
    """(W1 in each direction [512], mean terms of both sets [N] and [M], slopes [2, groups, 2]).

    groups: that the D numbers belong to in turn, as colours of pixels. The slopes say, of each set, how the mean W1
    changes as a group is shifted, and as it is stretched.
    """
    directions = make_rng(seed, Stream.EVALUATION, 1).standard_normal((DIRECTIONS, left.shape[1]))
    directions = (directions / np.linalg.norm(directions, axis=1, keepdims=True)).astype(np.float32).T
    distances, terms = np.empty(DIRECTIONS), [np.zeros(len(left)), np.zeros(len(right))]
    changes = np.zeros((2, groups, 2))
    for start in range(0, DIRECTIONS, _AT_ONCE):
        some, slopes = directions[:, start : start + _AT_ONCE], ([], [])
        for number, (first, second) in enumerate(zip((left @ some).T, (right @ some).T, strict=True), start):
            distances[number], own, own_slopes = _wasserstein(first, second)
            for total, more in zip(terms, own, strict=True):
                total += more / DIRECTIONS
            for several, more in zip(slopes, own_slopes, strict=True):
                several.append(more)
        for group in range(groups):
            weights = some[group::groups]
            for rows, several, change in zip((left, right), slopes, changes, strict=True):
                slope, along = np.array(several).T / (len(rows) * DIRECTIONS), rows[:, group::groups] @ weights
                change[group] += slope.sum(axis=0) @ weights.sum(axis=0), np.sum(slope * along)
    return distances, terms, changes


def _wasserstein(left: np.ndarray, right: np.ndarray) -> tuple[float, list[np.ndarray], list[np.ndarray]]:
    """W1 of two sets of numbers, their terms, and the slopes of these."""
    values = np.concatenate([left, right]).astype(np.float64)
    order = np.argsort(values, kind="stable")
    steps = np.diff(values[order])
    weights = np.concatenate([np.full(len(left), 1 / len(left)), np.full(len(right), -1 / len(right))])
    ahead = np.cumsum(weights[order])[:-1]  # between two values: the first distribution function less the second
    ahead[np.abs(ahead) < 1e-12] = 0
    terms = np.empty(len(values))
    terms[order] = np.concatenate([[0], np.cumsum(-np.sign(ahead) * steps)])
    around = -np.sign(np.concatenate([[0], ahead, [0]]))  # left and right of a value, where the slope may jump
    slopes = np.empty(len(values))
    slopes[order] = (around[:-1] + around[1:]) / 2
    both_terms, both_slopes = ([one[: len(left)], -one[len(left) :]] for one in (terms, slopes))
    return float(np.abs(ahead) @ steps), both_terms, both_slopes

"""Sliced Wasserstein distance: the mean over directions of the W1 distance of what two sets project to; and the same
between patches of Laplacian pyramids: do structures of each size look alike?

In one dimension W1 is the area between the two distribution functions (Rabin et al. 2011; Bonneel et al. 2015), the
mean distance of sorted values where both sets are of one length. It needs no covariance, and so few samples. Terms: a
value x of the first set adds the area to its left where the second function is above, less that where it is below.
Directions are drawn from the seed; two results of one seed were seen from the same ones.

Of pyramids (Karras et al. 2018, arXiv:1710.10196, section 5): levels from the pictures' own size down to 16 pixels; of
each picture 128 patches of 7 x 7 pixels a level; each set's patches brought to mean 0 and deviation 1 in every channel;
the sliced Wasserstein distance over 512 directions, times 1000. Pictures are what was drawn independently, so a
picture's term is the mean of its patches', less what the picture adds by way of its set's mean and deviation, to which
all patches are brought: z of a channel moves that mean by z and that deviation by (z² - 1) / 2.
"""

from collections.abc import Sequence

import numpy as np
from scipy.ndimage import correlate1d

from ...utils.errors import DataError
from ...utils.rng import Stream, make_rng
from .bootstrap import Measured, measure

DIRECTIONS = 512
_AT_ONCE = 16
PATCHES, PATCH, LEAST, SCALE, CHANNELS = 128, 7, 16, 1000.0, 3
MOST_PICTURES = 16_384  # as published; of more, so many are taken evenly
_BINOMIAL = np.array([1, 4, 6, 4, 1], np.float32) / 16


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


def pyramid_distance(generated: Sequence[np.ndarray], real: Sequence[np.ndarray], *, seed: int) -> Measured:
    """Mean over levels. details: the value of each level by its shorter side. Raises DataError where sizes differ, or a
    side is under 16 pixels."""
    shape = _check_sizes(generated, real)
    values, terms, details = [], [0.0, 0.0], {}
    for level in range(levels := int(np.log2(min(shape[:2]) / LEAST)) + 1):
        patches = [_describe(pictures, level, seed) for pictures in (generated, real)]
        distances, own, slopes = sliced_distances(*patches, seed, CHANNELS)  # type: ignore[call-arg]
        values.append(SCALE * distances.mean())
        details[str(-(-min(shape[:2]) // 2**level))] = values[-1]
        for number, (more, rows, change) in enumerate(zip(own, patches, slopes, strict=True)):
            of_patches = more - _by_normalising(rows, change)
            terms[number] = terms[number] + SCALE / levels * of_patches.reshape(-1, PATCHES).mean(axis=1)
    return measure(np.mean(values), *terms, seed=seed, details=details, bounds=(0, np.inf))


def _by_normalising(patches: np.ndarray, change: np.ndarray) -> np.ndarray:
    """What each of the patches [n, 147] adds by way of the mean and deviation of each channel; see the module."""
    added = np.zeros(len(patches))
    for channel, (shift, stretch) in enumerate(change):
        own = patches[:, channel::CHANNELS].astype(np.float64)
        added += shift * own.mean(axis=1) + stretch * (np.mean(own**2, axis=1) - 1) / 2
    return added


def _check_sizes(generated: Sequence[np.ndarray], real: Sequence[np.ndarray]) -> tuple[int, ...]:
    shape = generated[0].shape
    if shape != real[0].shape:
        sizes = " and ".join(f"{width} x {height}" for height, width, _ in (shape, real[0].shape))
        raise DataError(f"swd compares pictures of one size, and these are {sizes}; give --resolution")
    if min(shape[:2]) < LEAST:
        raise DataError(f"swd compares pictures of {LEAST} pixels and more, and these are {shape[1]} x {shape[0]}")
    return shape


def _describe(pictures: Sequence[np.ndarray], level: int, seed: int) -> np.ndarray:
    """Patches of one level of all pictures, normalised: float32 [N · 128, 147]."""
    numbers = np.linspace(0, len(pictures) - 1, min(len(pictures), MOST_PICTURES)).round().astype(int)
    patches = np.empty((len(numbers), PATCHES, PATCH, PATCH, 3), np.float32)
    size = None
    for place, number in enumerate(numbers):
        picture = pictures[number]
        if picture.shape != (size := size or picture.shape):
            raise DataError(f"swd compares pictures of one size, and number {number} is of another; give --resolution")
        band = laplacian(picture.astype(np.float32), level)
        windows = np.lib.stride_tricks.sliding_window_view(band, (PATCH, PATCH), axis=(0, 1))  # type: ignore[call-overload]
        rng = make_rng(seed, Stream.EVALUATION, 2 + level, place)
        tops, lefts = (rng.integers(side, size=PATCHES) for side in windows.shape[:2])
        patches[place] = windows[tops, lefts].transpose(0, 2, 3, 1)
    deviation = patches.std(axis=(0, 1, 2, 3), dtype=np.float64)
    patches -= patches.mean(axis=(0, 1, 2, 3), dtype=np.float64).astype(np.float32)
    patches /= np.where(deviation > 0, deviation, 1).astype(np.float32)
    return patches.reshape(len(numbers) * PATCHES, -1)


def laplacian(picture: np.ndarray, level: int) -> np.ndarray:
    """A level of the Laplacian pyramid of float32 [H, W, C], its sides halved `level` times. The last level too is a
    band there is a smaller picture under, unless its shorter side would be below 16: that one is the picture itself."""
    for _ in range(level):
        picture = _blur(picture)[::2, ::2]
    if min(picture.shape[:2]) < 2 * LEAST:
        return picture
    raised = np.zeros_like(picture)
    raised[::2, ::2] = _blur(picture)[::2, ::2]
    return picture - 4 * _blur(raised)


def _blur(picture: np.ndarray) -> np.ndarray:
    return correlate1d(correlate1d(picture, _BINOMIAL, axis=0, mode="mirror"), _BINOMIAL, axis=1, mode="mirror")

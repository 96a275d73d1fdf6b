"""How much of one set lies in the manifold of the other: precision and recall, density and coverage.

The manifold of a set is the union of balls around its members, each with the distance to the member's k-th neighbour as
its radius. Terms of the members are the pseudo-values of the jackknife: without a member its ball is missing, and every
ball whose radius it helped to set reaches to the next neighbour. All of them come out of one pass over the distances.

The variance of these terms is too large: what j members do only together counts j times in it (Efron and Stein 1981,
doi:10.1214/aos/1176345462), and here much is done together, so that the intervals were 1.3 to 1.6 times as wide as they
should be. Of the values of random subsets, a share f of both sets, it counts (1 - f^j) / (1 - f) times, at most 4 / 3
for the quarters that are taken. So the terms are scaled down to the variance that the subsets show.
"""

from collections.abc import Callable

import numpy as np

from ...utils.rng import Stream, make_rng
from .bootstrap import Measured, measure
from .distances import nearest, squared_distances

SHARE = (0, 1)
SUBSETS, SUBSET_SHARE = 64, 0.25
_MOST_IN_SUBSET = 4096


def precision(generated: np.ndarray, real: np.ndarray, *, seed: int, k: int) -> Measured:
    """The share of the generated pictures in the manifold of the real ones (Kynkäänniemi et al. 2019,
    arXiv:1904.06991)."""
    return _measure(count_precision, generated, real, seed, k, SHARE)


def recall(generated: np.ndarray, real: np.ndarray, *, seed: int, k: int) -> Measured:
    """The share of the real pictures in the manifold of the generated ones (the same)."""
    return _measure(count_recall, generated, real, seed, k, SHARE)


def density(generated: np.ndarray, real: np.ndarray, *, seed: int, k: int) -> Measured:
    """In how many balls of real pictures a generated one lies, by k (Naeem et al. 2020, arXiv:2002.09797); 1 is
    expected of equal distributions, more is possible."""
    return _measure(count_density, generated, real, seed, k, (0, np.inf))


def coverage(generated: np.ndarray, real: np.ndarray, *, seed: int, k: int) -> Measured:
    """The share of the real pictures whose ball holds a generated one (the same)."""
    return _measure(count_coverage, generated, real, seed, k, SHARE)


def _measure(compute: Callable, generated: np.ndarray, real: np.ndarray, seed: int, k: int, bounds) -> Measured:
    value, *terms = compute(generated, real, k)
    expected = sum(np.var(own, ddof=1) / len(own) for own in terms)
    share = min(SUBSET_SHARE, _MOST_IN_SUBSET / max(len(generated), len(real)))
    if expected > 0 and share * min(len(generated), len(real)) >= k + 2:
        values = []
        for number in range(SUBSETS):
            rng = make_rng(seed, Stream.EVALUATION, 1, 1 + number)
            some = (rows[rng.permutation(len(rows))[: int(share * len(rows))]] for rows in (generated, real))
            values.append(compute(*some, k)[0])
        shown = np.var(values, ddof=1) * share / (1 - share)
        terms = [own * min(1.0, np.sqrt(shown / expected)) for own in terms]
    return measure(value, *terms, seed=seed, bounds=bounds)


# Each gives (value, terms of the generated pictures, terms of the real ones), with the neighbour k that sets radii.
def count_precision(generated: np.ndarray, real: np.ndarray, k: int) -> tuple[float, np.ndarray, np.ndarray]:
    """Of `precision`."""
    return _covered(generated, real, k)


def count_recall(generated: np.ndarray, real: np.ndarray, k: int) -> tuple[float, np.ndarray, np.ndarray]:
    """Of `recall`."""
    value, of_real, of_generated = _covered(real, generated, k)
    return value, of_generated, of_real


def count_density(generated: np.ndarray, real: np.ndarray, k: int) -> tuple[float, np.ndarray, np.ndarray]:
    """Of `density`."""
    numbers, distances = _neighbours(real, k)
    radii, wider = distances[:, k - 1], distances[:, k]
    inside, growth, terms = np.zeros(len(real)), np.zeros(len(real)), np.empty(len(generated))
    for block, found in squared_distances(generated, real):
        within = found < radii
        terms[block] = within.sum(axis=1) / k
        inside += within.sum(axis=0)
        growth += (found < wider).sum(axis=0) - within.sum(axis=0)
    gained = np.bincount(numbers[:, :k].ravel(), np.repeat(growth, k), len(real))
    of_real = (len(real) - 1) * (inside - gained) / (k * len(generated))
    return terms.mean(), terms, of_real


def count_coverage(generated: np.ndarray, real: np.ndarray, k: int) -> tuple[float, np.ndarray, np.ndarray]:
    """Of `coverage`."""
    numbers, distances = _neighbours(real, k)
    radii, wider = distances[:, k - 1], distances[:, k]
    (holder, _), (first, second) = (one.T for one in nearest(real, generated, 2))
    covered = first < radii
    gains = (first >= radii) & (first < wider)
    of_real = covered - np.bincount(numbers[:, :k].ravel(), np.repeat(gains, k), len(real))
    lost = np.bincount(holder[covered & (second >= radii)], minlength=len(generated))
    of_generated = (len(generated) - 1) * lost / len(real)
    return covered.mean(), of_generated, of_real


def _neighbours(rows: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k + 1 nearest other rows of each: the last is what sets the radius when one of the others is missing."""
    return nearest(rows, rows, k + 1, own=np.arange(len(rows)))


def _covered(points: np.ndarray, centres: np.ndarray, k: int) -> tuple[float, np.ndarray, np.ndarray]:
    """(share of the points in the manifold of the centres, terms of the points, terms of the centres)."""
    numbers, distances = _neighbours(centres, k)
    radii, wider = distances[:, k - 1], distances[:, k]
    covered, change = (
        np.empty(len(points)),
        np.zeros(len(centres)),
    )  # change: points won without a centre, less those lost
    for block, found in squared_distances(points, centres):
        inside = found <= radii
        count = inside.sum(axis=1)
        covered[block] = count > 0
        point, ball = np.nonzero((found <= wider) & ~inside & (count <= 1)[:, None])
        # (point, centre): without that centre some ball grows to hold the point.
        pairs = np.unique(np.stack([np.repeat(point, k), numbers[ball, :k].ravel()]), axis=1)
        owner = np.where(count == 1, inside.argmax(axis=1), -1)
        open_, kept = count[pairs[0]] == 0, owner[pairs[0]] == pairs[1]
        change += np.bincount(pairs[1][open_ | kept], minlength=len(centres))
        change -= np.bincount(owner[owner >= 0], minlength=len(centres))
    return covered.mean(), covered, -(len(centres) - 1) * change / len(points)

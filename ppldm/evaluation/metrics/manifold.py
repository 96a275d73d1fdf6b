"""How much of one set lies in the manifold of the other: precision and recall, density and coverage.

The manifold of a set is the union of balls around its members, each with the distance to the member's k-th neighbour as
its radius. Terms of the members are the pseudo-values of the jackknife: without a member its ball is missing, and every
ball whose radius it helped to set reaches to the next neighbour. All of them come out of one pass over the distances.
"""

import numpy as np

from .bootstrap import Measured, measure
from .distances import nearest, squared_distances

SHARE = (0, 1)


def precision(generated: np.ndarray, real: np.ndarray, *, seed: int, k: int) -> Measured:
    """The share of the generated pictures in the manifold of the real ones (Kynkäänniemi et al. 2019,
    arXiv:1904.06991)."""
    value, terms, centre_terms = _covered(generated, real, k)
    return measure(value, terms, centre_terms, seed=seed, bounds=SHARE)


def recall(generated: np.ndarray, real: np.ndarray, *, seed: int, k: int) -> Measured:
    """The share of the real pictures in the manifold of the generated ones (the same)."""
    value, terms, centre_terms = _covered(real, generated, k)
    return measure(value, centre_terms, terms, seed=seed, bounds=SHARE)


def density(generated: np.ndarray, real: np.ndarray, *, seed: int, k: int) -> Measured:
    """In how many balls of real pictures a generated one lies, by k (Naeem et al. 2020, arXiv:2002.09797); 1 is
    expected of equal distributions, more is possible."""
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
    return measure(terms.mean(), terms, of_real, seed=seed, bounds=(0, np.inf))


def coverage(generated: np.ndarray, real: np.ndarray, *, seed: int, k: int) -> Measured:
    """The share of the real pictures whose ball holds a generated one (the same)."""
    numbers, distances = _neighbours(real, k)
    radii, wider = distances[:, k - 1], distances[:, k]
    (holder, _), (first, second) = (one.T for one in nearest(real, generated, 2))
    covered = first < radii
    gains = (first >= radii) & (first < wider)
    of_real = covered - np.bincount(numbers[:, :k].ravel(), np.repeat(gains, k), len(real))
    lost = np.bincount(holder[covered & (second >= radii)], minlength=len(generated))
    of_generated = (len(generated) - 1) * lost / len(real)
    return measure(covered.mean(), of_generated, of_real, seed=seed, bounds=SHARE)


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

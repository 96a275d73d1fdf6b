"""What the distances between all rows of two sets of features tell: precision and recall, density and coverage, how
diverse pictures are, and whether they are copies of training rows.

The manifold of a set is the union of balls around its members, each with the distance to the member's k-th neighbour as
its radius. Terms of the members are the pseudo-values of the jackknife: without a member its ball is missing, and every
ball whose radius it helped to set reaches to the next neighbour. All of them come out of one pass over the distances.

The variance of these terms is too large: what j members do only together counts j times in it (Efron and Stein 1981,
doi:10.1214/aos/1176345462), and here much is done together, so that the intervals were 1.3 to 1.6 times as wide as they
should be. Of the values of random subsets, a share f of both sets, it counts (1 - f^j) / (1 - f) times, at most 4 / 3
for the quarters that are taken. So the terms are scaled down to the variance that the subsets show.
"""

from collections.abc import Callable, Iterator

import numpy as np
from scipy.stats import mannwhitneyu

from ...utils.rng import Stream, make_rng
from .bootstrap import Measured, measure

CLOSEST = 10
_ENTRIES = 1 << 24  # of a block's matrix of distances: 128 MB as float64
_SUBSETS, _SUBSET_SHARE, _MOST_IN_SUBSET = 64, 0.25, 4096


def block_slices(count: int, width: int) -> Iterator[slice]:
    """Slices of `count` rows such that a block of that many rows and `width` columns stays small."""
    size = max(1, _ENTRIES // max(1, width))
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def squared_distances(rows: np.ndarray, others: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
    """(rows' slice, squared Euclidean distances float64 [block, M]) for all blocks of `rows`: |x|² + |y|² - 2xy, after
    the mean was taken off, so that little cancels."""
    mean = np.mean(others, axis=0, dtype=np.float64)
    rows, others = rows - mean, others - mean
    lengths, other_lengths = np.einsum("nd,nd->n", rows, rows), np.einsum("nd,nd->n", others, others)
    for block in block_slices(len(rows), len(others)):
        found = rows[block] @ others.T
        found *= -2
        found += lengths[block, None]
        found += other_lengths
        yield block, np.maximum(found, 0, out=found)


def nearest(
    rows: np.ndarray, others: np.ndarray, count: int, own: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(numbers int64 [N, count], squared distances [N, count]) of the nearest others of each row, the nearest first.
    own: [N], where a row is itself one of the others: its number there, which does not count."""
    numbers, distances = np.empty((len(rows), count), np.int64), np.empty((len(rows), count))
    for block, found in squared_distances(rows, others):
        if own is not None:
            found[np.arange(len(found)), own[block]] = np.inf
        least = np.argpartition(found, min(count, found.shape[1] - 1), axis=1)[:, :count]
        values = np.take_along_axis(found, least, axis=1)
        order = np.argsort(values, axis=1, kind="stable")
        numbers[block] = np.take_along_axis(least, order, axis=1)
        distances[block] = np.take_along_axis(values, order, axis=1)
    return numbers, distances


def measure_manifold(
    count: Callable, generated: np.ndarray, real: np.ndarray, *, seed: int, k: int, bounds
) -> Measured:
    """What one of the four functions below counts, with its interval. k: which neighbour sets radii."""
    value, *terms = count(generated, real, k)
    expected = sum(np.var(own, ddof=1) / len(own) for own in terms)
    share = min(_SUBSET_SHARE, _MOST_IN_SUBSET / max(len(generated), len(real)))
    if expected > 0 and share * min(len(generated), len(real)) >= k + 2:
        values = []
        for number in range(_SUBSETS):
            rng = make_rng(seed, Stream.EVALUATION, 1, 1 + number)
            some = (rows[rng.permutation(len(rows))[: int(share * len(rows))]] for rows in (generated, real))
            values.append(count(*some, k)[0])
        shown = np.var(values, ddof=1) * share / (1 - share)
        terms = [own * min(1.0, np.sqrt(shown / expected)) for own in terms]
    return measure(value, *terms, seed=seed, bounds=bounds)


# Each gives (value, terms of the generated pictures, terms of the real ones).
def count_precision(generated: np.ndarray, real: np.ndarray, k: int) -> tuple[float, np.ndarray, np.ndarray]:
    """The share of generated pictures in the real manifold (Kynkäänniemi et al. 2019, arXiv:1904.06991)."""
    numbers, radii, wider = _balls(real, k)
    covered = np.empty(len(generated))
    change = np.zeros(len(real))  # pictures won without a real one, less those lost
    for block, found in squared_distances(generated, real):
        inside = found <= radii
        count = inside.sum(axis=1)
        covered[block] = count > 0
        point, ball = np.nonzero((found <= wider) & ~inside & (count <= 1)[:, None])
        # (generated, real): without that real picture some ball grows to hold the generated one.
        pairs = np.unique(np.stack([np.repeat(point, k), numbers[ball].ravel()]), axis=1)
        owner = np.where(count == 1, inside.argmax(axis=1), -1)
        open_, kept = count[pairs[0]] == 0, owner[pairs[0]] == pairs[1]
        change += np.bincount(pairs[1][open_ | kept], minlength=len(real))
        change -= np.bincount(owner[owner >= 0], minlength=len(real))
    return covered.mean(), covered, -(len(real) - 1) * change / len(generated)


def count_recall(generated: np.ndarray, real: np.ndarray, k: int) -> tuple[float, np.ndarray, np.ndarray]:
    """The share of the real pictures in the manifold of the generated ones (the same)."""
    value, of_real, of_generated = count_precision(real, generated, k)
    return value, of_generated, of_real


def count_density(generated: np.ndarray, real: np.ndarray, k: int) -> tuple[float, np.ndarray, np.ndarray]:
    """In how many balls of real pictures a generated one lies, by k (Naeem et al. 2020, arXiv:2002.09797); 1 is
    expected of equal distributions, more is possible."""
    numbers, radii, wider = _balls(real, k)
    inside, growth, terms = np.zeros(len(real)), np.zeros(len(real)), np.empty(len(generated))
    for block, found in squared_distances(generated, real):
        within = found < radii
        terms[block] = within.sum(axis=1) / k
        inside += within.sum(axis=0)
        growth += (found < wider).sum(axis=0) - within.sum(axis=0)
    gained = np.bincount(numbers.ravel(), np.repeat(growth, k), len(real))
    of_real = (len(real) - 1) * (inside - gained) / (k * len(generated))
    return terms.mean(), terms, of_real


def count_coverage(generated: np.ndarray, real: np.ndarray, k: int) -> tuple[float, np.ndarray, np.ndarray]:
    """The share of the real pictures whose ball holds a generated one (the same)."""
    numbers, radii, wider = _balls(real, k)
    (holder, _), (first, second) = (one.T for one in nearest(real, generated, 2))
    covered = first < radii
    gains = (first >= radii) & (first < wider)
    of_real = covered - np.bincount(numbers.ravel(), np.repeat(gains, k), len(real))
    lost = np.bincount(holder[covered & (second >= radii)], minlength=len(generated))
    of_generated = (len(generated) - 1) * lost / len(real)
    return covered.mean(), of_generated, of_real


def _balls(rows: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each row: its nearest others [N, k], its ball's squared radius [N], the same with one of them missing."""
    numbers, distances = nearest(rows, rows, k + 1, own=np.arange(len(rows)))
    return numbers[:, :k], distances[:, k - 1], distances[:, k]


def diversity(generated: np.ndarray, *, seed: int) -> Measured:
    """The mean Euclidean distance of two generated pictures: 0 where all are one. Terms: twice a row's mean."""
    means = np.empty(len(generated))
    for block, found in squared_distances(generated, generated):
        found[np.arange(len(found)), np.arange(block.start, block.stop)] = 0
        means[block] = np.sqrt(found).sum(axis=1) / (len(generated) - 1)
    return measure(means.mean(), 2 * means, seed=seed, bounds=(0, np.inf))


def nearest_training(generated: np.ndarray, training: np.ndarray, *, seed: int) -> Measured:
    """Does a model copy? The mean distance of a generated picture to the nearest training row, by the mean of training
    rows to the nearest other one: about 1 of a model that does not copy, towards 0 of one that does. The interval is of
    other generated pictures; the training rows are given.

    details: `distance` in the unit of the features; `p_copied`, of a Mann-Whitney test (as Meehan et al. 2020,
    arXiv:2004.05675) that generated pictures are no nearer than training rows are; `closest`, [number of the picture,
    number of the training row, distance] of the ten nearest."""
    rows, _squares = nearest(generated, training, 1)
    own = np.linspace(0, len(training) - 1, min(len(generated), len(training))).round().astype(int)
    _, expected = nearest(training[own], training, 1, own=own)
    # Rounding of |x|² + |y|² - 2xy would hide an exact copy.
    distances = np.linalg.norm(generated.astype(np.float64) - training[rows[:, 0]], axis=1)
    expected = np.sqrt(expected[:, 0])
    scale = max(expected.mean(), 1e-12)
    ratio = distances.mean() / scale
    order = np.argsort(distances, kind="stable")[:CLOSEST]
    details = {
        "distance": float(distances.mean()),
        "p_copied": float(mannwhitneyu(distances, expected, alternative="less").pvalue),
        "closest": [[int(number), int(rows[number, 0]), float(distances[number])] for number in order],
    }
    return measure(ratio, distances / scale, seed=seed, details=details, bounds=(0, np.inf))

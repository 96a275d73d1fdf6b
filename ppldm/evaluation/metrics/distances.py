"""Distances between all rows of two sets of features, a block at a time."""

from collections.abc import Iterator

import numpy as np

_ENTRIES = 1 << 24  # of a block's matrix: 128 MB as float64


def block_slices(count: int, width: int) -> Iterator[slice]:
    """Slices of `count` rows such that a block of that many rows and `width` columns stays small."""
    size = max(1, _ENTRIES // max(1, width))
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def squared_distances(rows: np.ndarray, others: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
    """(rows' slice, squared Euclidean distances float64 [block, M]) for all blocks of `rows`.

    |x|² + |y|² - 2xy of float64, after the mean was taken off, so that little cancels.
    """
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

    own: [N], where a row is itself one of the others: its number there, which does not count.
    """
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

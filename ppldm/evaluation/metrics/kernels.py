"""Maximum mean discrepancies: KID and CMMD.

MMD² = E k(x, x') + E k(y, y') - 2 E k(x, y) (Gretton et al. 2012). First-order terms: a picture x contributes twice its
mean kernel with the generated ones less that with the real ones.
"""

import numpy as np

from .bootstrap import Measured, measure
from .distances import block_slices

SUBSETS, SUBSET_SIZE, SUBSET_SEED = 100, 1000, 2020
SIGMA, SCALE = 10.0, 1000.0


def kernel_distance(generated: np.ndarray, real: np.ndarray, *, seed: int) -> Measured:
    """KID (Bińkowski et al. 2018, arXiv:1801.01401): k(x, y) = (xy / D + 1)³, without bias: a value may be below 0.

    The mean over 100 subsets of 1000 features of each set, all of them where there are fewer. Subsets are drawn as
    torch-fidelity draws them, so the value is its value whatever `seed`. details: `std` over the subsets, and their
    `subset_size`.
    """
    size = min(SUBSET_SIZE, len(generated), len(real))
    sets = [rows.astype(np.float64) for rows in (generated, real)]
    sums, seen = [np.zeros(len(rows)) for rows in sets], [np.zeros(len(rows)) for rows in sets]
    legacy = np.random.RandomState(SUBSET_SEED)  # part of the published estimator
    values = []
    for _ in range(SUBSETS):
        chosen = [legacy.choice(len(rows), size, replace=False) for rows in sets]
        value, terms = _cubic_mmd(*(rows[numbers] for rows, numbers in zip(sets, chosen, strict=True)))
        values.append(value)
        for own_sums, own_seen, numbers, own in zip(sums, seen, chosen, terms, strict=True):
            own_sums[numbers] += own
            own_seen[numbers] += 1
        if size == len(generated) == len(real):
            break  # each subset is all of them
    terms = [own_sums[count > 0] / count[count > 0] for own_sums, count in zip(sums, seen, strict=True)]
    details = {"std": float(np.std(values)), "subset_size": size}
    # The choice of subsets adds to the variance what their own says.
    return measure(float(np.mean(values)), *terms, np.array(values), seed=seed, details=details)


def _cubic_mmd(left: np.ndarray, right: np.ndarray) -> tuple[float, list[np.ndarray]]:
    """(unbiased MMD² of two sets of one length, terms of both)."""
    count = len(left)
    across = _cubic(left, right)
    within = []
    for rows in (left, right):
        kernel = _cubic(rows, rows)
        within.append((kernel.sum(axis=1) - np.diagonal(kernel)) / (count - 1))
    others = [across.mean(axis=1), across.mean(axis=0)]
    value = within[0].mean() + within[1].mean() - 2 * across.mean()
    return float(value), [2 * (own - other) for own, other in zip(within, others, strict=True)]


def _cubic(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    return (left @ right.T / left.shape[1] + 1) ** 3


def clip_mmd(generated: np.ndarray, real: np.ndarray, *, seed: int) -> Measured:
    """CMMD (Jayasumana et al. 2023, arXiv:2401.09603): k(x, y) = exp(-|x - y|² / (2 · 10²)) of embeddings of length 1,
    all pairs and each with itself too (biased, as published), times 1000."""
    sets = [rows / np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True) for rows in (generated, real)]
    within = [_mean_kernel(one, one)[0] for one in sets]
    rows, columns = _mean_kernel(*sets)
    value = SCALE * (within[0].mean() + within[1].mean() - 2 * rows.mean())
    terms = [2 * SCALE * (within[0] - rows), 2 * SCALE * (within[1] - columns)]
    return measure(max(0.0, float(value)), *terms, seed=seed, bounds=(0, np.inf))


def _mean_kernel(left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(mean of each row, mean of each column) of the kernel less 1, which is small: the ones cancel anyway."""
    rows, columns = np.zeros(len(left)), np.zeros(len(right))
    for block in block_slices(len(left), len(right)):
        kernel = np.expm1((left[block] @ right.T - 1) / SIGMA**2)  # |x - y|² is 2 - 2xy
        rows[block] = kernel.mean(axis=1)
        columns += kernel.sum(axis=0)
    return rows, columns / len(left)

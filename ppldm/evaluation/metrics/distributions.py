"""How far apart the distributions of two sets of features are: Fréchet distance, KID, CMMD.

The Fréchet distance is that of Gaussians fitted to the sets; on InceptionV3's features it is the FID.

    |m1 - m2|² + tr(S1 + S2 - 2 (S1 S2)^½)

(Dowson and Landau 1982; Heusel et al. 2017, arXiv:1706.08500). With factors S = RᵀR the last trace is the sum of the
singular values of R1 R2ᵀ. No root of a product is taken, so covariances of fewer pictures than features, which are
singular, need no offset on their diagonals, and two equal sets are at distance 0 up to rounding.

First-order terms, by the derivative of that trace: with R1 R2ᵀ = U s Vᵀ the optimal transport from the first Gaussian
to the second is T = R2ᵀ V s⁻¹ Vᵀ R2, and a picture x of the first contributes
|x - m1|² - (x - m1)ᵀ T (x - m1) + 2 (m1 - m2)ᵀ (x - m1).

The maximum mean discrepancies: MMD² = E k(x, x') + E k(y, y') - 2 E k(x, y) (Gretton et al. 2012). First-order terms: a
picture x contributes twice its mean kernel with the generated ones less that with the real ones.
"""

import numpy as np
from scipy.linalg import svd

from .bootstrap import Measured, measure
from .neighbours import block_slices

BLOCK = 4096  # rows at a time
SUBSETS, SUBSET_SIZE, SUBSET_SEED = 100, 1000, 2020
SIGMA, SCALE = 10.0, 1000.0


def frechet_distance(generated: np.ndarray, real: np.ndarray, *, seed: int) -> Measured:
    """Between features [N, D] and [M, D], in float64. It depends on N and M: compare only values of the same."""
    means = [np.mean(rows, axis=0, dtype=np.float64) for rows in (generated, real)]
    roots = [_root(rows, mean) for rows, mean in zip((generated, real), means, strict=True)]
    left, singular, right = svd(roots[0] @ roots[1].T, full_matrices=False)
    step = means[0] - means[1]
    of_means = float(step @ step)
    of_covariances = float(np.sum(roots[0] ** 2) + np.sum(roots[1] ** 2) - 2 * singular.sum())
    kept = singular > singular.max(initial=0) * 1e-10
    maps = [
        (roots[1].T @ right[kept].T) / np.sqrt(singular[kept]),  # its product with its transpose is T
        (roots[0].T @ left[:, kept]) / np.sqrt(singular[kept]),
    ]
    terms = [
        _terms(rows, mean, one, direction)
        for rows, mean, one, direction in zip((generated, real), means, maps, (step, -step), strict=True)
    ]
    details = {"means": of_means, "covariances": of_covariances}
    return measure(max(0.0, of_means + of_covariances), *terms, seed=seed, details=details, bounds=(0, np.inf))


def _root(rows: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """R [min(N, D), D] with RᵀR the covariance of `rows`: the triangle of a QR decomposition, block after block."""
    root = np.empty((0, rows.shape[1]))
    for start in range(0, len(rows), BLOCK):
        root = np.linalg.qr(np.concatenate([root, rows[start : start + BLOCK] - mean]), mode="r")
    return root / np.sqrt(max(1, len(rows) - 1))


def _terms(rows: np.ndarray, mean: np.ndarray, transport: np.ndarray, step: np.ndarray) -> np.ndarray:
    terms = []
    for start in range(0, len(rows), BLOCK):
        centred = rows[start : start + BLOCK] - mean
        moved = centred @ transport
        terms.append(np.sum(centred**2, axis=1) - np.sum(moved**2, axis=1) + 2 * centred @ step)
    return np.concatenate(terms)


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

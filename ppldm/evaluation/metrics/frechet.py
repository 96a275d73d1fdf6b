"""The Fréchet distance between Gaussians fitted to two sets of features; on InceptionV3's it is the FID.

    |m1 - m2|² + tr(S1 + S2 - 2 (S1 S2)^½)

(Dowson and Landau 1982; Heusel et al. 2017, arXiv:1706.08500). With factors S = RᵀR the last trace is the sum of the
singular values of R1 R2ᵀ. No root of a product is taken, so covariances of fewer pictures than features, which are
singular, need no offset on their diagonals, and two equal sets are at distance 0 up to rounding.

First-order terms, by the derivative of that trace: with R1 R2ᵀ = U s Vᵀ the optimal transport from the first Gaussian
to the second is T = R2ᵀ V s⁻¹ Vᵀ R2, and a picture x of the first contributes
|x - m1|² - (x - m1)ᵀ T (x - m1) + 2 (m1 - m2)ᵀ (x - m1).
"""

import numpy as np
from scipy.linalg import svd

from .bootstrap import Measured, measure

BLOCK = 4096  # rows at a time


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

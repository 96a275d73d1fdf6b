"""The Fréchet distance: the published formula, zero of equal sets, and what is known of Gaussians."""

import numpy as np
import pytest
from scipy.linalg import sqrtm

from ppldm.evaluation.metrics.base import METRICS

FRECHET = METRICS["frechet"].compute


def draw(seed, count, dim, scale=1.0, shift=0.0):
    rng = np.random.default_rng(seed)
    mixed = np.random.default_rng(99).normal(size=(dim, dim)) / np.sqrt(dim) + np.eye(dim)
    return (rng.normal(size=(count, dim)) * scale @ mixed + shift).astype(np.float32)


def published(left, right):
    """As pytorch-fid, clean-fid and torch-fidelity compute it."""
    first, second = (np.cov(rows.astype(np.float64), rowvar=False) for rows in (left, right))
    step = left.astype(np.float64).mean(0) - right.astype(np.float64).mean(0)
    return step @ step + np.trace(first) + np.trace(second) - 2 * np.trace(sqrtm(first @ second).real)


@pytest.mark.parametrize("count, other, dim", [(200, 300, 8), (5000, 4100, 4), (500, 400, 64)])
def test_it_is_the_published_formula(count, other, dim):
    left, right = draw(1, count, dim), draw(2, other, dim, 1.3, 0.2)
    assert FRECHET(left, right, seed=0).value == pytest.approx(published(left, right), rel=1e-9)


@pytest.mark.parametrize("count, dim", [(40, 8), (20, 60), (2, 5)])
def test_equal_sets_are_at_zero(count, dim):
    rows = draw(1, count, dim)
    found = FRECHET(rows, rows.copy(), seed=0)
    assert found.value < 1e-9 and found.high < 1e-6


def test_fewer_pictures_than_features_need_no_offset():
    """Rotated so that all lies in few axes, where the covariances are regular."""
    left, right = draw(1, 90, 12), draw(2, 80, 12, 1.2)
    turned = np.linalg.qr(np.random.default_rng(3).normal(size=(120, 12)))[0].T
    assert FRECHET(left @ turned, right @ turned, seed=0).value == pytest.approx(published(left, right), rel=1e-6)


def test_it_nears_the_distance_of_the_gaussians():
    rng = np.random.default_rng(5)
    left, right = rng.normal(size=(50_000, 3)) * [1, 2, 3] + [1, 0, 0], rng.normal(size=(50_000, 3))
    assert FRECHET(left, right, seed=0).value == pytest.approx(1 + 0 + 1 + 4, rel=0.02)

"""On known distributions every metric moves as it must, and its interval covers the truth."""

import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from small_lpips import write_lpips

from ppldm.evaluation.features.base import CONVENTIONS
from ppldm.evaluation.features.networks import load_pairs
from ppldm.evaluation.metrics import distributions as sliced
from ppldm.evaluation.metrics.base import METRICS
from ppldm.evaluation.metrics.bootstrap import measure_difference

OF_FEATURES = [name for name, metric in METRICS.items() if metric.inputs == "features" and name != "nearest_training"]


def clusters(seed, count, modes, noise=0.0, shift=0.0):
    """Points around so many of six corners."""
    rng = np.random.default_rng(seed)
    corners = 6 * np.eye(6)[rng.integers(modes, size=count)]
    return (corners + rng.normal(size=(count, 6)) * (1 + noise) + shift).astype(np.float32)


def scenes(seed, count, noise=0.0):
    """Pictures of large squares, with noise."""
    rng = np.random.default_rng(seed)
    plain = rng.normal(128, 30, size=(count, 4, 4, 3)).repeat(8, 1).repeat(8, 2)
    return list(np.clip(plain + noise * rng.normal(size=plain.shape), 0, 255).astype(np.uint8))


def values(name, cases, real):
    compute, better = METRICS[name].compute, METRICS[name].higher_is_better
    found = [compute(case, real, seed=0).value for case in cases]
    return found if better else [-one for one in found]


@pytest.mark.parametrize("name", OF_FEATURES)
def test_noise_and_shift_make_it_worse(name):
    real = clusters(1, 400, 6)
    change = "shift" if name in ("recall", "coverage") else "noise"
    steps = {"shift": (0, 1, 2.5), "noise": (0, 1.5, 5)}[change]
    found = values(name, [clusters(2, 400, 6, **{change: step}) for step in steps], real)
    assert found[0] > found[1] > found[2], found


@pytest.mark.parametrize("name", [name for name in OF_FEATURES if name not in ("precision", "density")])
def test_a_missing_mode_makes_it_worse(name):
    real = clusters(1, 600, 6)
    found = values(name, [clusters(2, 600, modes) for modes in (6, 5, 3)], real)
    assert found[0] > found[1] > found[2], found


def test_precision_does_not_see_a_missing_mode():
    found = METRICS["precision"].compute(clusters(2, 600, 3), clusters(1, 600, 6), seed=0)
    assert found.value > 0.9


@pytest.mark.parametrize("name", ["swd", "psnr", "ssim"])
def test_growing_noise_in_pictures(name):
    found = values(name, [scenes(1, 6, noise) for noise in (0, 10, 40)], scenes(1 if name != "swd" else 2, 6))
    assert found[0] > found[1] > found[2], found


def test_diversity_and_copying():
    one, all_ = (METRICS["diversity"].compute(clusters(2, 200, modes), seed=0).value for modes in (1, 6))
    assert one < all_ / 1.5
    training = clusters(1, 500, 6)
    honest = METRICS["nearest_training"].compute(clusters(2, 300, 6), training, seed=0)
    near = METRICS["nearest_training"].compute(training[:300] + np.float32(0.1), training, seed=0)
    assert honest.low < 1 < honest.high and honest.details["p_copied"] > 0.01
    assert near.high < 0.5 and near.details["p_copied"] < 1e-6


def draw(name, seed, count):
    """One trial's inputs: Gaussians of distance 0.7 in four axes, or pictures with noise."""
    rng = np.random.default_rng(seed)
    kind = METRICS[name].inputs
    if kind in ("pictures", "pairs"):
        made = [_pictures(rng, count // 6) for _ in range(2 if kind == "pictures" else 1)]
        return [np.clip(base + noise * factor, 0, 255).astype(np.uint8)
                for (base, noise), factor in zip((made[0], made[-1]), (1, 0.2), strict=True)]  # fmt: skip
    generated, real = rng.normal(size=(count, 4)) + 0.7, rng.normal(size=(count, 4))
    if name == "nearest_training":  # whose training rows are given
        real = np.random.default_rng(10**6).normal(size=(count, 4))
    return [generated] if kind == "single" else [generated, real]


def _pictures(rng, count):
    return rng.normal(128, 25, size=(count, 1, 1, 3)), rng.normal(size=(count, 16, 16, 3)) * rng.uniform(
        10, 30, size=(count, 1, 1, 1)
    )


@cache
def small_lpips():
    """The network that `lpips` is called with."""
    with tempfile.TemporaryDirectory() as folder:
        return load_pairs(write_lpips(Path(folder)), CONVENTIONS["whole"])


def share_covered(name, trials, monkeypatch, count=150):
    monkeypatch.setattr(sliced, "DIRECTIONS", 16)
    monkeypatch.setattr(sliced, "PATCHES", 16)
    networks = [small_lpips()] if name == "lpips" else []
    found = [METRICS[name].compute(*draw(name, seed, count), *networks, seed=0) for seed in range(trials)]
    truth = np.mean([one.value for one in found])  # the expectation at this number of pictures
    return np.mean([one.low <= truth <= one.high for one in found])


@pytest.mark.parametrize("name", ["frechet", "kid", "precision", "sliced_wasserstein", "clip_score", "psnr"])
def test_intervals_cover_in_a_few_trials(name, monkeypatch):
    assert share_covered(name, 25, monkeypatch) >= 0.84


@pytest.mark.parametrize("name", ["precision", "coverage"])
def test_the_width_of_manifolds_is_that_of_their_spread(name):
    """Of the jackknife's terms alone it would be 1.3 to 1.4 times as much."""
    found = [METRICS[name].compute(*draw(name, seed, 100), seed=0) for seed in range(30)]
    width = np.mean([one.high - one.low for one in found])
    assert 0.7 < width / (2 * 1.96 * np.std([one.value for one in found])) < 1.25


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in METRICS if name not in ("fid", "clip_fid")])
def test_intervals_cover_in_200_trials(name, monkeypatch):
    """Of 200 trials of 0.95, less than 0.905 or more than 0.985 are covered once in a hundred times."""
    assert 0.905 <= share_covered(name, 200, monkeypatch) <= 0.985


@pytest.mark.parametrize("name", ["frechet", "kid", "clip_score"])
def test_intervals_of_differences_of_pairs_cover_and_are_narrower(name):
    """Of two models that draw the same things, one a little off, seen against the same real pictures."""
    compute, found, apart = METRICS[name].compute, [], []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        drawn, real = rng.normal(size=(150, 4)) + 0.7, rng.normal(size=(150, 4))
        one, other = (compute(drawn + rng.normal(size=drawn.shape) * noise, real, seed=0) for noise in (0.1, 0.2))
        terms = [more - less for less, more in zip(one.terms, other.terms, strict=True)]
        found.append(measure_difference(other.value - one.value, *terms, seed=0))
        apart.append(one.high - one.low)
    truth = np.mean([one.value for one in found])
    assert np.mean([one.low <= truth <= one.high for one in found]) >= 0.85
    assert np.mean([one.high - one.low for one in found]) < 0.7 * np.mean(apart)


@pytest.mark.parametrize("total, first, second", [(40, 0.1, 0.1), (200, 0.05, 0.02), (100, 0.3, 0.1), (40, 0.04, 0)])
def test_differences_of_shares_cover_with_few_unlike_pairs(total, first, second):
    rng, covered = np.random.default_rng(0), []
    for _ in range(400):
        own = rng.choice([1, -1, 0], size=total, p=[first, second, 1 - first - second])
        found = measure_difference(own.mean(), own, seed=0)
        covered.append(found.low <= first - second <= found.high)
    assert 0.92 <= np.mean(covered) <= 0.999

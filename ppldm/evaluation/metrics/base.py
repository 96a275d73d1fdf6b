"""What a metric is, and the list of them; and those that are means over pairs: CLIP score, PSNR, SSIM and LPIPS."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf

import numpy as np
from scipy.ndimage import correlate1d

from . import neighbours
from .bootstrap import LEVEL, TRIALS, Measured, measure
from .distributions import clip_mmd, frechet_distance, kernel_distance, pyramid_distance, sliced_wasserstein

MOST_DB = 100.0
_SIGMA, _RADIUS, _K1, _K2, _RANGE = 1.5, 5, 0.01, 0.03, 255.0
_WINDOW = np.exp(-np.square(np.arange(-_RADIUS, _RADIUS + 1) / _SIGMA) / 2)
_WINDOW /= _WINDOW.sum()


@dataclass(frozen=True)
class Metric:
    """A metric and what it needs.

    inputs says what `compute` is called with, besides `seed` by keyword:
        features    generated [N, D], real [M, D]: float32 of one feature network
        texts       pictures [N, D], texts [N, D]: float32 embeddings of a network that has both, as CLIP
        pictures    generated, real: sequences (len, [i]) of uint8 [H, W, 3], all of one size
        pairs       the same, of one length, the i-th with the i-th; and the network, if it has one
        single      generated [N, D]: float32
    features: the network's usual name; None where none is needed. higher_is_better: None where neither is.
    settings: what the value depends on besides its inputs. least: how many pictures it needs, of each set. asked: by
    name, so that what stands in its way is an error and no reason to leave it out.
    """

    name: str
    inputs: str
    features: str | None
    higher_is_better: bool | None
    compute: Callable[..., Measured]
    settings: dict = field(default_factory=dict)
    least: int = 2
    asked: bool = False


def psnr(generated: Sequence[np.ndarray], real: Sequence[np.ndarray], *, seed: int) -> Measured:
    """10 log10(255² / mean squared error) of all channels, in dB; 100 where it would be more, as of equal pictures."""
    errors = [np.mean(np.square(left.astype(np.float64) - right)) for left, right in zip(generated, real, strict=True)]
    values = np.array([min(MOST_DB, float(10 * np.log10(_RANGE**2 / one))) if one else MOST_DB for one in errors])
    return measure(values.mean(), values, seed=seed)


def ssim(generated: Sequence[np.ndarray], real: Sequence[np.ndarray], *, seed: int) -> Measured:
    """Structural similarity (Wang et al. 2004): Gaussian windows of 11 x 11 pixels, sigma 1.5, K1 0.01, K2 0.03, whole
    windows only; the mean of the three channels. 1 of equal pictures. Sides are of 11 pixels and more."""
    values = np.array([_ssim(left, right) for left, right in zip(generated, real, strict=True)])
    return measure(values.mean(), values, seed=seed, bounds=(-1, 1))


def lpips(generated: Sequence[np.ndarray], real: Sequence[np.ndarray], network, *, seed: int) -> Measured:
    """The distance of features of a network (`features.networks`). 0 of equal pictures; sides of 16 pixels and more."""
    values = network.distances(generated, real)
    return measure(values.mean(), values, seed=seed)


def _ssim(left: np.ndarray, right: np.ndarray) -> float:
    left, right = left.astype(np.float64), right.astype(np.float64)
    first, second = _window(left), _window(right)
    first_variance, second_variance = _window(left**2) - first**2, _window(right**2) - second**2
    covariance = _window(left * right) - first * second
    small, large = (_K1 * _RANGE) ** 2, (_K2 * _RANGE) ** 2
    likeness = (2 * first * second + small) * (2 * covariance + large)
    return float(np.mean(likeness / ((first**2 + second**2 + small) * (first_variance + second_variance + large))))


def _window(picture: np.ndarray) -> np.ndarray:
    for axis in (0, 1):
        picture = correlate1d(picture, _WINDOW, axis=axis)
    return picture[_RADIUS:-_RADIUS, _RADIUS:-_RADIUS]


def clip_score(pictures: np.ndarray, texts: np.ndarray, *, seed: int, logit_scale: float = 100.0) -> Measured:
    """The mean of 100 max(cos, 0) of pictures and their texts (Hessel et al. 2021, arXiv:2104.08718, with 100 for their
    2.5). details: `logit_scale_cosine`, the mean of logit_scale · cos, as Paddle's published curves have it."""
    lengths = np.linalg.norm(pictures, axis=1) * np.linalg.norm(texts, axis=1)
    cosines = np.einsum("nd,nd->n", pictures, texts, dtype=np.float64) / np.maximum(lengths, 1e-12)
    scores = 100 * np.maximum(cosines, 0)
    details = {"cosine": float(cosines.mean()), "logit_scale": float(logit_scale)}
    details["logit_scale_cosine"] = details["logit_scale"] * details["cosine"]
    return measure(scores.mean(), scores, seed=seed, details=details, bounds=(0, 100))


def _metric(name: str, inputs: str, features: str | None, better: str, compute, least: int = 2, **settings) -> Metric:
    interval = {"interval": f"BCa bootstrap of first-order terms, {LEVEL:.0%}", "trials": TRIALS}
    higher = {"higher": True, "lower": False, "neither": None}[better]
    return Metric(name, inputs, features, higher, compute, {**settings, **interval}, least)


def _manifold(name: str, count: Callable, k: int, most: float = 1) -> Metric:
    compute = partial(neighbours.measure_manifold, count, k=k, bounds=(0, most))
    settings = {"k": k, "interval_subsets": 64, "interval_subset_share": 0.25}
    return _metric(name, "features", "inception", "higher", compute, least=k + 2, **settings)


_FRECHET = {"estimator": "squared Fréchet distance of Gaussians, float64, covariances by n - 1"}
_KID = {"estimator": "MMD², unbiased, (xy / D + 1)³", "subsets": 100, "subset_size": 1000, "subset_seed": 2020}
_CMMD = {"estimator": "MMD², biased, Gaussian", "sigma": 10, "scale": 1000}
_DIRECTIONS = {"estimator": "mean W1 over directions", "directions": 512}
_PYRAMID = {"patches": 128, "patch": 7, "smallest_level": 16, "most_pictures": 16_384, "scale": 1000}
_SSIM = {"window": "Gaussian 11 x 11, sigma 1.5", "k1": 0.01, "k2": 0.03, "range": 255, "channels": "RGB, mean"}
_NEAREST = {"estimator": "mean distance, by that of training rows to each other"}
METRICS = {
    metric.name: metric
    for metric in (
        _metric("fid", "features", "inception", "lower", frechet_distance, **_FRECHET),
        _metric("clip_fid", "features", "clip", "lower", frechet_distance, **_FRECHET),
        _metric("frechet", "features", "pixels", "lower", frechet_distance, **_FRECHET),
        _metric("kid", "features", "inception", "lower", kernel_distance, **_KID),
        _metric("cmmd", "features", "clip", "lower", clip_mmd, **_CMMD),
        _manifold("precision", neighbours.count_precision, k=3),
        _manifold("recall", neighbours.count_recall, k=3),
        _manifold("density", neighbours.count_density, k=5, most=inf),
        _manifold("coverage", neighbours.count_coverage, k=5),
        _metric("clip_score", "texts", "clip", "higher", clip_score, estimator="mean of 100 max(cos, 0)"),
        _metric("sliced_wasserstein", "features", "pixels", "lower", sliced_wasserstein, **_DIRECTIONS),
        _metric("swd", "pictures", None, "lower", pyramid_distance, **_DIRECTIONS, **_PYRAMID),
        _metric("psnr", "pairs", None, "higher", psnr, estimator="mean of dB by picture, at most 100"),
        _metric("ssim", "pairs", None, "higher", ssim, **_SSIM),
        _metric("lpips", "pairs", "lpips", "lower", lpips, estimator="mean distance, VGG16, version 0.1"),
        _metric("nearest_training", "features", "pixels", "neither", neighbours.nearest_training, **_NEAREST),
        _metric("diversity", "single", "pixels", "neither", neighbours.diversity, estimator="mean distance of pairs"),
    )
}

"""What a metric is, and the list of them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import inf

from .bootstrap import LEVEL, TRIALS, Measured
from .distributions import clip_mmd, frechet_distance, kernel_distance
from .neighbours import (
    count_coverage,
    count_density,
    count_precision,
    count_recall,
    diversity,
    measure_manifold,
    nearest_training,
)
from .pairs import clip_score, lpips, psnr, ssim
from .sliced import pyramid_distance, sliced_wasserstein


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
    settings: what the value depends on besides its inputs. least: how many pictures it needs, of each set.
    """

    name: str
    inputs: str
    features: str | None
    higher_is_better: bool | None
    compute: Callable[..., Measured]
    settings: dict = field(default_factory=dict)
    least: int = 2


def _metric(name: str, inputs: str, features: str | None, better: str, compute, least: int = 2, **settings) -> Metric:
    interval = {"interval": f"BCa bootstrap of first-order terms, {LEVEL:.0%}", "trials": TRIALS}
    higher = {"higher": True, "lower": False, "neither": None}[better]
    return Metric(name, inputs, features, higher, compute, {**settings, **interval}, least)


def _manifold(name: str, count: Callable, k: int, most: float = 1) -> Metric:
    compute = partial(measure_manifold, count, k=k, bounds=(0, most))
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
        _manifold("precision", count_precision, k=3),
        _manifold("recall", count_recall, k=3),
        _manifold("density", count_density, k=5, most=inf),
        _manifold("coverage", count_coverage, k=5),
        _metric("clip_score", "texts", "clip", "higher", clip_score, estimator="mean of 100 max(cos, 0)"),
        _metric("sliced_wasserstein", "features", "pixels", "lower", sliced_wasserstein, **_DIRECTIONS),
        _metric("swd", "pictures", None, "lower", pyramid_distance, **_DIRECTIONS, **_PYRAMID),
        _metric("psnr", "pairs", None, "higher", psnr, estimator="mean of dB by picture, at most 100"),
        _metric("ssim", "pairs", None, "higher", ssim, **_SSIM),
        _metric("lpips", "pairs", "lpips", "lower", lpips, estimator="mean distance, VGG16, version 0.1"),
        _metric("nearest_training", "features", "pixels", "neither", nearest_training, **_NEAREST),
        _metric("diversity", "single", "pixels", "neither", diversity, estimator="mean distance of pairs"),
    )
}

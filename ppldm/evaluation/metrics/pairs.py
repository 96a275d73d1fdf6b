"""Means over pictures or pairs of them: CLIP score, diversity, distance to the training rows; and PSNR, SSIM and LPIPS
of pictures with what an autoencoder makes of them."""

from collections.abc import Sequence

import numpy as np
from scipy.ndimage import correlate1d
from scipy.stats import mannwhitneyu

from .bootstrap import Measured, measure
from .distances import nearest, squared_distances

MOST_DB = 100.0
CLOSEST = 10
_SIGMA, _RADIUS, _K1, _K2, _RANGE = 1.5, 5, 0.01, 0.03, 255.0
_WINDOW = np.exp(-np.square(np.arange(-_RADIUS, _RADIUS + 1) / _SIGMA) / 2)
_WINDOW /= _WINDOW.sum()


def psnr(generated: Sequence[np.ndarray], real: Sequence[np.ndarray], *, seed: int) -> Measured:
    """10 log10(255² / mean squared error) of all channels, in dB; 100 where it would be more, as of equal pictures."""
    values = np.array([_psnr(left, right) for left, right in zip(generated, real, strict=True)])
    return measure(values.mean(), values, seed=seed)


def ssim(generated: Sequence[np.ndarray], real: Sequence[np.ndarray], *, seed: int) -> Measured:
    """Structural similarity (Wang et al. 2004): Gaussian windows of 11 x 11 pixels, sigma 1.5, K1 0.01, K2 0.03, whole
    windows only; the mean of the three channels. 1 of equal pictures. Sides are of 11 pixels and more."""
    values = np.array([_ssim(left, right) for left, right in zip(generated, real, strict=True)])
    return measure(values.mean(), values, seed=seed, bounds=(-1, 1))


def lpips(generated: Sequence[np.ndarray], real: Sequence[np.ndarray], network, *, seed: int) -> Measured:
    """The distance of features of a network (`features.lpips`). 0 of equal pictures; sides of 16 pixels and more."""
    values = network.distances(generated, real)
    return measure(values.mean(), values, seed=seed)


def _psnr(left: np.ndarray, right: np.ndarray) -> float:
    error = np.mean(np.square(left.astype(np.float64) - right))
    return min(MOST_DB, float(10 * np.log10(_RANGE**2 / error))) if error else MOST_DB


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
    """How well pictures fit their texts: the mean of 100 max(cos, 0) (Hessel et al. 2021, arXiv:2104.08718, with 100
    for their 2.5). details has the other convention, `logit_scale_cosine`: the mean of logit_scale · cos, not cut at 0,
    as Paddle's published curves have it (CLIP of OpenAI learned a scale of 100)."""
    lengths = np.linalg.norm(pictures, axis=1) * np.linalg.norm(texts, axis=1)
    cosines = np.einsum("nd,nd->n", pictures, texts, dtype=np.float64) / np.maximum(lengths, 1e-12)
    scores = 100 * np.maximum(cosines, 0)
    details = {"cosine": float(cosines.mean()), "logit_scale": float(logit_scale)}
    details["logit_scale_cosine"] = details["logit_scale"] * details["cosine"]
    return measure(scores.mean(), scores, seed=seed, details=details, bounds=(0, 100))


def diversity(generated: np.ndarray, *, seed: int) -> Measured:
    """The mean Euclidean distance of two generated pictures: 0 where all are one. Terms: twice a row's mean."""
    means = np.empty(len(generated))
    for block, found in squared_distances(generated, generated):
        found[np.arange(len(found)), np.arange(block.start, block.stop)] = 0
        means[block] = np.sqrt(found).sum(axis=1) / (len(generated) - 1)
    return measure(means.mean(), 2 * means, seed=seed, bounds=(0, np.inf))


def nearest_training(generated: np.ndarray, training: np.ndarray, *, seed: int) -> Measured:
    """Does a model copy? The mean distance of a generated picture to the nearest training row, by the same mean of
    training rows to the nearest other one: that is what a new row of the same kind would have. About 1 of a model that
    does not copy, towards 0 of one that does. The interval is of other generated pictures: the training rows, and those
    of them that the distances of training rows are taken of, are given.

    details: `distance` in the unit of the features; `p_copied`, of a Mann-Whitney test (as Meehan et al. 2020,
    arXiv:2004.05675) that generated pictures are no nearer than training rows are; `closest`, [number of the picture,
    number of the training row, distance] of the ten nearest.
    """
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

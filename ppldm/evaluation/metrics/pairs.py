"""Means over pairs: CLIP score, of a picture and its text; PSNR, SSIM and LPIPS, of a picture and what an autoencoder
makes of it."""

from collections.abc import Sequence

import numpy as np
from scipy.ndimage import correlate1d

from .bootstrap import Measured, measure

MOST_DB = 100.0
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

"""How much the squared error of a prediction counts at a noise level: a function of a**2 and s**2, with
x_t = a x_0 + s noise.

What is predicted differs from x_0, at a given x_t, by a factor: an error of the noise is a / s times that of x_0, of
the velocity (a**2 + s**2) / s times, which is 1 / s where the squares sum to 1, and of the flow 1 / s times.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class MinSNR:
    """min(SNR, gamma) on the error of x_0, whatever is predicted: Hang et al. 2023 (arXiv:2303.09556, section 3.4)."""

    gamma: float = 5.0

    def weights(self, signal: np.ndarray, noise: np.ndarray, prediction_type: str) -> np.ndarray:
        """For a**2 and s**2, float64, of each level. Written so that no end divides by 0 that need not."""
        if prediction_type == "epsilon":
            return np.minimum(1.0, self.gamma * noise / signal)
        if prediction_type == "sample":
            return np.minimum(signal / noise, self.gamma)
        return np.minimum(signal, self.gamma * noise)


@dataclass(frozen=True)
class P2:
    """(k + SNR)**-gamma on the error of what is predicted: Choi et al. 2022 (arXiv:2204.00227, equation 8)."""

    gamma: float = 1.0
    k: float = 1.0

    def weights(self, signal: np.ndarray, noise: np.ndarray, prediction_type: str) -> np.ndarray:
        """For a**2 and s**2, float64, of each level."""
        return (self.k + signal / noise) ** -self.gamma


@dataclass(frozen=True)
class Adaptive:
    """1 / (a running mean of the error at such levels), as Stable Cascade's published trainer weights: `num_buckets` of
    log-SNR from -10 to 10, each mean begins at 1 and keeps `decay` of itself at an update that has such samples."""

    decay: float = 0.99
    num_buckets: int = 300
    log_snr_range: tuple[float, float] = (-10.0, 10.0)
    weight_range: tuple[float, float] = (1e-7, 1e7)

    def buckets(self, signal: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """The bucket of each level, int64; the first and the last have all that is beyond the range."""
        return np.searchsorted(np.linspace(*self.log_snr_range, self.num_buckets - 1), log_snr(signal, noise))


LossWeighting = MinSNR | P2 | Adaptive


def log_snr(signal: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """ln(a**2 / s**2), float64; -inf where nothing but noise is left."""
    with np.errstate(divide="ignore"):
        return np.log(signal) - np.log(noise)

"""P2: levels with little noise count less; made for the error of the noise.

    (k + SNR)^-gamma on the error of what is predicted

Choi et al. 2022 (arXiv:2204.00227, equation 8).
Published: better on several data sets and samplers (abstract, without a figure)."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class P2:
    p2_gamma: float = 1.0
    p2_k: float = 1.0

    def weights(self, signal: np.ndarray, noise: np.ndarray, prediction_type: str) -> np.ndarray:
        return (self.p2_k + signal / noise) ** -self.p2_gamma


METHOD = P2

"""Levels in the middle are drawn more often.

    t / T = sigmoid(n), n normal with --logit_mean 0 and --logit_std 1

Esser et al. 2024 (arXiv:2403.03206, section 3.1); n is the inverse of u. Published: as `flow`, without a figure."""

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np


@dataclass(frozen=True)
class LogitNormal:
    logit_mean: float = 0.0
    logit_std: float = 1.0

    def __call__(self, uniform: np.ndarray) -> np.ndarray:
        return np.array([self._share(u) for u in uniform.tolist()])

    def _share(self, u: float) -> float:
        normal = self.logit_mean + self.logit_std * NormalDist().inv_cdf(u) if u > 0 else -math.inf
        return 1.0 / (1.0 + math.exp(-max(normal, -700.0)))


METHOD = LogitNormal

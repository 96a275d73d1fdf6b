"""Noise levels of samples that are not all equally often, or are spread evenly over each global batch.

Where they are spread, sample i of the B of an update takes u = (i * stride mod B + shift) / B, with one `shift` in
[0, 1) for the update and a stride that has no divisor in common with B: each of the B equal parts of [0, 1) has one
sample (Kingma et al. 2021, arXiv:2107.00630, appendix I.1), and each rank's or micro-batch's samples, which are
neighbours, are spread nearly as evenly. i is the sample's place in the update, so that ranks, micro-batches and loader
processes change nothing, and resuming neither.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar

import numpy as np

from ..utils.rng import Stream

_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Strata:
    """Where a micro-batch's samples stand: from place `first` on among the `size` of update `step`, counted from 0."""

    step: int
    first: int
    size: int

    def uniform(self, count: int, shift: float) -> np.ndarray:
        """[count] float64 in [0, 1)."""
        stride = max(1, round(self.size * _GOLDEN))
        while math.gcd(stride, self.size) != 1:
            stride += 1
        places = np.arange(self.first, self.first + count) * stride % self.size
        return np.minimum((places + shift) / self.size, np.nextafter(1.0, 0.0))


@dataclass(frozen=True)
class Level:
    """One of `below` noise levels, int64 []: floor(below * u), or with `logit` (mean, standard deviation) floor(below *
    sigmoid(n)) of a normal n, the inverse of u: levels as Esser et al. 2024 draw them (arXiv:2403.03206, section 3.1).

    u is uniform in [0, 1): of the sample alone, or `stratified`, where it is one of a training's.
    """

    stream: Stream
    below: int
    logit: tuple[float, float] | None = None
    stratified: bool = False
    dtype: ClassVar[type] = np.int64

    def shape(self, height: int, width: int) -> tuple[int, ...]:
        """Of one sample."""
        return ()

    def draw(self, keys: list, generators, strata: Strata | None) -> np.ndarray:
        """For each of `keys` (epoch, row), which stand at `strata`; None: they are of no update."""
        if self.stratified and strata:
            shift = generators(Stream.LEVEL_SHIFT, (0, strata.step)).random()
            uniform = strata.uniform(len(keys), shift)
        else:
            uniform = np.array([generators(self.stream, key).random() for key in keys])
        if self.logit:
            uniform = np.array([self._logit_normal(u) for u in uniform.tolist()])
        return np.minimum(uniform * self.below, self.below - 1).astype(np.int64)

    def _logit_normal(self, u: float) -> float:
        mean, deviation = self.logit
        normal = mean + deviation * NormalDist().inv_cdf(u) if u > 0 else -math.inf
        return 1.0 / (1.0 + math.exp(-max(normal, -700.0)))

"""Any average of the weights after the training (`ppldm ema`), from two whose widths grow with it (`--ema_posthoc`).

    update t of n has the weight (g + 1) t^g / n^(g + 1), the start none

EDM2 (Karras et al. 2023, arXiv:2312.02696, section 3.1). Published: part of a record, FID 1.81 on ImageNet 512
(abstract), no figure of it alone."""

from dataclasses import dataclass
from functools import cache

import numpy as np


@dataclass(frozen=True)
class PowerDecay:
    std: float  # relative to n

    def at(self, update: int) -> float:
        return (1 - 1 / update) ** (exponent_of(self.std) + 1)


@cache
def exponent_of(std: float) -> float:
    """The g of a profile of standard deviation std n, from std^2 = (g + 1) / ((g + 2)^2 (g + 3))."""
    inverse = std**-2
    roots = np.roots([1, 7, 16 - inverse, 12 - inverse])
    return float(max(roots.real[np.abs(roots.imag) < 1e-6 * np.abs(roots)]))


METHOD = PowerDecay

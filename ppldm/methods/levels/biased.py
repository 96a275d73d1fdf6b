"""Some levels are drawn several times as often as the others: by default the noisiest quarter.

    density m at a <= t / T < b, 1 elsewhere, divided by their integral

diffusers' `--timestep_bias_strategy` (examples/text_to_image/train_text_to_image_sdxl.py): "later" is a = 1 - portion
and b = 1, "earlier" a = 0 and b = portion, "range" its begin and end over 1000. Published: no figure."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Biased:
    timestep_bias_from: float = 0.75
    timestep_bias_to: float = 1.0
    timestep_bias_multiplier: float = 2.0

    def __call__(self, uniform: np.ndarray) -> np.ndarray:
        """The inverse of the distribution, linear between the ends of its three parts."""
        first, last, factor = self.timestep_bias_from, self.timestep_bias_to, self.timestep_bias_multiplier
        masses = np.cumsum([0.0, first, factor * (last - first), 1.0 - last])
        shares = np.interp(uniform * masses[-1], masses, [0.0, first, last, 1.0])
        return np.minimum(shares, np.nextafter(1.0, 0.0))


METHOD = Biased

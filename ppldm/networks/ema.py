"""Moving averages of parameters: shadow <- d shadow + (1 - d) weight, with d by the number n of optimizer updates so
far (n = 1, 2, ...), which is part of the state: else a resumed run would wipe the average out."""

from collections.abc import Collection, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import numpy as np
import paddle

from .cpu_operators.layers import operators_are_usable
from .cpu_operators.operators import average


@dataclass(frozen=True)
class GradualDecay:
    """d = min(decay, (1 + n) / (10 + n)) at every update: the published LitEma."""

    decay: float = 0.9999

    def at(self, update: int) -> float:
        """The decay of the `update`-th update, counted from 1."""
        return min(self.decay, (1 + update) / (10 + update))


@dataclass(frozen=True)
class IntervalDecay:
    """d = beta at every `iters`-th update after the first `start_iters`, d = 0 (a copy) at every `iters`-th before;
    else the average stays. The form of Stable Cascade's training, whose numbers are the defaults."""

    start_iters: int = 5000
    iters: int = 100
    beta: float = 0.9

    def at(self, update: int) -> float:
        """The decay of the `update`-th update, counted from 1; 1 leaves the average as it is."""
        if update % self.iters:
            return 1.0
        return self.beta if update > self.start_iters else 0.0


@dataclass(frozen=True)
class PowerDecay:
    """The average of relative standard deviation `std`, which grows with the run (EDM2: Karras et al. 2023,
    arXiv:2312.02696, section 3.1): update t of n has the weight (g + 1) t^g / n^(g + 1), the start none."""

    std: float

    def at(self, update: int) -> float:
        """The decay of the `update`-th update, counted from 1; 0 at the first."""
        return (1 - 1 / update) ** (exponent_of(self.std) + 1)


@cache
def exponent_of(std: float) -> float:
    """The g of a profile of standard deviation std n, from std^2 = (g + 1) / ((g + 2)^2 (g + 3))."""
    inverse = std**-2
    roots = np.roots([1, 7, 16 - inverse, 12 - inverse])
    return float(max(roots.real[np.abs(roots.imag) < 1e-6 * np.abs(roots)]))


class ExponentialMovingAverage:
    """Float32 averages of the given parameters (name to parameter), or of those that are kept here."""

    def __init__(
        self, parameters: dict, decay: GradualDecay | IntervalDecay | PowerDecay, kept: Collection | None = None
    ):
        self.decay = decay
        self.num_updates = 0
        self.parameters = parameters
        self._at_once = operators_are_usable() and all(one.dtype == paddle.float32 for one in parameters.values())
        kept = parameters if kept is None else kept
        self.shadow = {name: parameters[name].detach().clone().astype("float32") for name in kept}

    @paddle.no_grad()
    def update(self, master_weights: Mapping) -> None:
        """Take in the parameters; float32 `master_weights` by Paddle's names stand for half-precision ones."""
        self.num_updates += 1
        decay = self.decay.at(self.num_updates)
        if decay == 1.0:
            return
        if self._at_once and decay:
            return average(list(self.shadow.values()), [self.parameters[name] for name in self.shadow], 1.0 - decay)
        for name, shadow in self.shadow.items():
            parameter = self.parameters[name]
            value = master_weights.get(parameter.name, parameter).detach().astype("float32")
            if decay == 0.0:
                shadow.set_value(value)
            else:
                shadow.add_((value - shadow).scale_(1.0 - decay))

    @contextmanager
    def applied(self):
        """Inside the block the parameters hold their averages; afterwards what they held before, to the bit."""
        kept = {name: self.parameters[name].detach().clone() for name in self.shadow}
        try:
            self._assign(self.shadow)
            yield
        finally:
            self._assign(kept)

    def state_dict(self) -> dict:
        """Averages under their parameters' names, and `num_updates`."""
        return {**self.shadow, "num_updates": self.num_updates}

    def load_state_dict(self, state: dict) -> None:
        """Take over what `state_dict` gave. Raises KeyError for a parameter that it lacks."""
        self.num_updates = int(state["num_updates"])
        for name, shadow in self.shadow.items():
            shadow.set_value(state[name])

    @paddle.no_grad()
    def _assign(self, values: dict) -> None:
        for name, value in values.items():
            parameter = self.parameters[name]
            parameter.set_value(value.astype(parameter.dtype))

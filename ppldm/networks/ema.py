"""Moving averages of parameters: shadow <- d shadow + (1 - d) weight, with d by the number n of optimizer updates so
far (n = 1, 2, ...), which is part of the state: else a resumed run would wipe the average out."""

from collections.abc import Collection, Mapping
from contextlib import contextmanager
from typing import Protocol

import paddle

from .cpu_operators.layers import operators_are_usable
from .cpu_operators.operators import average


class Decay(Protocol):
    """A file of ppldm/methods/averages."""

    def at(self, update: int) -> float:
        """The decay of the `update`-th update, counted from 1; 1 leaves the average as it is."""


class ExponentialMovingAverage:
    """Float32 averages of the given parameters (name to parameter), or of those that are kept here; `offloaded`: in
    host memory, where they are updated too."""

    def __init__(self, parameters: dict, decay: Decay, kept: Collection | None = None, offloaded: bool = False):
        self.decay, self.offloaded = decay, offloaded
        self.num_updates = 0
        self.parameters = parameters
        self._at_once = operators_are_usable() and all(one.dtype == paddle.float32 for one in parameters.values())
        kept = parameters if kept is None else kept
        self.shadow = {name: self._at_home(parameters[name].detach().clone()).astype("float32") for name in kept}

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
            value = self._at_home(master_weights.get(parameter.name, parameter).detach()).astype("float32")
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
            shadow.set_value(self._at_home(paddle.to_tensor(state[name])) if self.offloaded else state[name])

    def _at_home(self, value):
        """A tensor where the averages lie."""
        return value.cpu() if self.offloaded else value

    @paddle.no_grad()
    def _assign(self, values: dict) -> None:
        for name, value in values.items():
            parameter = self.parameters[name]
            parameter.set_value(value.astype(parameter.dtype))

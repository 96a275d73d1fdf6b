"""Exponential moving average of parameters, with all of its state.

shadow <- d shadow + (1 - d) weight after each optimizer update, d = min(decay, (1 + n) / (10 + n)) at the n-th update
(n = 1, 2, ...), as in the published LitEma. The number of updates is part of the state: without it, a resumed run
would start again at d = 2/11 and wipe the average out.
"""

from contextlib import contextmanager

import paddle


def decay_at(update: int, decay: float) -> float:
    """The decay of the `update`-th update, counted from 1."""
    return min(decay, (1 + update) / (10 + update))


class ExponentialMovingAverage:
    """Float32 averages of the given parameters (name to parameter)."""

    def __init__(self, parameters: dict, decay: float = 0.9999):
        if not 0.0 <= decay <= 1.0:
            raise ValueError(f"ema decay {decay} is not in [0, 1]")
        self.decay = decay
        self.num_updates = 0
        self.parameters = parameters
        self.shadow = {name: p.detach().clone().astype("float32") for name, p in parameters.items()}

    @paddle.no_grad()
    def update(self) -> None:
        """Take in the parameters as they are after an optimizer update."""
        self.num_updates += 1
        weight = 1.0 - decay_at(self.num_updates, self.decay)
        for name, parameter in self.parameters.items():
            shadow = self.shadow[name]
            shadow.add_((parameter.detach().astype("float32") - shadow).scale_(weight))

    @contextmanager
    def applied(self):
        """Inside the block the parameters hold their averages; afterwards what they held before, to the bit."""
        kept = {name: p.detach().clone() for name, p in self.parameters.items()}
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
        for name, parameter in self.parameters.items():
            parameter.set_value(values[name].astype(parameter.dtype))

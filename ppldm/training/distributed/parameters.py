"""Parameters that are shared out over ranks: `--sharding stage3`.

Between updates a rank holds only those parameters that it owns (`sharding.assign_owners`), and averages of these only.
The trained networks are cut into units, layers of a bounded size. The owners hand a unit's parameters out before it is
called, and the other ranks let go of them after it. They hand them out again before gradients pass through it, and each
goes once its own gradient is there. This is stage 3 of ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054), cut between
parameters. Law: a value that is handed out is a copy, and gradients are reduced by stage 2's messages, so losses,
parameters, averages and checkpoints are stage 2's, to the bit.

Whole on all ranks stay frozen networks, and the few parameters that a layer above all units has itself. All are whole
while a run starts, while it draws or validates, and while it exports. All ranks call the same layers in the same order:
who looks at a batch of its own is inside of `whole`.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import paddle
from paddle import nn

from ...config.training import AT_A_TIME
from ...utils.processes.ranks import waiting
from .sharding import gather_tensors


@dataclass(eq=False)
class Unit:
    """A layer whose trained parameters come and go together. calls: those of this forward pass with a way back."""

    layer: nn.Layer
    parameters: list
    calls: int = 0


def find_units(layer: nn.Layer, names: set[str], most: float) -> Iterator[Unit]:
    """The layers below `layer` that are called, with at most so many elements of the parameters with these names, or
    with most of these themselves, or with another forward than their class's, which reaches into what is below."""
    for child in layer.children():
        own = [parameter for parameter in child.parameters() if parameter.name in names]
        num_elements = sum(parameter.size for parameter in own)
        direct = sum(one.size for one in child.parameters(include_sublayers=False) if one.name in names)
        is_cut = num_elements > most and 2 * direct < num_elements and "forward" not in vars(child)
        if is_cut or type(child).forward is nn.Layer.forward:  # which a list of layers has
            yield from find_units(child, names, most)
        elif own:
            yield Unit(child, own)


class ParameterShares:
    """Stage 3 of a model that a `ShardedOptimizer` trains, from `begin` on. Its methods are collective calls."""

    def __init__(self, model, optimizer):
        optimizer.parameter_shares = self
        self.optimizer, self.world, self.trained = optimizer, optimizer.world, model.trained_parameters()
        sizes = {parameter.name: parameter.size for parameter in self.trained.values()}
        most = AT_A_TIME * sum(sizes.values()) / self.world.size
        parts = [one.layer for one in model.components.values() if one.trained]
        self.units = [unit for part in parts for unit in find_units(part, set(sizes), most)]
        self.parameters = list({one.name: one for unit in self.units for one in unit.parameters}.values())
        self.shared = {parameter.name for parameter in self.parameters}
        self._here = set(self.shared)  # names of those that all ranks hold now
        self._is_whole, self._goes_back = True, False
        model.register_forward_pre_hook(self._start)
        model.register_forward_post_hook(self._turn)
        for unit in self.units:
            unit.layer.register_forward_pre_hook(partial(self._before, unit))
            unit.layer.register_forward_post_hook(partial(self._after, unit))
            for parameter in unit.parameters:
                parameter._register_backward_hook(partial(self._went_back, unit, parameter))

    def begin(self) -> None:
        """Let go of what others own. Until then, all parameters are whole: a run starts, or goes on, as others do."""
        self._is_whole = False
        self.end_pass()

    def end_pass(self) -> None:
        """After a backward pass: let go of what is still there, such as layers that were called twice."""
        if not self._is_whole:
            self._let_go(self.parameters)
        for unit in self.units:
            unit.calls = 0

    @contextmanager
    def whole(self):
        """Inside, all ranks hold all parameters as they are then."""
        self._hand_out(self.parameters)
        self._is_whole = True
        try:
            yield
        finally:
            self.begin()

    def own(self) -> list[str]:
        """The names of the trained parameters that this rank owns, shared or not. Not a collective call."""
        return [name for name, one in self.trained.items() if self.optimizer.owns(one.name)]

    def gather(self) -> dict:
        """The trained parameters by name, in the main process's host memory; nothing on the others."""
        return gather_tensors({name: self.trained[name] for name in self.own()}, self.world)

    @contextmanager
    def whole_averages(self, averages: list):
        """Inside, the main process has the whole of these averages, in host memory."""
        own = [(average, average.shadow) for average in averages]
        try:
            for average, shadow in own:
                found = gather_tensors(shadow, self.world)
                average.shadow = {name: found[name] for name in self.trained if name in found}
            yield
        finally:
            for average, shadow in own:
                average.shadow = shadow

    def _start(self, *_) -> None:
        self._goes_back = False
        self.end_pass()

    def _turn(self, *_) -> None:
        self._goes_back = True

    def _before(self, unit: Unit, *_) -> None:
        self._hand_out(unit.parameters)

    def _after(self, unit: Unit, _layer, _given, made) -> None:
        learns = paddle.is_grad_enabled()
        if learns and self._goes_back:  # it is computed again, and goes back at once
            return
        outputs = [one for one in _tensors(made) if not one.stop_gradient] if learns else []
        for output in outputs:
            output.register_hook(partial(self._before, unit))
        unit.calls += bool(outputs)
        if not self._is_whole:
            self._let_go(unit.parameters)

    def _went_back(self, unit: Unit, parameter, *_) -> None:
        """All that was computed by this parameter has gone back, but for calls for which it was frozen."""
        if not self._is_whole and unit.calls < 2:
            self._let_go([parameter])

    @paddle.no_grad()
    def _hand_out(self, parameters: list) -> None:
        missing = [one for one in parameters if one.name not in self._here]
        if missing:
            self._here.update(one.name for one in missing)
            with waiting(self.world), paddle.amp.auto_cast(enable=False):
                self.optimizer.hand_out([one if self.optimizer.owns(one.name) else _room(one) for one in missing])

    def _let_go(self, parameters: list) -> None:
        for parameter in parameters:
            if parameter.name in self._here:
                self._here.remove(parameter.name)
                if not self.optimizer.owns(parameter.name):
                    parameter._clear_data()  # its shape stays, and what autograd keeps of it is the same tensor


def _room(parameter):
    """Memory for a parameter that has none, as a tensor that may be written: no version of the parameter is counted."""
    room = paddle.empty(parameter.shape, parameter.dtype)
    room.name = parameter.name
    room._share_buffer_to(parameter)
    return room


def _tensors(made) -> Iterator:
    """Those in what a layer gives."""
    if isinstance(made, paddle.Tensor):
        yield made
    elif isinstance(made, Mapping | list | tuple):
        for one in made.values() if isinstance(made, Mapping) else made:
            yield from _tensors(one)

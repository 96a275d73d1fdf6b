"""`--sharding stage2`: a gradient is whole on the rank that owns its parameter, and on no other.

While backward goes on, each gradient that is ready is reduced to its owner, and the others let go of it. This is stage
2 of ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054), on top of `ppldm.training.optimizer.sharding`.

Law: losses, parameters and checkpoints are, to the bit, those of a run without it. Sums keep their order: a rank adds
up its micro-batches, then the ranks are added up. So with accumulation a rank holds whole gradients until its last
micro-batch goes back, for the sum of one rank's micro-batches is kept nowhere else; without, never. Of more than two
ranks the law holds up to the order in which the library adds them, which for a reduce is not that of an all-reduce.
"""

from collections import deque
from contextlib import contextmanager
from functools import partial

import paddle
from paddle.nn.clip import ClipGradByGlobalNorm, _squared_l2_norm

from ...utils.processes.rank_watch import waiting

_SMALL = 1 << 18  # elements of a gradient that is not worth a message of its own
_MOST_ON_THE_WAY = 2  # messages


class GradientShares:
    """Reduces the gradients of a `ShardedOptimizer`'s parameters inside `reducing`.

    `reduced`: the parameters of which the last such block had gradients, the same on all ranks.
    """

    def __init__(self, optimizer):
        self.owners, self.world = optimizer.owners, optimizer.world
        self.parameters = [p for p in optimizer._parameter_list if not p.stop_gradient]
        self.reduced: list = []
        self._is_reducing = False
        self._small: dict[int, list] = {}  # owner -> parameters whose gradients are ready and not sent
        self._sent: deque = deque()  # (task, buffer, owner, parameters), oldest first
        for parameter in self.parameters:
            parameter._register_backward_hook(partial(self._take, parameter))

    @contextmanager
    def reducing(self):
        """Around the last backward of an update. A collective call."""
        self.reduced, self._is_reducing = [], True
        try:
            with waiting(self.world):
                yield
                for owner in sorted(self._small):
                    self._send(owner, self._small[owner])
                while self._sent:
                    self._finish_oldest()
        finally:
            self._is_reducing = False
            self._small = {}
            self._sent.clear()

    @paddle.no_grad()
    def squares(self) -> list:
        """The squared norm of each whole gradient, in the order of the parameters, on all ranks; a collective call."""
        reduced = {parameter.name for parameter in self.reduced}
        own = [
            _squared_l2_norm(p.grad).reshape([]) if p.grad is not None else paddle.zeros([])
            for p in self.parameters
            if p.name in reduced
        ]
        if not own:
            return []
        squares = paddle.stack(own)
        with waiting(self.world):
            paddle.distributed.all_reduce(squares)  # each is 0 on all ranks but its owner
        return squares.unbind()

    @paddle.no_grad()
    def _take(self, parameter, *_) -> None:
        """The gradient of this parameter is there."""
        if not self._is_reducing:
            return
        self.reduced.append(parameter)
        owner = self.owners[parameter.name]
        if parameter.size > _SMALL:
            self._send(owner, [parameter])
            return
        ready = self._small.setdefault(owner, [])
        ready.append(parameter)
        if sum(member.size for member in ready) > _SMALL:
            self._send(owner, self._small.pop(owner))

    @paddle.no_grad()
    def _send(self, owner: int, members: list) -> None:
        while len(self._sent) >= _MOST_ON_THE_WAY:
            self._finish_oldest()
        gradients = [member.grad for member in members]
        buffer = gradients[0] if len(members) == 1 else paddle.concat([gradient.flatten() for gradient in gradients])
        del gradients
        buffer.scale_(1.0 / self.world.size)  # before the sum, as Paddle does where it all-reduces
        if len(members) > 1 and owner != self.world.rank:
            _let_go(members)
        task = paddle.distributed.reduce(buffer, owner, sync_op=False)
        self._sent.append((task, buffer, owner, members))

    def _finish_oldest(self) -> None:
        task, buffer, owner, members = self._sent.popleft()
        task.wait()
        if owner != self.world.rank:
            _let_go(members)
        elif len(members) > 1:
            for member, piece in zip(members, buffer.split([member.size for member in members]), strict=True):
                paddle.assign(piece.reshape(member.shape), member.grad)


class ClipByGroup(ClipGradByGlobalNorm):
    """`ClipGradByGlobalNorm` by the norm of each group of parameters (`build_optimizer`), most often a single one."""

    def _dygraph_clip(self, params_grads):
        groups = _grouped(params_grads, [parameter for parameter, _ in params_grads])
        return [pair for members in groups.values() for pair in super(ClipByGroup, self)._dygraph_clip(members)]


class ClipSharedGradients(ClipGradByGlobalNorm):
    """`ClipByGroup` by the norms of all ranks' gradients. A collective call."""

    def __init__(self, clip_norm: float, gradients: GradientShares):
        super().__init__(clip_norm)
        self.gradients = gradients

    @paddle.no_grad()
    def _dygraph_clip(self, params_grads):
        squares = self.gradients.squares()
        reduced = {parameter.name for parameter in self.gradients.reduced}
        found = _grouped(squares, [p for p in self.gradients.parameters if p.name in reduced] if squares else [])
        limit, factors = paddle.full([1], self.clip_norm), {}
        for group, members in found.items():
            factors[group] = limit / paddle.maximum(paddle.stack(members).sum().sqrt(), limit)
        return [(p, gradient.multiply_(factors[_group_of(p)])) for p, gradient in params_grads]


def _grouped(values: list, parameters: list) -> dict[str, list]:
    """One value for each parameter, by the groups of these."""
    groups: dict[str, list] = {}
    for value, parameter in zip(values, parameters, strict=True):
        groups.setdefault(_group_of(parameter), []).append(value)
    return groups


def _group_of(parameter) -> str:
    return parameter.optimize_attr.get("clip_group", "")


def _let_go(parameters: list) -> None:
    for parameter in parameters:
        parameter.clear_gradient(False)  # positional: by name Paddle 3.3 takes it for True

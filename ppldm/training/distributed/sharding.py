"""An AdamW whose state is sharded over ranks.

`--sharding stage1` and `stage2`: each rank keeps the optimizer's state of its share of the parameters only. Law:
losses, parameters and checkpoints are, to the bit, those of a run without it. Gradients are all-reduced and clipped as
ever; then each rank updates the parameters that it owns, and hands their new values to the others. This is stage 1 of
ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054), cut between parameters and not inside them.

A checkpoint holds the whole state. It is gathered when one is saved, and cut to the own share when one is read: any
number of ranks goes on from it, with shares or without.
"""

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import paddle

from ...utils.log import get_logger
from ...utils.machine.devices import device_name
from ...utils.processes.ranks import World, gather_objects, waiting
from ..optimizer import has_master, in_8_bits, matrices_of, parameter_of, squared_norms

_MOMENT_BYTES = 4  # of an element, in float32; AdamW has two moments of it
_MASTER_BYTES = 4
_SMALL = 1 << 18  # elements of a parameter or a gradient that is not worth a message of its own
_MOST_ON_THE_WAY = 2  # messages with gradients


def assign_owners(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """The rank that owns each of the parameters, whose sizes are given in elements. From the largest to the smallest,
    each goes to the rank that has least so far, the lowest of these. So no rank has more than another by more than one
    parameter's size (Graham 1969, "Bounds on multiprocessing timing anomalies")."""
    loads = [(0, rank) for rank in range(num_ranks)]
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        load, owners[index] = heapq.heappop(loads)
        heapq.heappush(loads, (load + sizes[index], owners[index]))
    return owners


class ShardedOptimizer:
    """Mixin before a kind of `paddle.optimizer.AdamW`: updates and state of the parameters that this rank owns. `step`
    is a collective call. `state_dict` is the own share, `set_state_dict` takes the whole and keeps the share."""

    def __init__(self, *, parameters: list, world: World, **settings):
        super().__init__(parameters=parameters, **settings)  # type: ignore[call-arg]
        self.world = world
        owners = assign_owners([p.size for p in parameters], world.size)
        self.owners = {p.name: owner for p, owner in zip(parameters, owners, strict=True)}
        self.gradients: GradientShares | None = None  # stages 2 and 3
        self.parameter_shares: Any = None  # stage 3: a `ParameterShares`
        self.names_with_master: set[str] = set()  # parameters that have a float32 master on the rank that owns them

    def share_gradients(self) -> None:
        """Stage 2 from here on: `gradients.reducing` takes the place of an all-reduce."""
        self.gradients = GradientShares(self)

    def owns(self, name: str) -> bool:
        """Whether the state of the parameter with this name is here."""
        return self.owners[name] == self.world.rank

    def _create_optimization_pass(self, parameters_and_grads, *args, **kwargs):
        """Of all parameters and their gradients, clipped already; of the own ones alone with shared gradients."""
        own = [(parameter, gradient) for parameter, gradient in parameters_and_grads if self.owns(parameter.name)]
        done = super()._create_optimization_pass(own, *args, **kwargs)
        updated = self.gradients.reduced if self.gradients else [parameter for parameter, _ in parameters_and_grads]
        self.names_with_master.update(p.name for p in updated if has_master(self, p))
        kept = self.parameter_shares.shared if self.parameter_shares else ()
        with waiting(self.world):
            self.hand_out([parameter for parameter in updated if parameter.name not in kept])
        return done

    def hand_out(self, parameters: list) -> None:
        """Broadcast new values from their owners: large ones alone, the small ones of an owner and type together."""
        messages: dict[tuple, list] = {}
        for parameter in parameters:
            owner = self.owners[parameter.name]
            alone = parameter.name if parameter.size > _SMALL else ""
            messages.setdefault((owner, parameter.dtype, alone), []).append(parameter)
        sent = []
        for (owner, dtype, alone), members in messages.items():
            if alone:
                buffer = members[0]
            elif owner == self.world.rank:
                buffer = paddle.concat([member.flatten() for member in members])
            else:
                buffer = paddle.empty([sum(member.size for member in members)], dtype)
            sent.append((buffer, paddle.distributed.broadcast(buffer, owner, sync_op=False)))
        for ((owner, _, alone), members), (buffer, task) in zip(messages.items(), sent, strict=True):
            task.wait()
            if not alone and owner != self.world.rank:
                for member, piece in zip(members, buffer.split([member.size for member in members]), strict=True):
                    paddle.assign(piece.reshape(member.shape), member)

    def set_state_dict(self, state_dict: dict) -> None:
        """Keep this rank's share of the whole state, on the device of training."""
        masters = state_dict.get("master_weights", {})
        self.names_with_master = set(masters)
        own = {key: state_dict[key] for key in state_dict.keys() & {"LR_Scheduler"}}
        for key, value in state_dict.items():
            name = parameter_of(key)
            if name and self.owns(name):
                own[key] = _to_device(value)
        if masters:
            own["master_weights"] = {name: _to_device(value) for name, value in masters.items() if self.owns(name)}
        super().set_state_dict(own)

    def whole_state(self) -> dict:
        """All ranks' `state_dict` in one, in the main process's memory; nothing on the others. A collective call."""
        own = self.state_dict()
        rest = {key: own.pop(key) for key in own.keys() & {"LR_Scheduler"}}
        masters = gather_tensors(own.pop("master_weights", {}), self.world)
        whole = gather_tensors(own, self.world)
        if not self.world.is_main:
            return {}
        return {**whole, **({"master_weights": masters} if masters else {}), **rest}

    def all_masters(self) -> Mapping:
        """The float32 masters of all ranks by Paddle's parameter name. To look one up is a collective call: all ranks
        look up the same ones in the same order."""
        return _AllMasters(self)

    def log_share(self) -> None:
        """Say what shares save, once parameters have their types."""
        matrices, small = matrices_of(self), in_8_bits(self)
        moments = {
            p.name: 2 if p.name in small else _MOMENT_BYTES * (1 if p.name in matrices else 2)
            for p in self._parameter_list
        }
        sizes = {p.name: p.size * (moments[p.name] + _MASTER_BYTES * has_master(self, p)) for p in self._parameter_list}
        total, own = sum(sizes.values()), sum(size for name, size in sizes.items() if self.owns(name))
        stage = "stage3" if self.parameter_shares else "stage2" if self.gradients else "stage1"
        ranks = self.world.rank, self.world.size
        text = "--sharding %s: this rank keeps %.3f GB of the optimizer's %.3f GB, rank %d of %d"
        get_logger().info(text, stage, own / 1e9, total / 1e9, *ranks)


def sharded(kind: type) -> type:
    """A kind of AdamW over ranks."""
    return type(f"Sharded{kind.__name__}", (ShardedOptimizer, kind), {})


class GradientShares:
    """Reduces the gradients of a `ShardedOptimizer`'s parameters inside `reducing`. `reduced`: the parameters of which
    the last such block had gradients, the same on all ranks."""

    def __init__(self, optimizer):
        self.optimizer, self.owners, self.world = optimizer, optimizer.owners, optimizer.world
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
            if self.optimizer.parameter_shares:
                self.optimizer.parameter_shares.end_pass()
        finally:
            self._is_reducing = False
            self._small = {}
            self._sent.clear()

    @paddle.no_grad()
    def squared_norms(self) -> tuple[list, list]:
        """`optimizer.squared_norms` of the whole gradients, on all ranks; a collective call."""
        reduced = {parameter.name for parameter in self.reduced}
        learned = [parameter for parameter in self.parameters if parameter.name in reduced]
        if not learned:
            return [], []
        own, squares = squared_norms(learned, self.optimizer)
        found = dict(zip([parameter.name for parameter in own], squares, strict=True))
        whole = paddle.stack([found.get(parameter.name, paddle.zeros([])) for parameter in learned])
        with waiting(self.world):
            paddle.distributed.all_reduce(whole)  # each is 0 on all ranks but its owner
        return learned, whole.unbind()

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


def _let_go(parameters: list) -> None:
    for parameter in parameters:
        parameter.clear_gradient(False)  # positional: by name Paddle 3.3 takes it for True


def gather_tensors(tensors: dict, world: World) -> dict:
    """All ranks' tensors by key, with their names, in the main process' host memory; {} on the others. One after
    another, so that no device needs room for more than one that is not its own."""
    whole = {}
    # Those of one element lie in host memory on some devices, whose collectives do not take them.
    own = {
        key: (one.name, (one.shape, str(one.dtype)[7:]), one.numpy() if one.size == 1 else None)
        for key, one in tensors.items()
    }
    for rank, described in enumerate(gather_objects(own, world)):
        for key, (name, kind, small) in described.items():
            if small is None:
                value = _broadcast(tensors.get(key), rank, world, *kind)
            else:
                value = paddle.to_tensor(small, place=paddle.CPUPlace())
            if world.is_main:
                whole[key] = value.cpu()
                whole[key].name = name
    return whole


def _broadcast(value, rank: int, world: World, shape, dtype: str = "float32"):
    """The `value` of `rank`, on all ranks."""
    value = value if world.rank == rank else paddle.empty(shape, dtype)
    with waiting(world):
        paddle.distributed.broadcast(value, rank)
    return value


def _to_device(value):
    moved = value.to(device_name())
    moved.name = value.name
    return moved


class _AllMasters(Mapping):
    def __init__(self, optimizer: ShardedOptimizer):
        self.optimizer = optimizer
        self.shapes = {p.name: p.shape for p in optimizer._parameter_list if p.name in optimizer.names_with_master}

    def __getitem__(self, name: str):
        own = self.optimizer._master_weights.get(name)
        return _broadcast(own, self.optimizer.owners[name], self.optimizer.world, self.shapes[name])

    def __contains__(self, name) -> bool:  # Mapping's own looks it up
        return name in self.shapes

    def __iter__(self):
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

"""One of two ranks that do together what training does, as a script: python two_ranks.py FACTS. Writes FACTS-<rank>."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import paddle
from paddle.distributed.fleet.utils import recompute
from paddle.distributed.fleet.utils.hybrid_parallel_util import fused_allreduce_gradients

from ppldm.methods.averages.ema import GradualDecay
from ppldm.networks.ema import ExponentialMovingAverage
from ppldm.networks.model import Component, Loss, Model
from ppldm.training.checkpoint import TrainingState
from ppldm.training.distributed import parameters as parameters_module
from ppldm.training.distributed import sharding as shares_module
from ppldm.training.distributed.rank_checks import check_ranks
from ppldm.training.optimizer import ClipByGroup
from ppldm.training.run_folder import Order
from ppldm.training.train import UpdateGuard, agree, train_step
from ppldm.utils.errors import TrainingError
from ppldm.utils.processes.ranks import World, barrier, gather_objects, join_world

SIZES = [(4, 6), (6, 30), (30, 3)]


class Layers(Model):
    """The loss is the mean of squares of what some layers make of `pixels`, [B, 4]; one of them is never asked."""

    inputs = {"pixels": None}

    @property
    def networks(self):
        return {"layers": Component(self.layers, trained=True)}

    def __init__(self):
        super().__init__()
        with paddle.utils.unique_name.guard():
            self.layers = paddle.nn.LayerList([paddle.nn.Linear(*size) for size in SIZES])
            self.idle = paddle.nn.Linear(2, 2)
        rng = np.random.default_rng(0)
        for parameter in self.parameters():
            parameter.set_value(rng.standard_normal(parameter.shape).astype(np.float32))

    def forward(self, pixels):
        for layer in self.layers:
            pixels = layer(pixels).tanh()
        return Loss((pixels**2).mean())


class Critic(Layers):
    """Two layers, as one unit, are called while they are frozen, and then to learn, as a discriminator is; both ways go
    back side by side. The last layer is computed again. One parameter is in no layer below."""

    def __init__(self):
        super().__init__()
        with paddle.utils.unique_name.guard("critic_"):
            layers = [paddle.nn.Linear(6, 10), paddle.nn.Tanh(), paddle.nn.Linear(10, 6)]
            self.layers[1], self.layers[2] = paddle.nn.Sequential(*layers), paddle.nn.Linear(6, 3)
            self.gain = self.create_parameter([6], default_initializer=paddle.nn.initializer.Constant(1.5))
        rng = np.random.default_rng(1)
        for parameter in self.parameters():
            parameter.set_value(rng.standard_normal(parameter.shape).astype(np.float32))

    def forward(self, pixels):
        first, critic, last = self.layers
        hidden = first(pixels).tanh() * self.gain
        for parameter in critic.parameters():
            parameter.stop_gradient = True
        judged = critic(hidden)
        for parameter in critic.parameters():
            parameter.stop_gradient = False
        learned = critic(hidden.detach())
        again = recompute(last, hidden)
        return Loss((learned**2).mean() + (judged**2).mean() + (again**2).mean())


def batches(rank: int, step: int = 0) -> list[dict]:
    """Two micro-batches of one rank."""
    rng = np.random.default_rng(10 * step + rank)
    return [
        {"pixels": paddle.to_tensor(rng.standard_normal((2, 4), dtype=np.float32)),
         "row_ids": paddle.to_tensor([100 * rank + 2 * number, 100 * rank + 2 * number + 1])}
        for number in range(2)
    ]  # fmt: skip


def start(model, world: World, sharded: bool, clip: float | None = 0.01) -> UpdateGuard:
    """AdamW and the rest of an update."""
    clip = ClipByGroup(clip) if clip else None
    scheduler = paddle.optimizer.lr.LambdaDecay(0.1, lambda step: 1.0)
    settings = {"learning_rate": scheduler, "parameters": model.parameters(), "grad_clip": clip}
    if sharded:
        optimizer = shares_module.sharded(paddle.optimizer.AdamW)(world=world, **settings)
        optimizer.share_gradients()
    else:
        optimizer = paddle.optimizer.AdamW(**settings)
    return UpdateGuard(TrainingState(model, optimizer, scheduler), world, 1, nullcontext)


def count_gradient_bytes(parameters) -> int:
    return sum(p.grad.size * p.grad.element_size() for p in parameters if p.grad is not None)


def bits(tensors) -> list:
    return [None if tensor is None else tensor.numpy().tobytes().hex() for tensor in tensors]


def reduce_gradients(world: World) -> dict:
    """The gradients of two micro-batches, whole and shared out."""
    whole, model = Layers(), Layers()
    for batch in batches(world.rank):
        whole(batch["pixels"]).value.backward()
    fused_allreduce_gradients(whole.parameters(), None)
    optimizer = start(model, world, True).state.optimizer
    shares, (first, last) = optimizer.gradients, batches(world.rank)
    model(first["pixels"]).value.backward()
    before = count_gradient_bytes(model.parameters())
    with shares.reducing():
        model(last["pixels"]).value.backward()
    pairs = list(zip(whole.parameters(), model.parameters(), strict=True))
    gradients = [p.grad for p in whole.parameters() if p.grad is not None]
    found = {
        "whole": bits(one.grad for one, _ in pairs),
        "shared": bits(other.grad for _, other in pairs),
        "owned": [optimizer.owns(other.name) for _, other in pairs],
        "bytes": [before, count_gradient_bytes(model.parameters()), count_gradient_bytes(whole.parameters())],
        "norms": [float(sum(shares.squared_norms()[1])) ** 0.5, float(sum((g**2).sum() for g in gradients)) ** 0.5],
    }
    optimizer._grad_clip.squares = shares.squared_norms()
    for clip, parameters in ((optimizer._grad_clip, model.parameters()), (ClipByGroup(0.01), whole.parameters())):
        clip([(p, p.grad) for p in parameters if p.grad is not None])  # in place
    found["clipped"] = bits(one.grad for one, _ in pairs), bits(other.grad for _, other in pairs)
    return found


def update(world: World) -> dict:
    """Three updates of either kind, the second of which is skipped."""
    facts = {}
    for kind in ("whole", "shared"):
        model = Layers()
        referee = start(model, world, kind == "shared")
        referee.max_skipped = 2
        updates = []
        for step in range(3):
            micro_batches = batches(world.rank, step)
            if step == 1 and world.rank == 1:
                micro_batches[1]["pixels"][0, 0] = float("nan")
            done = train_step(referee, micro_batches)
            updates.append([done.loss, done.grad_norm, done.applied])
            check_ranks(dict(model.named_parameters()), step, world)
        left = count_gradient_bytes(model.parameters())
        facts[kind] = {"updates": updates, "weights": bits(model.parameters()), "left": left}
    return facts


def share_parameters(world: World, kind: type) -> dict:
    """Updates of stages 2 and 3, and which parameters are where."""
    parameters_module.AT_A_TIME = 1.5 if kind is Critic else 0.25
    return {"gradients": updates_of(world, kind()), "parameters": updates_of(world, kind(), stage=3)}


def updates_of(world: World, model, stage: int = 2) -> dict:
    """Three, the second of which is skipped."""
    referee = start(model, world, True)
    referee.max_skipped, state, named = 2, referee.state, model.trained_parameters()
    if stage == 3:
        parameters_module.ParameterShares(model, state.optimizer).begin()
    kept = state.shares.own() if state.shares else None
    state.ema = ExponentialMovingAverage(named, GradualDecay(0.5), kept)
    shared = sorted(name for name, p in named.items() if state.shares and p.name in state.shares.shared)
    found = {"updates": [], "here": [], "at once": [], "shared": shared, "idle": sorted({*named} - {*shared})}
    for layer in model.layers:
        layer.register_forward_post_hook(lambda *_: found["at once"].append(len(here(named, shared))))
    for step in range(3):
        micro_batches = batches(world.rank, step)
        if step == 1 and world.rank == 1:
            micro_batches[1]["pixels"][0, 0] = float("nan")
        done = train_step(referee, micro_batches)
        found["updates"].append([done.loss, done.grad_norm, done.applied])
        found["here"].append(here(named, shared))
    for name in ("weights", "restored"):
        with state.whole_parameters():
            found[name] = bits(named.values())
    with state.whole_averages():
        found["average"] = bits(state.ema.shadow.values())
    return found


def here(named: dict, shared: list) -> list[str]:
    return [name for name in shared if named[name]._is_initialized()]


def fail(world: World) -> dict:
    """What the ranks say of a bad row of rank 1, and of a parameter that differs there."""
    texts = {}
    micro_batches = batches(world.rank)
    if world.rank == 1:
        micro_batches[0]["pixels"][0, 0] = float("inf")
    parameters = {"same": paddle.ones([3]), "other": paddle.full([3], 1.0 + world.rank)}
    for name, act in (
        ("bad row", lambda: train_step(start(Layers(), world, False, None), micro_batches)),
        ("differs", lambda: check_ranks(parameters, 7, world)),
    ):
        try:
            act()
            texts[name] = None
        except TrainingError as error:
            texts[name] = str(error)
    return texts


def main(facts: str) -> None:
    world = join_world()
    shares_module._SMALL = 50  # elements: some gradients go alone, some together
    one, nan = paddle.to_tensor(1.0), paddle.to_tensor(float("nan"))
    agreed, _ = agree(one + world.rank, 3 + 2 * one * world.rank, world.rank == 1, 2 + world.rank, world)
    ordered, _ = agree(one, one, False, 0, world, None, Order(0) if world.rank else Order.SAVE_NOW | Order.STOP)
    not_agreed, _ = agree(one, nan if world.rank else one, False, 0, world)
    found = {
        "agreed": [agreed.loss, agreed.grad_norm, agreed.stop, agreed.applied, agreed.skipped_rows],
        "not agreed": [not_agreed.stop, not_agreed.applied],
        "ordered": [ordered.orders, ordered.stop, not_agreed.orders],
        "gathered": gather_objects({"rank": world.rank}, world),
        "gradients": reduce_gradients(world),
        "update": update(world),
        "parameters": {kind.__name__.lower(): share_parameters(world, kind) for kind in (Layers, Critic)},
        "errors": fail(world),
    }
    Path(f"{facts}-{world.rank}").write_text(json.dumps(found))
    barrier(world)


if __name__ == "__main__":
    main(*sys.argv[1:])

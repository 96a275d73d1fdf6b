"""Runs one after another on the same ranks, as a script: python shares.py BAD_ROW FACTS RUNS.

RUNS is a JSON file: [name, loop|trainer, flags, family] of each. Each rank writes to FACTS-<rank> the bytes of
optimizer state that it holds at the end of each run, by name, those of gradients and parameters while it trains, and
what becomes of float32 masters, which no CPU trains with.
"""

import json
import sys
import tempfile
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import paddle
from command_line import parse_arguments
from poison import poisoned

import ppldm.training.distributed.sharding
from ppldm.families.base import get_family
from ppldm.methods.averages.ema import GradualDecay
from ppldm.networks.ema import ExponentialMovingAverage
from ppldm.networks.model import Component
from ppldm.training.checkpoint import TrainingState, count_bytes
from ppldm.training.distributed.sharding import sharded
from ppldm.training.optimizer import restore_float32
from ppldm.training.prepare import prepare
from ppldm.training.train import UpdateGuard, run_loop, update_averages
from ppldm.training.trainer import run_trainer
from ppldm.utils.processes.ranks import World


def main(bad_row: str, facts: str, runs: str) -> None:
    held, counted = {}, {}
    ppldm.training.distributed.sharding._SMALL = 500  # elements: the tiny model has more and less
    for name, kind, flags, family in json.loads(Path(runs).read_text()):
        run = prepare(*parse_arguments([*flags, "--do_train"], kind == "loop", get_family(family).Config))
        # An autoencoder measures its latents with the noise of the rows.
        poison = poisoned([int(bad_row)]) if family == "ldm" else nullcontext()
        with poison, bytes_counted(run.state, counted.setdefault(name, {})):
            (run_loop if kind == "loop" else run_trainer)(run)
        optimizer = run.state.optimizer
        held[name] = count_bytes(optimizer.state_dict()) + count_bytes(optimizer._accumulators_holder)
    facts = Path(f"{facts}-{run.world.rank}")
    facts.write_text(json.dumps({"held": held, "counted": counted, "masters": masters(run.world)}))


@contextmanager
def bytes_counted(state: TrainingState, facts: dict):
    """Bytes of gradients, and of trained parameters, on this rank, as long as the block runs: most while backward, and
    for parameters forward, went on (`peak`), most when an update was settled (`settled`), and all (`all`)."""
    parameters = [p for p in state.model.parameters() if not p.stop_gradient]
    sizes = [(p, 4 * p.size) for p in parameters]  # once: Paddle takes its time to tell them
    facts |= {"all": sum(size for _, size in sizes), "peak": [0, 0], "settled": [0, 0]}
    settle, find_rows, looking = UpdateGuard.settle, UpdateGuard._find_rows, []

    def count(what):
        if not looking and state.model.training:
            there = [p.grad is not None for p, _ in sizes], [p._is_initialized() for p, _ in sizes]
            now = [sum(size for (_, size), is_there in zip(sizes, one, strict=True) if is_there) for one in there]
            facts[what] = [max(pair) for pair in zip(facts[what], now, strict=True)]

    def found(referee, *args):  # goes back once more, on this rank alone
        looking.append(True)
        rows = find_rows(referee, *args)
        looking.clear()
        return rows

    def counted(referee, *args):
        count("settled")
        return settle(referee, *args)

    UpdateGuard.settle, UpdateGuard._find_rows = counted, found
    hooks = [p._register_backward_hook(lambda *_: count("peak")) for p in parameters]
    hooks += [one.register_forward_pre_hook(lambda *_: count("peak")) for one in state.model.sublayers()
              if one._forward_pre_hooks]  # fmt: skip
    try:
        yield
    finally:
        UpdateGuard.settle, UpdateGuard._find_rows = settle, find_rows
        del hooks


def masters(world: World) -> dict:
    """Whether masters and moments of half-precision weights survive being shared out and gathered again."""
    layers, whole = half_precision_state()
    parameters = layers.parameters()
    optimizer = sharded(paddle.optimizer.AdamW)(
        parameters=parameters, world=world, learning_rate=paddle.optimizer.lr.NoamDecay(4, 2)
    )
    with tempfile.TemporaryDirectory() as folder:
        paddle.save(whole, f"{folder}/whole")
        optimizer.set_state_dict(paddle.load(f"{folder}/whole"))
        own = optimizer.state_dict()
        gathered = optimizer.whole_state()
        paddle.save(gathered, f"{folder}/gathered")
        again = paddle.load(f"{folder}/gathered")
    names = {parameter.name: parameter for parameter in parameters}
    model = SimpleNamespace(components={"layers": Component(layers, trained=True)})
    state = TrainingState(model, optimizer, None, ExponentialMovingAverage(names, GradualDecay(0.0)))
    update_averages(state)
    restore_float32(state.model, state.optimizer)
    return {
        "own": sorted(own["master_weights"]),
        "gathered": not world.is_main or (same(again, whole) and again.keys() == whole.keys()),
        "all": {name: (value.numpy() == whole["master_weights"][name].numpy()).all().item()
                for name, value in optimizer.all_masters().items()},
        "restored": same({p.name: p for p in layers.parameters()}, whole["master_weights"], names=False),
        "averages": all((state.ema.shadow[name].numpy() == whole["master_weights"][name].numpy()).all().item()
                        for name in names),
    }  # fmt: skip


def half_precision_state() -> tuple[paddle.nn.LayerList, dict]:
    """bfloat16 parameters, the same on each rank, and the state of an AdamW that keeps all of it."""
    with paddle.utils.unique_name.guard():
        layers = paddle.nn.LayerList([paddle.nn.Linear(2, size, bias_attr=False) for size in (5, 3, 1)])
        layers.to(dtype="bfloat16")
        parameters = layers.parameters()
        optimizer = paddle.optimizer.AdamW(
            paddle.optimizer.lr.NoamDecay(4, 2), parameters=parameters, multi_precision=True
        )
        rng = np.random.default_rng(0)
        for parameter in parameters:
            master = optimizer._create_master_weight(parameter)
            master.set_value(rng.standard_normal(master.shape).astype(np.float32))
            optimizer._add_moments_pows(master)
            optimizer._get_accumulator("moment1", master).set_value(rng.random(master.shape, np.float32))
    return layers, optimizer.state_dict()


def same(one: dict, other: dict, names: bool = True) -> bool:
    """Whether tensors are equal in value, type and name, in nested dicts."""
    for key, value in other.items():
        if isinstance(value, dict):
            equal = same(one[key], value)
        elif isinstance(value, paddle.Tensor):
            equal = (one[key].numpy() == value.numpy()).all() and one[key].dtype == value.dtype
            equal = equal and (one[key].name == value.name or not names)
        else:
            equal = one[key] == value
        if not equal:
            return False
    return True


if __name__ == "__main__":
    main(*sys.argv[1:])

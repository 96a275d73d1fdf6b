"""One update of the hand-written loop: accumulate, synchronise once, check, clip, step, schedule, average."""

from contextlib import nullcontext

import numpy as np
import paddle
from paddle.distributed.fleet.utils.hybrid_parallel_util import fused_allreduce_gradients

from ..utils.errors import TrainingError
from ..utils.world import World
from .checkpoint import TrainingState


def autocast(bf16: bool, fp16: bool):
    """A function that makes the mixed-precision context of the forward pass (O1); none for float32."""
    if not (bf16 or fp16):
        return nullcontext
    return lambda: paddle.amp.auto_cast(level="O1", dtype="bfloat16" if bf16 else "float16")


def train_step(state: TrainingState, micro_batches: list[dict], world: World, make_autocast, stop: bool = False):
    """Run one optimizer update and return (loss, stop), both agreed upon by all ranks.

    `micro_batches` are this rank's, each a dict of the model's inputs and `row_ids`; the loss is the mean over
    micro-batches and ranks. `stop` is true if any rank asked for it. Raises TrainingError on every rank, before any
    weight changes, if the loss is not finite on one of them.
    """
    total = 0.0
    for batch in micro_batches:
        inputs = {name: batch[name] for name in state.model.input_names}
        with make_autocast():
            loss = state.model(**inputs)
        total = total + loss.detach().astype("float32")
        scaled = loss / len(micro_batches)
        (state.scaler.scale(scaled) if state.scaler else scaled).backward()
    loss, stop = agree(total / len(micro_batches), stop, world)
    check_finite(loss, micro_batches, world)
    if world.size > 1:
        fused_allreduce_gradients([p for p in state.model.parameters() if not p.stop_gradient], None)
    if state.scaler:
        state.scaler.step(state.optimizer)
        state.scaler.update()
    else:
        state.optimizer.step()
    state.optimizer.clear_grad()
    state.scheduler.step()
    if state.ema:
        state.ema.update()
    return loss, stop


def check_finite(loss: float, micro_batches: list[dict], world: World) -> None:
    """Raises TrainingError naming this rank's rows where the agreed loss is not finite."""
    if not np.isfinite(loss):
        rows = np.concatenate([np.asarray(batch["row_ids"]) for batch in micro_batches]).tolist()
        raise TrainingError(
            f"the loss is {loss}; rows of rank {world.rank}: {rows[:8]}; lower --learning_rate or look at these rows"
        )


def agree(loss, stop: bool, world: World) -> tuple[float, bool]:
    """(mean loss, any stop) over the ranks, in one small all-reduce."""
    if world.size == 1:
        return float(loss), stop
    values = paddle.stack([loss, paddle.to_tensor(float(stop))])
    paddle.distributed.all_reduce(values)
    total, stops = values.tolist()
    return total / world.size, stops > 0

"""One update of both loops: accumulate, synchronise once, agree, clip, step, schedule, average.

All ranks agree on the loss and on the norm of the gradient before any weight changes. Where one of the two is not
finite, the update is skipped on all of them: weights, optimizer and average stay as they are, while the step is counted
and the learning rate goes on, so that which samples and which rate belong to a step never depends on what was skipped.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import paddle
from paddle.distributed.fleet.utils.hybrid_parallel_util import fused_allreduce_gradients

# What ClipGradByGlobalNorm sums too; paddle.linalg.norm takes 12 times as long.
from paddle.nn.clip import _squared_l2_norm

from ..networks.model import Loss
from ..utils.errors import TrainingError
from ..utils.log import get_logger
from ..utils.processes.rank_watch import gather_objects, waiting
from ..utils.processes.world import World
from ..utils.rng import Stream, make_rng
from .checkpoint.checkpoint import TrainingState
from .monitor.control import NOTHING, Order
from .optimizer.sharding import gradient_shares, master_weights


@dataclass(frozen=True)
class Update:
    """What came of an update, the same on all ranks but for `losses`."""

    loss: float  # mean over micro-batches and ranks
    grad_norm: float  # global norm of the ranks' mean gradient, before clipping
    stop: bool  # some rank asked to stop, or the user did
    skipped_rows: int = 0  # bad rows passed over to make its samples, on all ranks
    losses: Sequence[Loss] = ()  # this rank's, one of each micro-batch
    orders: Order = NOTHING  # what the user asks for after it

    @property
    def applied(self) -> bool:
        """False where the update was skipped."""
        return bool(np.isfinite(self.loss) and np.isfinite(self.grad_norm))


class UpdateGuard:
    """Settles each update between backward and optimizer, for either loop; knows how many were skipped in a row.

    `max_skipped` in a row raise TrainingError. An overflow of float16's scaled gradient is the loss scaler's ordinary
    business and does not count, as long as it can still lower the scale. `seed` is the run's, `step` the number of
    updates before its first. `take_orders` gives what the user asks for at the end of an update, on the main rank.
    """

    def __init__(
        self,
        state: TrainingState,
        world: World,
        max_skipped: int,
        make_autocast,
        *,
        seed: int = 0,
        step: int = 0,
        take_orders: Callable[[], Order] = lambda: NOTHING,
    ):
        self.state, self.world, self.take_orders = state, world, take_orders
        self.max_skipped, self.make_autocast = max_skipped, make_autocast
        self.num_skipped_in_a_row = 0
        self.seed, self.step = seed, step
        state.model.num_updates = step
        self._parameters = [p for p in state.model.parameters() if not p.stop_gradient]

    def seed_dropout(self, number: int) -> None:
        """Before this rank's micro-batch `number`, from 0: what its layers drop is a function of (seed, update, rank,
        number), whatever was drawn before. Paddle's layers have one generator, which nothing else draws from."""
        place = number * self.world.size + self.world.rank
        paddle.seed(int(make_rng(self.seed, Stream.DROPOUT, epoch=self.step, row=place).integers(1 << 62)))

    def settle(self, losses: list[Loss], micro_batches: list[dict], stop: bool) -> Update:
        """Agree on an update whose gradients, averaged over the ranks, are there and have changed nothing yet.

        `losses` are this rank's, one of each micro-batch; `stop` is this rank's wish. The gradients of an update
        to skip are cleared, so that the optimizer's step is none. The main rank logs the offending micro-batches'
        rows. Raises TrainingError on all ranks alike.
        """
        self.step += 1
        self.state.model.num_updates = self.step
        scaler = self.state.scaler if self.state.scaler and self.state.scaler.is_enable() else None
        if scaler:
            scaler.unscale_(self.state.optimizer)
        loss = paddle.add_n([one.value for one in losses]).astype("float32") / len(losses)
        shares = gradient_shares(self.state.optimizer)
        norm = norm_of(shares.squares()) if shares else gradient_norm(self._parameters)
        skipped_rows = sum(len(batch.get("skipped", ())) for batch in micro_batches)
        statistics = self.state.model.statistics(losses)
        update, statistics = agree(loss, norm, stop, skipped_rows, self.world, statistics, self.take_orders())
        update = replace(update, losses=losses)
        if update.applied:
            if statistics is not None:
                self.state.model.keep_statistics(statistics)
            self.num_skipped_in_a_row = 0
            return update
        self.state.optimizer.clear_grad(set_to_zero=False)
        if scaler and np.isfinite(update.loss) and scaler.state_dict()["scale"].item() > 1:
            get_logger().info("update skipped: the scaled gradient overflows; the loss scale is lowered")
            return update
        self.num_skipped_in_a_row += 1
        by_rank = gather_objects(self._find_rows(losses, micro_batches), self.world)
        what = f"the loss is {update.loss} and the norm of the gradient {update.grad_norm}"
        where = "; ".join(f"rows of rank {rank}: {rows}" for rank, rows in enumerate(by_rank) if rows)
        where = where or "the rows of no single rank have such a gradient"
        if self.num_skipped_in_a_row >= self.max_skipped:
            raise TrainingError(
                f"{what}; {where}; {self.num_skipped_in_a_row} such updates in a row; look at these rows, or lower "
                "--learning_rate and resume with --accept_changes learning_rate"
            )
        if self.world.is_main:
            get_logger().warning("update skipped: %s; %s", what, where)
        return update

    def _find_rows(self, losses: list[Loss], micro_batches: list[dict]) -> list[int]:
        """The row ids of the micro-batches whose loss is not finite, or else of those whose own gradient is not."""
        bad = [batch for loss, batch in zip(losses, micro_batches, strict=True) if not np.isfinite(float(loss.value))]
        bad = bad or [batch for batch in micro_batches if not self._has_finite_gradient(batch)]
        return [int(row) for batch in bad for row in np.asarray(batch["row_ids"])]

    def _has_finite_gradient(self, batch: dict) -> bool:
        model = self.state.model
        model.eval()
        forward(model, batch, self.make_autocast).value.backward()
        model.train()
        norm = float(gradient_norm(self._parameters))
        self.state.optimizer.clear_grad(set_to_zero=False)
        return bool(np.isfinite(norm))


def train_step(guard: UpdateGuard, micro_batches: list[dict], stop: bool = False) -> Update:
    """Run one optimizer update of the hand-written loop.

    `micro_batches` are this rank's, each a dict of the model's inputs and `row_ids`; `stop` is this rank's wish.
    Raises TrainingError as `UpdateGuard.settle` does.
    """
    state, world = guard.state, guard.world
    losses, shares = [], gradient_shares(state.optimizer)
    for number, batch in enumerate(micro_batches, 1):
        guard.seed_dropout(number - 1)
        loss = forward(state.model, batch, guard.make_autocast)
        losses.append(loss._replace(value=loss.value.detach()))
        scaled = loss.value / len(micro_batches)
        with shares.reducing() if shares and number == len(micro_batches) else nullcontext():
            (state.scaler.scale(scaled) if state.scaler else scaled).backward()
    if world.size > 1 and not shares:
        with waiting(world):
            fused_allreduce_gradients([p for p in state.model.parameters() if not p.stop_gradient], None)
    update = guard.settle(losses, micro_batches, stop)
    if state.scaler:
        state.scaler.step(state.optimizer)
        state.scaler.update()
    else:
        state.optimizer.step()
    state.optimizer.clear_grad()
    state.scheduler.step()
    if update.applied:
        update_averages(state)
    return update


def update_averages(state: TrainingState) -> None:
    """Take the new weights into the averages; of half-precision ones the optimizer's float32 masters."""
    for average in state.averages:
        average.update(master_weights(state.optimizer))


def forward(model, batch: dict, make_autocast) -> Loss:
    """The loss of one micro-batch."""
    with make_autocast():
        return model.loss(batch)


@paddle.no_grad()
def gradient_norm(parameters: list):
    """Global L2 norm of the gradients that are there, a float32 tensor; not finite as soon as one element is not."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    return norm_of([_squared_l2_norm(g.astype("float32")) for g in gradients])


@paddle.no_grad()
def norm_of(squares: list):
    """The norm of gradients of which these are the squared ones."""
    return paddle.add_n(squares).reshape([]).sqrt()


def agree(
    loss, grad_norm, stop: bool, skipped_rows: int, world: World, statistics=None, orders: Order = NOTHING
) -> tuple[Update, Any]:
    """(the ranks' mean loss, mean gradient norm, any wish to stop and all skipped rows, and the orders that one rank
    has taken; the sum of their `statistics`, float32 [n] or None), in one small all-reduce."""
    told = [float(stop), float(skipped_rows), float(orders)]
    values = paddle.stack([loss, grad_norm, *map(paddle.to_tensor, told)])
    if statistics is not None:
        values = paddle.concat([values, statistics])
    if world.size > 1:
        with waiting(world):
            paddle.distributed.all_reduce(values)
    loss_sum, norm_sum, stops, skipped, orders = values[:5].tolist()
    orders = Order(int(orders))
    stop = stops > 0 or Order.STOP in orders
    update = Update(loss_sum / world.size, norm_sum / world.size, stop, int(skipped), orders=orders)
    return update, None if statistics is None else values[5:]

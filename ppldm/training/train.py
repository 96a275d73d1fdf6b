"""One training, from its recipe to its last update: read it from top to bottom.

`train_recipe` makes a run ready and gives it to a loop, ours (`run_loop`) or the Trainer of PaddleNLP (`trainer.py`).
Either one does updates between the same beginning and end (`train`). An update is: accumulate, synchronise once, agree,
clip, step, schedule, average (`train_step`); then compare the ranks, report, and decide whether to save and to stop
(`Updates.finish`). `step` is the number of finished updates; exactly `max_steps` of them are done. A signal asks for
the stop, and the loop answers at the next update boundary.

All ranks agree on the loss and on the norm of the gradient before any weight changes. Where one of the two is not
finite, the update is skipped on all of them: weights, optimizer and average stay as they are, while the step is counted
and the learning rate goes on, so that which samples and which rate belong to a step never depends on what was skipped.
"""

import faulthandler
import gc
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
from paddle.distributed.fleet.utils.hybrid_parallel_util import fused_allreduce_gradients

from ..config.recipe import Recipe
from ..networks.model import Loss
from ..utils.errors import TrainingError
from ..utils.files import passing_over, write_json
from ..utils.log import get_logger, logging_to
from ..utils.processes.ranks import World, gather_objects, remove_signs, waiting
from ..utils.processes.signals import end_process, handle
from ..utils.rng import Stream, make_rng
from .checkpoint import TrainerState, TrainingState, machine_record
from .doctor.machine import look_quickly
from .optimizer import autocast, gradient_shares, master_weights, norm_of, squared_norms
from .prepare import prepare
from .report import IntervalMetrics, Reporter, Update
from .run import TrainingRun
from .run_folder import CONTROL_DIR, LOG_FILE, NOTHING, PROMPTS_FILE, STATUS_FILE, Order, refusals_undone


def train_recipe(recipe: Recipe, loop: Callable[[TrainingRun], None]) -> None:
    """Train by a recipe, and by `loop`: `run_loop`, or `trainer.run_trainer`. Raises PpldmError."""
    if World.detect().is_main:
        look_quickly(recipe.training)
    with refusals_undone(recipe.training):
        run = prepare(recipe.model, recipe.data, recipe.training)
    with logging_to(run.output_dir / LOG_FILE, run.world.rank):
        loop(run)


def train(run: TrainingRun, loop: Callable[["Updates"], int]) -> None:
    """Train `run` by `loop`, which returns its last step; export the model. A signal raises Interrupted once saved."""
    if run.checkpoint:
        from .resume import load_optimizer

        load_optimizer(run.checkpoint, run.state)  # a run that is done needs it too: the export takes float32 masters
    if run.start_step >= run.max_steps:
        get_logger().info("already trained for %d updates", run.start_step)
    else:
        if run.snapshots:
            run.snapshots.announce(run.start_step, run.max_steps)
        control = Control(run.output_dir, run.world)
        control.open(start_step=run.start_step, max_steps=run.max_steps, **machine_record(run.world))
        garbage, names = collected_at_times(run.arguments.gc_steps), paddle.utils.unique_name.guard()
        with run.saves, Reporter(run) as reporter, stop_on_signals() as request, garbage, names:
            if 0 in run.arguments.save_at and not run.checkpoint:
                run.save(TrainerState(0, run.max_steps))
            step = loop(Updates(run, reporter, request))
            if step < run.max_steps:
                remove_signs(run.world)
                raise run.interruption(step, request.number)
    run.finish()


def run_loop(run: TrainingRun) -> None:
    """Train `run` to its end by the hand-written loop, or save and raise Interrupted when a signal asks."""
    train(run, _loop)


def _loop(updates: "Updates") -> int:
    run, request = updates.run, updates.request
    trainer_state = TrainerState(global_step=run.start_step, max_steps=run.max_steps)
    with closing(iter(updates.batches())) as batches:
        for step in range(run.start_step + 1, run.max_steps + 1):
            run.state.model.train()
            micro_batches = [next(batches) for _ in range(run.arguments.gradient_accumulation_steps)]
            update = train_step(updates.guard, micro_batches, stop=request.number != 0)
            trainer_state.global_step = step
            save, stop = updates.finish(step, update, micro_batches)
            if save:
                run.save(trainer_state, update.stop)
            if stop:
                break
    return trainer_state.global_step


def train_step(guard: "UpdateGuard", micro_batches: list[dict], stop: bool = False) -> Update:
    """Run one optimizer update of the hand-written loop. `micro_batches` are this rank's, each a dict of the model's
    inputs and `row_ids`; `stop` is this rank's wish. Raises TrainingError as `UpdateGuard.settle` does."""
    state, world = guard.state, guard.world
    losses, shares = [], gradient_shares(state.optimizer)
    for number, batch in enumerate(micro_batches, 1):
        guard.seed_dropout(number - 1)
        with guard.make_autocast():
            loss = state.model.loss(batch)
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
    state.optimizer.clear_grad(set_to_zero=False)
    state.scheduler.step()
    if update.applied:
        update_averages(state)
    return update


class UpdateGuard:
    """Settles each update between backward and optimizer, for either loop. `max_skipped` skipped in a row raise
    TrainingError. An overflow of float16's scaled gradient is the loss scaler's ordinary business and does not count,
    as long as it can still lower the scale. `step`: updates before its first. `take_orders` gives what the user asks
    for at the end of an update, on the main rank."""

    def __init__(
        self, state: TrainingState, world: World, max_skipped: int, make_autocast, *, seed=0, step=0, take_orders=None
    ):
        self.state, self.world, self.take_orders = state, world, take_orders or (lambda: NOTHING)
        self.max_skipped, self.make_autocast = max_skipped, make_autocast
        self.num_skipped_in_a_row, self.seed, self.step = 0, seed, step
        state.model.num_updates = step
        self._parameters = [p for p in state.model.parameters() if not p.stop_gradient]

    def seed_dropout(self, number: int) -> None:
        """Before this rank's micro-batch `number`, from 0: what its layers drop is a function of (seed, update, rank,
        number), whatever was drawn before. Paddle's layers have one generator, which nothing else draws from."""
        place = number * self.world.size + self.world.rank
        paddle.seed(int(make_rng(self.seed, Stream.DROPOUT, epoch=self.step, row=place).integers(1 << 62)))

    def settle(self, losses: list[Loss], micro_batches: list[dict], stop: bool) -> Update:
        """Agree on an update whose gradients, averaged over the ranks, are there and have changed nothing yet. `losses`
        are this rank's, one of each micro-batch; `stop` is its wish. The gradients of an update to skip are cleared, so
        that the optimizer's step is none, and the main rank logs its rows. Raises TrainingError on all ranks alike."""
        self.step += 1
        self.state.model.num_updates = self.step
        optimizer, scaler = self.state.optimizer, self.state.scaler
        scaler = scaler if scaler and scaler.is_enable() else None
        if scaler:
            scaler.unscale_(optimizer)
        loss = paddle.add_n([one.value for one in losses]).astype("float32") / len(losses)
        shares = gradient_shares(optimizer)
        squares = shares.squared_norms() if shares else squared_norms(self._parameters, optimizer)
        if clip := optimizer._grad_clip:
            clip.squares = squares
        norm = norm_of(squares[1])
        skipped_rows = sum(len(batch.get("skipped", ())) for batch in micro_batches)
        statistics = self.state.model.statistics(losses)
        update, statistics = agree(loss, norm, stop, skipped_rows, self.world, statistics, self.take_orders())
        update = replace(update, losses=losses)
        if update.applied:
            if statistics is not None:
                self.state.model.keep_statistics(statistics)
            self.num_skipped_in_a_row = 0
            return update
        optimizer.clear_grad(set_to_zero=False)
        if scaler and np.isfinite(update.loss) and scaler.state_dict()["scale"].item() > 1:
            get_logger().info("update skipped: the scaled gradient overflows; the loss scale is lowered")
            return update
        self.num_skipped_in_a_row += 1
        by_rank = gather_objects(self._find_rows(losses, micro_batches), self.world)
        what = f"the loss is {update.loss} and the norm of the gradient {update.grad_norm}"
        where = "; ".join(f"rows of rank {rank}: {rows}" for rank, rows in enumerate(by_rank) if rows)
        where = where or "the rows of no single rank have such a gradient"
        if self.num_skipped_in_a_row >= self.max_skipped:
            fix = "look at these rows, or lower --learning_rate and resume with --accept_changes learning_rate"
            raise TrainingError(f"{what}; {where}; {self.num_skipped_in_a_row} such updates in a row; {fix}")
        if self.world.is_main:
            get_logger().warning("update skipped: %s; %s", what, where)
        return update

    def _find_rows(self, losses: list[Loss], micro_batches: list[dict]) -> list[int]:
        """The row ids of the micro-batches whose loss is not finite, or else of those whose own gradient is not."""
        bad = [batch for loss, batch in zip(losses, micro_batches, strict=True) if not np.isfinite(float(loss.value))]
        if not bad or self.state.shares:  # ranks that share parameters go back together
            steep = [batch for batch in micro_batches if not self._has_finite_gradient(batch)]
            bad = bad or steep
        if self.state.shares:
            self.state.shares.end_pass()
        return [int(row) for batch in bad for row in np.asarray(batch["row_ids"])]

    def _has_finite_gradient(self, batch: dict) -> bool:
        model = self.state.model
        model.eval()
        with self.make_autocast():
            loss = model.loss(batch)
        loss.value.backward()
        model.train()
        norm = float(norm_of(squared_norms(self._parameters)[1]))
        self.state.optimizer.clear_grad(set_to_zero=False)
        return bool(np.isfinite(norm))


def update_averages(state: TrainingState) -> None:
    """Take the new weights into the averages; of half-precision ones the optimizer's float32 masters."""
    masters = master_weights(state.optimizer)
    for average in state.averages:
        average.update(masters)


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


class Updates:
    """Both loops' view of their updates: the guard that settles each, and what follows it by the same rules."""

    def __init__(self, run: TrainingRun, reporter: Reporter, request: SimpleNamespace):
        self.run, self.reporter, self.request = run, reporter, request
        self._save_is_due, arguments = False, run.arguments
        start = {"seed": arguments.seed, "step": run.start_step}
        start["take_orders"] = Control(run.output_dir, run.world).take
        self.guard = UpdateGuard(run.state, run.world, arguments.max_skipped_updates, autocast(arguments), **start)

    def batches(self) -> Iterator[dict]:
        """This rank's micro-batches from here to the end, in order."""
        run = self.run
        return timed_batches(run.batches(), run.interval, run.arguments.data_timeout, run.world.rank)

    def finish(self, step: int, update: Update, micro_batches: list[dict]) -> tuple[bool, bool]:
        """Compare the ranks, report, and decide whether to (save, stop), once update `step` is done. All ranks call it
        together. A checkpoint that is due waits for an update that was not skipped, so that no run goes on from weights
        of which the loss is not finite; the last update, and one that is to be the last, is saved in any case."""
        run = self.run
        if Order.STOP in update.orders:
            self.request.number = self.request.number or signal.SIGINT
        if update.orders and run.world.is_main:
            get_logger().info("after update %d, as the user asks: %s", step, describe_orders(update.orders))
        if run.world.size > 1:
            run.check_ranks(step)
        if run.snapshots:
            run.keep_snapshots(step)
        self.reporter.after_update(step, update, micro_batches)
        if run.arguments.gc_steps and step % run.arguments.gc_steps == 0:
            gc.collect()
        periods = (run.arguments.save_steps, run.arguments.backup_every)
        self._save_is_due |= any(period > 0 and step % period == 0 for period in periods)
        self._save_is_due |= step in run.arguments.save_at
        self._save_is_due |= Order.SAVE_NOW in update.orders
        is_last = update.stop or step == run.max_steps
        save = is_last or (self._save_is_due and not self.guard.num_skipped_in_a_row)
        self._save_is_due &= not save
        return save, is_last


def timed_batches(batches, interval: IntervalMetrics, seconds: float, rank: int):
    """The batches; `interval` adds up the seconds that their reader waits for them, from the first on. The process, and
    with it its loaders, ends with status 1 where one takes longer than `seconds` (0: no limit): a read that hangs
    cannot be interrupted from within, so a thread writes where every other one stands, and names the rank."""
    waiting_since, ended = None, threading.Event()

    def watch() -> None:
        while not ended.wait(min(1.0, seconds / 4)):
            since = waiting_since
            if since is not None and time.perf_counter() - since > seconds:
                faulthandler.dump_traceback()
                what = f"rank {rank} has waited {seconds:g} s for a batch"
                end_process(rank, f"{what}; see to its storage, or allow more with --data_timeout")

    if seconds > 0:
        threading.Thread(target=watch, daemon=True).start()
    interval.restart_clock()
    try:
        with closing(iter(batches)) as source:
            while True:
                waiting_since = started = time.perf_counter()
                batch = next(source, None)
                waiting_since = None
                if batch is None:
                    return
                interval.wait_seconds += time.perf_counter() - started
                yield batch
    finally:
        waiting_since = None
        ended.set()


_ORDERS = {order.file: order for order in Order}


def describe_orders(orders: Order) -> str:
    """The names of the files of some orders."""
    return ", ".join(name for name, order in _ORDERS.items() if order in orders)


class Control:
    """The folder of one run, seen by one of its ranks. Only the main one touches it."""

    def __init__(self, output_dir: Path, world: World):
        self.folder, self.is_main = Path(output_dir, CONTROL_DIR), world.is_main
        self._refused: set[str] = set()

    def open(self, **status) -> None:
        """Make the folder and its status.json. Orders that an earlier start has not taken are void."""
        if not self.is_main:
            return
        with passing_over(self.folder):
            self.folder.mkdir(exist_ok=True)
            if void := self.take():
                text = "%s: what was asked of an earlier start is void: %s"
                get_logger().info(text, self.folder, describe_orders(void))
            here = {"host": socket.gethostname(), "process": os.getpid(), "started": round(time.time(), 3)}
            write_json(self.folder / STATUS_FILE, {**here, **status})
            if (self.folder / PROMPTS_FILE).exists():
                get_logger().info("%s takes the place of --validation_prompts", self.folder / PROMPTS_FILE)

    def take(self) -> Order:
        """What is asked for now; its files are gone. None of it on any rank but the main one. Never raises."""
        asked = NOTHING
        try:
            names = set(os.listdir(self.folder)) if self.is_main else set()
        except OSError:  # somebody has removed the folder
            return asked
        for name in _ORDERS.keys() & names - self._refused:
            try:
                os.unlink(self.folder / name)
                asked |= _ORDERS[name]
            except OSError as error:
                # An order that stays would be obeyed after every update.
                self._refused.add(name)
                text = "%s cannot be removed (%s), so it is not obeyed; make it as the user of the run, a plain file"
                get_logger().warning(text, self.folder / name, error.strerror)
        return asked


@contextmanager
def collected_at_times(every: int):
    """Inside, unless `every` is 0, only `Updates.finish` collects garbage; what there is now is collected first."""
    if not every or not gc.isenabled():
        yield
        return
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def stop_on_signals():
    """Yield what has the `number` of the SIGINT, SIGTERM or SIGUSR1 that came, else 0. A second Ctrl-C interrupts."""
    request = SimpleNamespace(number=0)

    def ask(number, _frame):
        if request.number and number == signal.SIGINT:
            raise KeyboardInterrupt
        request.number = number

    watched = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = {number: handle(number, ask) for number in watched}
    try:
        yield request
    finally:
        for number, handler in before.items():
            handle(number, handler)

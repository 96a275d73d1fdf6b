"""From a run that is ready to its exported model, by either loop: when to save, when to stop, and what comes after.

`step` is the number of finished optimizer updates; exactly `max_steps` of them are done. A signal asks for the stop,
and the loop answers at the next update boundary.
"""

import signal
from collections.abc import Callable
from contextlib import closing, contextmanager
from typing import NamedTuple

import paddle

from ..utils.log import get_logger
from ..utils.processes.rank_watch import remove_signs
from ..utils.processes.signals import handle
from .checkpoint.checkpoint import TrainerState, load_optimizer, machine_record
from .monitor.control import Control, Order, describe
from .monitor.report import Reporter, TimedBatches
from .optimizer.precision import autocast
from .run import TrainingRun
from .update import Update, UpdateGuard, train_step


class StopRequest:
    """Set by SIGINT, SIGTERM or SIGUSR1; `number` is the signal's, 0 while there is none."""

    def __init__(self):
        self.number = 0

    def __bool__(self):
        return self.number != 0


@contextmanager
def stop_on_signals():
    """Yield a StopRequest that the signals set while the block runs. A second Ctrl-C interrupts at once."""
    request = StopRequest()

    def ask(number, _frame):
        if request and number == signal.SIGINT:
            raise KeyboardInterrupt
        request.number = number

    watched = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = {number: handle(number, ask) for number in watched}
    try:
        yield request
    finally:
        for number, handler in before.items():
            handle(number, handler)


class Next(NamedTuple):
    """What a loop does after an update, the same on all ranks."""

    save: bool
    stop: bool


class Updates:
    """Both loops' view of their updates: the guard that settles each, and what follows it by the same rules."""

    def __init__(self, run: TrainingRun, reporter: Reporter, request: StopRequest):
        self.run, self.reporter, self.request = run, reporter, request
        self.guard = UpdateGuard(
            *(run.state, run.world, run.arguments.max_skipped_updates, autocast(run.arguments)),
            seed=run.arguments.seed,
            step=run.start_step,
            take_orders=Control(run.output_dir, run.world).take,
        )
        self._save_is_due = False

    def finish(self, step: int, update: Update, micro_batches: list[dict]) -> Next:
        """Compare the ranks, report, and decide, once update `step` is done. All ranks call it together.

        A checkpoint that is due waits for an update that was not skipped, so that no run goes on from weights of which
        the loss is not finite; the last update, and one that is to be the last, is saved in any case.
        """
        if Order.STOP in update.orders:
            self.request.number = self.request.number or signal.SIGINT
        if update.orders and self.run.world.is_main:
            get_logger().info("after update %d, as the user asks: %s", step, describe(update.orders))
        self.run.check_ranks(step)
        self.run.keep_snapshots(step)
        self.reporter.after_update(step, update, micro_batches)
        self._save_is_due |= self.run.saves_after(step) or Order.SAVE_NOW in update.orders
        is_last = update.stop or step == self.run.max_steps
        save = is_last or (self._save_is_due and not self.guard.num_skipped_in_a_row)
        self._save_is_due &= not save
        return Next(save, is_last)


def train(run: TrainingRun, loop: Callable[[Updates], int]) -> None:
    """Train `run` to its end by `loop`, which returns the last step it did; export the model.

    Raises Interrupted, after a checkpoint, when a signal asks.
    """
    if run.checkpoint:
        load_optimizer(run.checkpoint, run.state)  # a run that is done needs it too: the export takes float32 masters
    if run.start_step >= run.max_steps:
        get_logger().info("already trained for %d updates", run.start_step)
    else:
        if run.snapshots:
            run.snapshots.announce(run.start_step, run.max_steps)
        Control(run.output_dir, run.world).open(
            start_step=run.start_step, max_steps=run.max_steps, **machine_record(run.world)
        )
        with run.saves, Reporter(run) as reporter, stop_on_signals() as request, paddle.utils.unique_name.guard():
            step = loop(Updates(run, reporter, request))
            if step < run.max_steps:
                remove_signs(run.world)
                raise run.interruption(step, request.number)
    run.finish()


def run_loop(run: TrainingRun) -> None:
    """Train `run` to its end by the hand-written loop, or save and raise Interrupted when a signal asks."""
    train(run, _loop)


def _loop(updates: Updates) -> int:
    run, request = updates.run, updates.request
    trainer_state = TrainerState(global_step=run.start_step, max_steps=run.max_steps)
    with closing(iter(TimedBatches(run.batches(), run.interval))) as batches:
        for step in range(run.start_step + 1, run.max_steps + 1):
            run.state.model.train()
            micro_batches = [next(batches) for _ in range(run.arguments.gradient_accumulation_steps)]
            update = train_step(updates.guard, micro_batches, stop=bool(request))
            trainer_state.global_step = step
            after = updates.finish(step, update, micro_batches)
            if after.save:
                run.save(trainer_state, update.stop)
            if after.stop:
                break
    return trainer_state.global_step

"""The hand-written loop. `step` is the number of finished optimizer updates; exactly `max_steps` of them are done."""

from contextlib import closing

import paddle
from paddlenlp.trainer import TrainerState

from ..utils.log import get_logger
from .checkpoint.checkpoint import load_optimizer
from .distributed.signals import stop_on_signals
from .monitor.report import Reporter, TimedBatches
from .optimizer.precision import autocast
from .run import TrainingRun
from .update import UpdateGuard, train_step


def run_loop(run: TrainingRun) -> None:
    """Train `run` to its end, or save and raise Interrupted when a signal asks."""
    arguments, state = run.arguments, run.state
    if run.checkpoint:
        load_optimizer(run.checkpoint, state)
    if run.start_step >= run.max_steps:
        get_logger().info("already trained for %d updates", run.start_step)
        run.finish()
        return
    guard = UpdateGuard(state, run.world, arguments.max_skipped_updates, autocast(arguments))
    trainer_state = TrainerState(global_step=run.start_step, max_steps=run.max_steps)
    with (
        Reporter(run) as reporter,
        closing(iter(TimedBatches(run.batches(), reporter.interval))) as batches,
        stop_on_signals() as request,
        paddle.utils.unique_name.guard(),
    ):
        save_is_due = False
        for step in range(run.start_step + 1, run.max_steps + 1):
            state.model.train()
            micro_batches = [next(batches) for _ in range(arguments.gradient_accumulation_steps)]
            update = train_step(guard, micro_batches, stop=bool(request))
            run.check_ranks(step)
            trainer_state.global_step = step
            reporter.after_update(step, update, micro_batches)
            save_is_due |= run.saves_after(step)
            if update.stop or step == run.max_steps or (save_is_due and not guard.num_skipped_in_a_row):
                run.save(trainer_state, update.stop)
                save_is_due = False
            if update.stop and step < run.max_steps:
                raise run.interruption(step, request.number)
    run.finish()

"""The hand-written loop. `step` is the number of finished optimizer updates; exactly `max_steps` of them are done."""

from contextlib import closing

from .checkpoint.trainer_state import TrainerState
from .monitor.report import TimedBatches
from .run import TrainingRun
from .train import Updates, train
from .update import train_step


def run_loop(run: TrainingRun) -> None:
    """Train `run` to its end, or save and raise Interrupted when a signal asks."""
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

"""The same run under PaddleNLP's Trainer: a few overrides and one callback around its loop.

Ours stay model, data, optimizer, schedule, checkpoint and metrics; the Trainer's are the loop, autocast, recompute,
data parallelism and loss scaling.
"""

import copy
from contextlib import nullcontext
from pathlib import Path

import paddle
from paddlenlp.trainer import PrinterCallback, Trainer, TrainerCallback

from ..utils.log import get_logger
from ..utils.rank_watch import waiting
from .checkpoint.checkpoint import load_optimizer
from .distributed.signals import stop_on_signals
from .monitor.report import Reporter, TimedBatches
from .optimizer.precision import autocast, half_type, precision_name
from .optimizer.sharding import gradient_shares
from .run import TrainingRun
from .update import UpdateGuard, update_average


class LatentDiffusionTrainer(Trainer):
    """PaddleNLP's Trainer on a TrainingRun."""

    def __init__(self, run: TrainingRun, reporter: Reporter, request):
        # Logging, sampling and progress are the Reporter's; the Trainer's own would say the same twice.
        run.arguments.logging_strategy = "no"
        run.arguments.disable_tqdm = True
        run.arguments.max_steps = run.max_steps
        # Our batches start at the right step: nothing is to be skipped by reading it.
        run.arguments.ignore_data_skip = True
        # `prepare` has seen to it; the Trainer would compile what draws and validates too.
        run.arguments.to_static = False
        # The optimizer has its share already: the Trainer would wrap it, and save it, in a way of its own.
        run.arguments.sharding = []
        # The Trainer's way with recompute: float32 gradients are summed after backward. DataParallel would send halves.
        run.arguments.recompute |= precision_name(run.arguments).endswith("O2")
        self.run = run
        self.reporter = reporter
        self.micro_batches: list[dict] = []
        self.micro_losses: list = []
        self.stopping = False  # whether all ranks agreed that the last update was the last
        self.guard = UpdateGuard(
            run.state, run.world, run.arguments.max_skipped_updates, self.autocast_smart_context_manager
        )
        super().__init__(
            model=run.state.model,
            args=_seeded(run.arguments),
            train_dataset=run.dataset,
            optimizers=(run.state.optimizer, run.state.scheduler),
            callbacks=[_UpdateCallback(self, request)],
        )
        self.remove_callback(PrinterCallback)

    def get_train_dataloader(self):
        """This rank's micro-batches. Its length is the whole run's, so that the Trainer sees a single epoch."""
        return _WholeRun(TimedBatches(self.run.batches(), self.reporter.interval), self.run)

    def compute_loss(self, model, inputs, return_outputs=False):
        """The model is the loss."""
        return model(**inputs)

    def training_step(self, model, inputs):
        """One micro-batch forward and back. Rows and skip counts stay here; the model gets its inputs."""
        self.micro_batches.append(inputs)
        shares, is_last = gradient_shares(self.run.state.optimizer), self._has_all_micro_batches()
        reducing = shares.reducing() if shares and is_last else nullcontext()
        with waiting(self.run.world), reducing:  # data parallelism sends gradients while it goes back
            loss = super().training_step(model, {name: inputs[name] for name in self.model.input_names})
        self.micro_losses.append(loss * self.args.gradient_accumulation_steps)
        return loss

    def _has_all_micro_batches(self) -> bool:
        return len(self.micro_batches) == self.args.gradient_accumulation_steps

    def _wrap_model(self, model, training=True):
        """As it is where ranks share gradients: Paddle's data parallelism would give all of them to each."""
        return model if gradient_shares(self.run.state.optimizer) else super()._wrap_model(model, training)

    def autocast_smart_context_manager(self):
        """That of the hand-written loop."""
        return autocast(self.run.arguments)()

    def _wrap_amp_model(self, args, model):
        """Weights and scaler are ready: `prepare` made them."""
        self.amp_dtype = half_type(args)
        self.scaler = self.run.state.scaler
        self.do_grad_scaling = self.scaler is not None

    def _decorate_exclude_layers(self, model):
        """All: what is to be cast is so already, and the Trainer would cast the noise schedule's tables too."""
        return [self.run.state.model]

    def _check_loss_valid(self, loss):
        """Left to `_UpdateCallback`, which asks all ranks: a rank that stops alone leaves the others hanging."""

    def _save_checkpoint(self, model, metrics=None):
        self.run.save(self.state, self.stopping)

    def _load_from_checkpoint(self, resume_from_checkpoint=None):
        """Weights and averages are in place: `prepare` restored them."""

    def _load_optimizer_and_scheduler(self, checkpoint):
        if checkpoint:
            load_optimizer(Path(checkpoint), self.run.state)


def _seeded(arguments):
    """The Trainer's arguments, with a seed that numpy's global generator takes. Nothing here draws from that one."""
    if arguments.seed < 2**32:
        return arguments
    arguments = copy.copy(arguments)
    arguments.seed %= 2**32
    return arguments


class _UpdateCallback(TrainerCallback):
    """Our part of an update, at the Trainer's events."""

    def __init__(self, trainer: LatentDiffusionTrainer, request):
        self.trainer, self.request = trainer, request
        self.update, self.last_epoch, self.save_is_due = None, 0, False

    def on_optimizer_begin(self, args, state, control, scaler=None, **kwargs):
        """All gradients are there, no weight has changed yet."""
        trainer = self.trainer
        self.update = trainer.guard.settle(trainer.micro_losses, trainer.micro_batches, bool(self.request))
        self.last_epoch = trainer.lr_scheduler.last_epoch

    def on_optimizer_end(self, args, state, control, **kwargs):
        """Weights are new, unless the update was skipped."""
        if self.trainer.lr_scheduler.last_epoch == self.last_epoch:
            # The Trainer keeps the rate where the loss scaler skipped; ours belongs to the step.
            self.trainer.lr_scheduler.step()
        if self.trainer.run.state.ema and self.update.applied:
            update_average(self.trainer.run.state)

    def on_step_end(self, args, state, control, **kwargs):
        """`global_step` counts this update."""
        trainer = self.trainer
        trainer.run.check_ranks(state.global_step)
        trainer.reporter.after_update(state.global_step, self.update, trainer.micro_batches)
        trainer.micro_batches, trainer.micro_losses = [], []
        self.save_is_due |= trainer.run.saves_after(state.global_step)
        at_the_end = self.update.stop or state.global_step == trainer.run.max_steps
        control.should_save = at_the_end or (self.save_is_due and not trainer.guard.num_skipped_in_a_row)
        self.save_is_due &= not control.should_save
        control.should_training_stop |= self.update.stop
        trainer.stopping = self.update.stop


class _WholeRun:
    """Micro-batches from `start_step` on, under the length of the whole run."""

    def __init__(self, batches, run: TrainingRun):
        self.batches = batches
        self.length = run.max_steps * run.arguments.gradient_accumulation_steps

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter(self.batches)


def run_trainer(run: TrainingRun) -> None:
    """Train `run` to its end, or save and raise Interrupted when a signal asks."""
    if run.start_step >= run.max_steps:
        load_optimizer(run.checkpoint, run.state)  # the export takes its float32 masters
        get_logger().info("already trained for %d updates", run.start_step)
        run.finish()
        return
    with Reporter(run) as reporter, stop_on_signals() as request, paddle.utils.unique_name.guard():
        trainer = LatentDiffusionTrainer(run, reporter, request)
        trainer.train(resume_from_checkpoint=str(run.checkpoint) if run.checkpoint else None)
        if trainer.state.global_step < run.max_steps:
            raise run.interruption(trainer.state.global_step, request.number)
    run.finish()

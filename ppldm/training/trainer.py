"""The same run under PaddleNLP's Trainer: a few overrides and one callback around its loop.

Ours stay model, data, optimizer, schedule, checkpoint and metrics; the Trainer's are the loop, autocast, recompute,
data parallelism and loss scaling.
"""

import dataclasses
from collections.abc import Iterable
from contextlib import nullcontext

from paddlenlp.trainer import PdArgumentParser, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from ..config.option import parse_known
from ..networks.model import Loss
from ..utils.machine.cpu import quiet_paddle
from ..utils.processes.ranks import waiting
from .optimizer import autocast, gradient_shares, half_type, precision_name
from .run import TrainingRun
from .train import Updates, train, update_averages


class LatentDiffusionTrainer(Trainer):
    """PaddleNLP's Trainer on a TrainingRun."""

    def __init__(self, updates: Updates):
        self.run, self.updates, self.guard = updates.run, updates, updates.guard
        self.micro_batches: list[dict] = []
        self.losses: list[Loss] = []
        self.stopping = False  # whether all ranks agreed that the last update was the last
        state, callbacks = self.run.state, [_UpdateCallback(self)]
        own = {"train_dataset": self.run.dataset, "optimizers": (state.optimizer, state.scheduler)}
        super().__init__(model=state.model, args=_trainer_arguments(self.run), callbacks=callbacks, **own)
        self.remove_callback(PrinterCallback)

    def get_train_dataloader(self):
        """This rank's micro-batches. Its length is the whole run's, so that the Trainer sees a single epoch."""
        length = self.run.max_steps * self.run.arguments.gradient_accumulation_steps
        return _WholeRun(self.updates.batches(), length)

    def compute_loss(self, model, inputs, return_outputs=False):
        """The model is the loss; its gradient is of the first of it."""
        self.losses.append(model(**inputs))
        return self.losses[-1].value

    def training_step(self, model, inputs):
        """One micro-batch forward and back. Rows and skip counts stay here; the model gets its inputs."""
        self.guard.seed_dropout(len(self.micro_batches))
        self.micro_batches.append(inputs)
        is_last = len(self.micro_batches) == self.args.gradient_accumulation_steps
        shares = gradient_shares(self.run.state.optimizer)
        reducing = shares.reducing() if shares and is_last else nullcontext()
        with waiting(self.run.world), reducing:  # data parallelism sends gradients while it goes back
            loss = super().training_step(model, self.run.state.model.inputs_of(inputs))
        self.losses[-1] = self.losses[-1]._replace(value=loss * self.args.gradient_accumulation_steps)
        return loss

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
        """So are they: `train` has seen to it."""


def parse_trainer_flags(words: list[str]) -> tuple[list[str], list[str]]:
    """(names of PaddleNLP's flags to which `words` give another value than the default, the words that are none of
    them). Raises ConfigError."""
    parser = PdArgumentParser(TrainingArguments)
    for action in parser._actions:
        action.required = False
    namespace, others = parse_known(parser, words)
    return [name for name, value in vars(namespace).items() if value != parser.get_default(name)], others


def _trainer_arguments(run: TrainingRun) -> TrainingArguments:
    """PaddleNLP's arguments of a run: its fields that are options of ours, but for what is done here."""
    known = {field.name for field in dataclasses.fields(TrainingArguments) if field.init}
    given = {name: value for name, value in vars(run.arguments).items() if name in known}
    given |= {
        # Logging, sampling and progress are the Reporter's; the Trainer's own would say the same twice.
        "logging_dir": str(run.arguments.log_folder),
        "logging_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "max_steps": run.max_steps,
        # Our batches start at the right step: nothing is to be skipped by reading it.
        "ignore_data_skip": True,
        # `prepare` has seen to it; the Trainer would compile what draws and validates too.
        "to_static": False,
        # As the hand-written loop: zeros would be added to, and would decay a weight that has no gradient.
        "release_grads": True,
        # The optimizer has its share already: the Trainer would wrap it, and save it, in a way of its own.
        "sharding": "",
        # `run.save` does so.
        "use_async_save": False,
        # The schedule is ours, and the Trainer knows fewer.
        "lr_scheduler_type": "constant",
        # The Trainer's way with recompute: float32 gradients are summed after backward. DataParallel would send halves,
        # and wait for those of components that are not trained yet.
        "recompute": run.arguments.recompute
        or precision_name(run.arguments).endswith("O2")
        or any(component.starts for component in run.state.model.components.values()),
        # A seed that numpy's global generator takes. Nothing here draws from that one.
        "seed": run.arguments.seed % 2**32,
    }
    with quiet_paddle():
        return TrainingArguments(**given)


class _UpdateCallback(TrainerCallback):
    """Our part of an update, at the Trainer's events."""

    def __init__(self, trainer: LatentDiffusionTrainer):
        self.trainer, self.update, self.last_epoch = trainer, None, 0

    def on_optimizer_begin(self, args, state, control, scaler=None, **kwargs):
        """All gradients are there, no weight has changed yet."""
        trainer = self.trainer
        self.update = trainer.guard.settle(trainer.losses, trainer.micro_batches, trainer.updates.request.number != 0)
        self.last_epoch = trainer.lr_scheduler.last_epoch

    def on_optimizer_end(self, args, state, control, **kwargs):
        """Weights are new, unless the update was skipped."""
        if self.trainer.lr_scheduler.last_epoch == self.last_epoch:
            # The Trainer keeps the rate where the loss scaler skipped; ours belongs to the step.
            self.trainer.lr_scheduler.step()
        if self.update.applied:
            update_averages(self.trainer.run.state)

    def on_step_end(self, args, state, control, **kwargs):
        """`global_step` counts this update."""
        trainer = self.trainer
        save, stop = trainer.updates.finish(state.global_step, self.update, trainer.micro_batches)
        trainer.micro_batches, trainer.losses = [], []
        control.should_save = save
        control.should_training_stop |= stop
        trainer.stopping = self.update.stop


@dataclasses.dataclass
class _WholeRun:
    """Micro-batches from `start_step` on, under the length of the whole run."""

    batches: Iterable[dict]
    length: int

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter(self.batches)


def run_trainer(run: TrainingRun) -> None:
    """Train `run` to its end, or save and raise Interrupted when a signal asks."""
    train(run, _loop)


def _loop(updates: Updates) -> int:
    trainer = LatentDiffusionTrainer(updates)
    checkpoint = updates.run.checkpoint
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    return trainer.state.global_step

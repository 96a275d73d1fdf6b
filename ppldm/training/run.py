"""A training run, made ready: everything both loops share, from flags to the first batch and to the exported folder."""

import os
import signal
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import paddle

from .. import __version__
from ..config.recipe import RECIPE_FILE, recipe_text
from ..config.training import TrainingOptions
from ..data.dataset import TextImageDataset
from ..data.loader import BatchLoader
from ..data.order import Mix, StepSampler
from ..diffusion.drawing import USUAL, kept_of
from ..families.base import Family, Sitting
from ..utils.errors import DiskFullError, Interrupted, Preempted
from ..utils.files import link_or_copy, write_json, write_text
from ..utils.log import get_logger
from ..utils.processes.ranks import World, barrier, remove_signs
from ..utils.text import hide
from ..utils.variables import all_variables
from ..weights.folders import checkpoint_name
from ..weights.model_file import ModelDescription
from . import checkpoint as checkpoints
from .checkpoint import TrainerState, TrainingState
from .metrics import METRICS_FILE, last_step
from .optimizer import autocast, restore_float32
from .report import IntervalMetrics
from .rows import first_caption
from .run_folder import RUN_FILE, find_job, note_stopped

if TYPE_CHECKING:
    from .averages.snapshots import SnapshotWriter

ADAPTERS_FOLDER = "lora"  # in the output folder


@dataclass
class TrainingRun:
    """What a loop needs. `state.model.loss(batch).value` is what it learns from."""

    arguments: TrainingOptions
    world: World
    state: TrainingState
    dataset: TextImageDataset
    mix: Mix
    max_steps: int
    global_batch_size: int
    identity: dict  # what decides which samples step s sees; a checkpoint of another identity is refused
    config: dict  # all settings by group, as run.json has them
    description: ModelDescription  # what the model is made of; the same of a checkpoint
    checkpoint: Path | None
    start_step: int
    interval: IntervalMetrics  # what happened since the last log line
    rate_ratios: dict[str, float]  # learning rate groups of their own rate, as multiples of `learning_rate`
    family: Family
    model_settings: Any  # the family's own
    prompts: list[str]  # of `--validation_prompts`
    validate: Callable[[], dict] | None = None  # numbers of the held-out rows, by name; a collective call
    snapshots: "SnapshotWriter | None" = None  # of averages, where they are asked for

    @property
    def output_dir(self) -> Path:
        """Where checkpoints, metrics and the exported model go."""
        return Path(self.arguments.output_dir)

    @cached_property
    def recipe(self) -> str:
        """What recipe.yaml holds: all settings, by which the run is repeated."""
        tree = {name: value for name, value in self.config.items() if name != "ppldm"}
        return recipe_text(tree, self.arguments.written, __version__)

    def __post_init__(self):
        if self.state.shares:
            self.state.shares.begin()
        if self.world.is_main:
            # Not before: a run that its checkpoint refuses must leave the record of the one that trained it.
            write_json(self.output_dir / RUN_FILE, self.config)
            write_text(self.output_dir / RECIPE_FILE, self.recipe)
        self.saves = BackgroundSaves()
        self._store = None
        if self.arguments.output_store and self.world.is_main:
            from .output_store import OutputStore

            self._store = OutputStore(self.output_dir, self.arguments.output_store)
        self._hub = None
        if self.arguments.push_to_hub and self.world.is_main:
            from .hub import HubRepository

            self._hub = HubRepository(self.arguments)
        # Read now: the checkpoint that the run goes on from will be rotated away.
        before = checkpoints.read_manifest(self.checkpoint) if self.checkpoint else {}
        is_own = self.checkpoint and self.checkpoint.resolve().parent == self.output_dir.resolve()
        # The last line of metrics.jsonl at that checkpoint, where it is of this folder.
        self.curve_ends: int | None = before.get("curve_ends") if is_own else None
        # The one that `--resume_from_checkpoint` named, to this start of the run or to an earlier one.
        named = checkpoints.named_checkpoint(self.output_dir, self.arguments.resume_from_checkpoint)
        self.resumed_from: str | None = hide(str(named.resolve())) if named else before.get("resumed_from")

    def batches(self):
        """This rank's micro-batches from `start_step` to the end, in order."""
        whole, own = self.global_batch_size, self.arguments.per_device_train_batch_size
        sampler = StepSampler(self.mix, whole, own, self.world, self.start_step, self.max_steps)
        barrier(self.world)
        return BatchLoader(self.dataset, sampler, self.arguments.dataloader_num_workers)

    def check_ranks(self, step: int) -> None:
        """Compare the ranks' parameters after the first update of this start, and after every `check_ranks_every`.
        Raises TrainingError on every rank where they differ."""
        every = self.arguments.check_ranks_every
        if every > 0 and (step == self.start_step + 1 or step % every == 0):
            from .distributed.rank_checks import check_ranks

            shared = self.state.shares.shared if self.state.shares else ()
            named = {name: one for name, one in self.state.model.named_parameters() if one.name not in shared}
            check_ranks(named, step, self.world)

    def save(self, trainer_state: TrainerState, stopping: bool = False) -> None:
        """Save a checkpoint on the main process, while the others wait. All ranks call it together. With
        --use_async_save training goes on as soon as there is a copy in host memory. Where the disk is full, it goes on
        with a warning and its older checkpoints. But the checkpoint with which a run ends must be written before it
        goes on, else DiskFullError is raised."""
        unlogged = self.interval.state()
        with self.interval.paused(), self.state.whole_averages():
            contents = checkpoints.contents_of(self.state)
            if self.world.is_main:
                self.saves.wait()
                self._save(trainer_state, contents, unlogged, stopping)
        barrier(self.world)

    def keep_snapshots(self, step: int) -> None:
        """Write snapshots of averages where they are due after update `step`. All ranks call it together."""
        if self.snapshots.are_due(step, self.max_steps):
            with self.interval.paused(), self.state.whole_averages():
                if self.world.is_main:
                    self.snapshots.write(step)
                barrier(self.world)

    def _save(self, trainer_state: TrainerState, contents: dict, unlogged: dict, stopping: bool) -> None:
        step = trainer_state.global_step
        is_last = stopping or step == self.max_steps
        metadata = {"samples_seen": step * self.global_batch_size, **self._drawn_with(), "identity": self.identity}
        ends = last_step(self.output_dir / METRICS_FILE)
        metadata |= {"unlogged": unlogged, "resumed_from": self.resumed_from, "curve_ends": ends}
        # By the working folder relative paths of the settings are found.
        metadata |= {"config": self.config, "machine": checkpoints.machine_record(self.world)}
        metadata["working_folder"] = os.getcwd()
        if self.arguments.use_async_save and not is_last:
            now = self.saves.copy(contents), *deepcopy((trainer_state, metadata))
            self.saves.start(partial(self._write, *now, is_last))
        else:
            self._write(contents, trainer_state, metadata, is_last)

    def _drawn_with(self) -> dict:
        """What a model says of how it is drawn, which no update depends on."""
        usual = getattr(self.state.model, "usual", None)
        return kept_of(asdict(usual)) if usual else {}

    def _write(self, contents: dict, trainer_state: TrainerState, metadata: dict, is_last: bool) -> None:
        arguments = self.arguments
        records = {checkpoints.DATA_FILE: self.dataset.fingerprint.record, RECIPE_FILE: self.recipe.encode()}
        kept = arguments.save_total_limit, arguments.backup_every
        try:
            folder = checkpoints.save_checkpoint(
                self.output_dir, contents, trainer_state, metadata, *kept, self.description, records
            )
        except DiskFullError as error:
            if is_last:
                raise
            get_logger().warning("update %d is not saved, training goes on: %s", trainer_state.global_step, error)
            return
        get_logger().info("saved %s", folder)
        if self._store:
            self._store.push(wait=is_last)

    def draw(self, batch: dict) -> tuple[dict, dict]:
        """(the main process's pictures by tag, numbers by name) of the last batch, by the family. A collective call."""
        from .validation import current_prompts, undisturbed

        seed, model = self.arguments.seed, self.state.model
        prompts = current_prompts(self.output_dir, self.world) or self.prompts
        usual = getattr(model, "usual", USUAL).guidance_scale
        scales = self.arguments.validation_guidance_scales or dict.fromkeys((usual, 1.0))
        scales = sorted(scales, key=lambda scale: scale != usual)  # the model's own first
        sitting = Sitting(self.model_settings, model, self.dataset, batch, prompts, scales, seed, self.world)
        with undisturbed(self.state), autocast(self.arguments)():
            pictures, numbers = self.family.draw(sitting)
        if self.state.ema and getattr(self.model_settings, "draw_unaveraged", False):
            with undisturbed(self.state, averaged=False), autocast(self.arguments)():
                found, _ = self.family.draw(sitting)
            same = [tag for tag, one in found.items() if np.array_equal(one, pictures[tag])]  # made by what is frozen
            pictures |= {f"{tag}-unaveraged": one for tag, one in found.items() if tag not in same}
        return pictures, numbers

    def export(self, metadata: dict) -> Path:
        """The folder of the trained model, or of its adapters, written, with `metadata` beside the weights."""
        family, model, settings = self.family, self.state.model, self.model_settings
        adapters, whole = self.output_dir / ADAPTERS_FOLDER, self.output_dir / family.export_folder
        if model.tokenizer:
            shown = (prompt for prompt in self.prompts if hide(prompt) == prompt)
            metadata["example_prompt"] = next(shown, None) or first_caption(self.dataset)
        if model.adapters:
            from ..weights.lora.merge import write_adapters

            write_adapters(model, adapters, self.state.ema, metadata)
        if not model.adapters or settings.export_merged:
            family.export(model, settings, self.dataset, whole, self.state.ema, metadata)
        return adapters if model.adapters else whole

    def interruption(self, step: int, number: int) -> Interrupted:
        """The error of a run that signal `number` stopped after update `step`; 0: a signal to another rank."""
        kind, again = (Interrupted if number == signal.SIGINT else Preempted), ""
        if kind is Preempted and self.world.is_main:
            note_stopped(self.output_dir, True)
        elif kind is Interrupted and self.arguments.overwrite_output_dir and not find_job(all_variables()):
            again = " without --overwrite_output_dir"
        return kind(f"stopped after update {step} of {self.max_steps}; the same command again{again} goes on there")

    def finish(self) -> None:
        """Export the trained model on the main process and say where everything is. All ranks call it together. The
        last checkpoint's weights and state come to lie in the output folder too, where PaddleNLP leaves them."""
        restore_float32(self.state.model, self.state.optimizer)
        with self.state.whole_parameters(), self.state.whole_averages():
            remove_signs(self.world)
            if self.world.is_main:
                self._finish()

    def _finish(self) -> None:
        step = max(self.max_steps, self.start_step)  # a budget may be lower than what was trained before
        metadata = {"ppldm": __version__, "global_step": step, "samples_seen": step * self.global_batch_size}
        metadata |= {**self._drawn_with(), **self.identity}
        last = self.output_dir / checkpoint_name(step)
        for name in ("model_state.pdparams", "trainer_state.json"):
            link_or_copy((last if last.is_dir() else self.checkpoint) / name, self.output_dir / name)
        self.state.optimizer.clear_grad(set_to_zero=False)  # room for the copy of the weights that is exported
        folder = self.export(metadata)
        write_text(folder / RECIPE_FILE, self.recipe)
        note_stopped(self.output_dir, False)
        if self._store:
            self._store.push(wait=True)
        get_logger().info("trained model: %s", folder)
        if self._hub:
            self._hub.push(folder, f"After update {step}")


def copy_to_host(value, into=None):
    """Nested dicts and lists with copies of all tensors in host memory, under their names; other values as they are.
    into: an earlier result, which nobody needs any more. Its tensors are written again where they fit: memory that was
    used before takes a fifth of the time."""
    if isinstance(value, dict):
        before = into if isinstance(into, dict) else {}
        return {key: copy_to_host(one, before.get(key)) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(copy_to_host, value))
    if not isinstance(value, paddle.Tensor):
        return value
    if isinstance(into, paddle.Tensor) and (into.shape, into.dtype) == (value.shape, value.dtype):
        into.copy_(value.detach(), True)
        copy = into
    else:
        copy = value.detach()._copy_to(paddle.CPUPlace(), True)
    copy.name = value.name  # by which Paddle keys an optimizer's state
    return copy


class BackgroundSaves:
    """At most one save at a time, in a thread. A context: its end waits for the last one. Each method waits for the
    save before it, and raises what that raised."""

    def __init__(self):
        self._executor = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future | None = None
        self._copies: dict | None = None

    def copy(self, contents: dict) -> dict:
        """Copies of what a save is to hold, until the next ones are made."""
        self.wait()
        self._copies = copy_to_host(contents, self._copies)
        return self._copies

    def start(self, save: Callable[[], None]) -> None:
        """Run `save` in the thread."""
        self.wait()
        self._pending = self._executor.submit(save)

    def wait(self) -> None:
        """Until nothing is being written."""
        pending, self._pending = self._pending, None
        if pending:
            pending.result()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        try:
            self.wait()
        finally:
            self._executor.shutdown()

"""A training run, made ready: everything both loops share, from flags to the first batch and to the exported folder."""

import dataclasses
import json
import math
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import paddle
from paddlenlp.trainer import TrainerState

from .. import __version__
from ..config.arguments import DataArguments
from ..data.dataset import TextImageDataset
from ..data.expression import Expression
from ..data.filelist import Source, read_sources
from ..data.handlers import BadRows
from ..data.loader import build_loader
from ..data.order import Mix
from ..data.sampler import StepSampler
from ..data.selection import Selection, select_rows
from ..data.where import parse_where
from ..models.model_file import ModelDescription
from ..utils.errors import ConfigError, DiskFullError, FilelistError, Interrupted, Preempted
from ..utils.files import link_or_copy, lock_folder, make_output_dir, remove_leftovers, write_json
from ..utils.log import get_logger, quiet_libraries
from ..utils.machine import count_usable_cores
from ..utils.rank_watch import leave_signs, waiting, watch_ranks
from ..utils.text import count_of
from ..utils.world import World, meet
from .arguments import LOOP_DEFAULTS, LDMTrainingArguments
from .checkpoint import (
    TrainingState,
    find_checkpoint,
    list_checkpoints,
    named_checkpoint,
    read_manifest,
    save_checkpoint,
    set_aside_after,
)
from .data_record import DATA_FILE
from .interval import Interval
from .metrics import METRICS_FILE, last_step
from .precision import precision_name, restore_float32
from .ranks import check_ranks
from .sharding import whole_state
from .sinks import writes_files
from .speed import apply_switches
from .start import begins_anew, checksum_of, find_job, next_start, note_stopped, read_start, write_start
from .watchdog import PromptBatches

RUN_FILE = "run.json"

# Settings that every sample, or every update, depends on.
_DATA_SETTINGS = (
    *("resolution", "crop_fraction", "random_crop", "random_flip", "interpolation"),
    *("max_skipped", "max_skipped_share"),
)
_OPTIMIZER_SETTINGS = (
    *("learning_rate", "unet_learning_rate", "text_encoder_learning_rate", "scale_lr", "lr_batch_size"),
    *("lr_scheduler_type", "warmup_steps", "warmup_ratio", "num_cycles", "lr_end", "power"),
    *("weight_decay", "decay_norms_and_biases", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm"),
)


@dataclass
class TrainingRun:
    """What a loop needs. `state.model(**{name: batch[name] for name in model.input_names})` is the loss."""

    arguments: LDMTrainingArguments
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
    interval: Interval  # what happened since the last log line
    draw_every: int  # updates; 0: never
    # Last batch -> (pictures by tag [H, W, 3] uint8 on the main process, numbers by name on all). A collective call.
    draw: Callable[[dict], tuple[dict, dict]]
    export: Callable[[dict], Path]  # facts -> folder of the trained model
    validate: Callable[[], dict] | None = None  # numbers of the held-out rows, by name; a collective call

    @property
    def output_dir(self) -> Path:
        """Where checkpoints, metrics and the exported model go."""
        return Path(self.arguments.output_dir)

    def __post_init__(self):
        if self.world.is_main:
            # Not before: a run that its checkpoint refuses must leave the record of the one that trained it.
            write_json(self.output_dir / RUN_FILE, self.config)
        # The checkpoint that `--resume_from_checkpoint` named, to this start of the run or to an earlier one. Read now:
        # the one that the run goes on from will be rotated away.
        self.resumed_from: str | None = None
        # The last line of metrics.jsonl at the checkpoint that the run goes on from, where that is of this folder.
        self.curve_ends: int | None = None
        if self.checkpoint and self.checkpoint.resolve().parent == self.output_dir.resolve():
            self.curve_ends = read_manifest(self.checkpoint).get("curve_ends")
        if named := named_checkpoint(self.output_dir, self.arguments.resume_from_checkpoint):
            self.resumed_from = str(named.resolve())
        elif self.checkpoint:
            self.resumed_from = read_manifest(self.checkpoint).get("resumed_from")

    def batches(self):
        """This rank's micro-batches from `start_step` to the end, in order."""
        sampler = StepSampler(
            self.mix,
            self.global_batch_size,
            self.arguments.per_device_train_batch_size,
            self.world,
            self.start_step,
            self.max_steps,
        )
        meet(self.world)
        loader = build_loader(self.dataset, sampler, self.arguments.dataloader_num_workers)
        return PromptBatches(loader, self.arguments.data_timeout, self.world.rank)

    def check_ranks(self, step: int) -> None:
        """Compare the ranks' parameters after the first update of this start, and after every `check_ranks_every`.

        Raises TrainingError on every rank where they differ.
        """
        every = self.arguments.check_ranks_every
        if every > 0 and (step == self.start_step + 1 or step % every == 0):
            check_ranks(dict(self.state.model.named_parameters()), step, self.world)

    def saves_after(self, step: int) -> bool:
        """Whether a checkpoint is due after update `step`: by `save_steps`, by `backup_every`, or as it is the last."""
        periods = (self.arguments.save_steps, self.arguments.backup_every)
        return step == self.max_steps or any(period > 0 and step % period == 0 for period in periods)

    def save(self, trainer_state: TrainerState, stopping: bool = False) -> None:
        """Write a checkpoint on the main process, while the others wait. All ranks call it together.

        Where the disk is full, training goes on with a warning and its older checkpoints; but the checkpoint with which
        a run ends must be written, else DiskFullError is raised.
        """
        unlogged = self.interval.state()
        with self.interval.paused():
            optimizer_state = whole_state(self.state.optimizer)
        if self.world.is_main:
            self._write(trainer_state, optimizer_state, unlogged, stopping)
        meet(self.world)

    def _write(self, trainer_state: TrainerState, optimizer_state: dict, unlogged: dict, stopping: bool) -> None:
        step = trainer_state.global_step
        facts = {
            "samples_seen": step * self.global_batch_size,
            "identity": self.identity,
            "unlogged": unlogged,
            "resumed_from": self.resumed_from,
            "curve_ends": last_step(self.output_dir / METRICS_FILE),
            "config": self.config,
        }
        limits = (self.arguments.save_total_limit, self.arguments.backup_every)
        try:
            with self.interval.paused():
                folder = save_checkpoint(
                    *(self.output_dir, self.state, trainer_state, facts, *limits),
                    optimizer_state=optimizer_state,
                    description=self.description,
                    records={DATA_FILE: self.dataset.fingerprint.record},
                )
        except DiskFullError as error:
            if stopping or step == self.max_steps:
                raise
            get_logger().warning("update %d is not saved, training goes on: %s", step, error)
            return
        get_logger().info("saved %s", folder)

    def interruption(self, step: int, number: int) -> Interrupted:
        """The error of a run that signal `number` stopped after update `step`; 0: a signal to another rank."""
        kind, again = (Interrupted if number == signal.SIGINT else Preempted), ""
        if kind is Preempted and self.world.is_main:
            note_stopped(self.output_dir, True)
        elif kind is Interrupted and self.arguments.overwrite_output_dir and not find_job(os.environ):
            again = " without --overwrite_output_dir"
        return kind(f"stopped after update {step} of {self.max_steps}; the same command again{again} goes on there")

    def finish(self) -> None:
        """Export the trained model on the main process and say where everything is. All ranks call it together.

        The last checkpoint's weights and state come to lie in the output folder too, where PaddleNLP leaves them.
        """
        restore_float32(self.state)
        if not self.world.is_main:
            return
        step = max(self.max_steps, self.start_step)  # a budget may be lower than what was trained before
        facts = {
            "ppldm": __version__,
            "global_step": step,
            "samples_seen": step * self.global_batch_size,
            **self.identity,
        }
        last = self.output_dir / f"checkpoint-{step}"
        for name in ("model_state.pdparams", "trainer_state.json"):
            link_or_copy((last if last.is_dir() else self.checkpoint) / name, self.output_dir / name)
        folder = self.export(facts)
        note_stopped(self.output_dir, False)
        get_logger().info("trained model: %s", folder)


def count_steps(arguments: LDMTrainingArguments, num_rows: int, global_batch_size: int) -> int:
    """Updates in all: `max_samples` rounded up to whole batches, or `max_steps`, or the epochs' rows, rounded up.

    Raises ConfigError where samples and steps are given and differ.
    """
    if arguments.max_samples is not None:
        steps = math.ceil(arguments.max_samples / global_batch_size)
        if arguments.max_steps > 0 and arguments.max_steps not in (steps, LOOP_DEFAULTS["max_steps"]):
            raise ConfigError(
                f"--max_samples {arguments.max_samples} is {steps} updates of {global_batch_size} samples, and "
                f"--max_steps says {arguments.max_steps}; give one of them"
            )
        return steps
    if arguments.max_steps > 0:
        return arguments.max_steps
    return math.ceil(arguments.num_train_epochs * num_rows / global_batch_size)


def open_sources(arguments: DataArguments, flag: str = "file_list") -> list[Source]:
    """The weighted lists of parts behind `flag`, and a line in the log about them.

    Raises FilelistError that names the flag, and ConfigError for a `--layout` or `--where` that cannot be.
    """
    quiet_libraries()
    _where(arguments)
    path = getattr(arguments, flag)
    try:
        sources = read_sources(path, arguments.layout)
    except FilelistError as error:
        raise FilelistError(f"--{flag}: {error}") from error
    num_parts = sum(len(source.parts) for source in sources)
    get_logger().info("%s: %s in %s from %s",
                      "data" if flag == "file_list" else "held out", count_of(num_parts, "part"),
                      count_of(len(sources), "list"), path)  # fmt: skip
    return sources


def select_training_rows(
    sources: list[Source], data_arguments: DataArguments, arguments: LDMTrainingArguments, world: World
) -> Selection:
    """The rows that `--where` holds for and that are no smaller than `--resolution`, and a table of the others in the
    log. Parts without an index are indexed first, over all cores. Raises DataError, OutputError."""
    num_workers = max(arguments.dataloader_num_workers, count_usable_cores() // world.size, 1)
    selection = select_rows(sources, _where(data_arguments), data_arguments.resolution, num_workers)
    if selection.skipped:
        selection.log()
    return selection


def _where(arguments: DataArguments) -> Expression | None:
    return None if arguments.where is None else parse_where(arguments.where)


def run_identity(
    arguments: LDMTrainingArguments,
    data_arguments: DataArguments,
    dataset: TextImageDataset,
    global_batch_size: int,
    max_steps: int,
) -> dict:
    """What decides which samples a step sees and what it makes of them, by name, JSON-ready.

    A checkpoint of another run differs in it. What speed and memory alone depend on is no part of it.
    """
    where = _where(data_arguments)
    constant = arguments.lr_scheduler_type in ("constant", "constant_with_warmup")
    return {
        "seed": arguments.seed,
        "where": None if where is None else str(where),
        "data": dataset.fingerprint.digest,
        "rows": len(dataset),
        "weights": dataset.weights,
        "global_batch_size": global_batch_size,
        "max_steps": None if constant else max_steps,
        "precision": precision_name(arguments),
        **{name: getattr(data_arguments, name) for name in _DATA_SETTINGS},
        **{name: getattr(arguments, name) for name in _OPTIMIZER_SETTINGS},
    }


def bad_row_policy(arguments: DataArguments) -> BadRows:
    """What `--max_skipped` asks for."""
    return BadRows("count", arguments.max_skipped) if arguments.max_skipped > 0 else BadRows("raise", 1)


def detect_world(arguments: LDMTrainingArguments) -> World:
    """The ranks of this run. PaddleNLP's arguments have started the communication already."""
    world = World.detect()
    watch_ranks(world, arguments.rank_timeout)
    apply_switches(arguments)
    per_step = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps * world.size
    get_logger().info(
        "global_batch_size %d = %d per device x %d accumulation x %s on %s",
        *(per_step, arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps),
        *(count_of(world.size, "rank"), paddle.get_device()),
    )
    return world


_held_folders = []  # open lock files: a run holds its folder as long as the process lives


def prepare_output(arguments: LDMTrainingArguments, world: World, config: dict) -> Path | None:
    """Create the output folder, hold it, mark it by a run.json, and return the checkpoint to resume from, if any.

    The main process decides for all ranks. `resume_from_checkpoint` says which (`find_checkpoint`): by default the
    newest sound one. `overwrite_output_dir` starts anew, once (`start.begins_anew`). A folder that holds something else
    is refused. Raises ConfigError, CheckpointError or OutputError.
    """
    folder = Path(arguments.output_dir)
    chosen = [None]
    if world.is_main:
        make_output_dir(folder)
        _check_output(arguments, folder)
        _held_folders.append(lock_folder(folder))
        if freed := remove_leftovers(folder):
            get_logger().info("removed %.3f GB that an interrupted run left unfinished", freed / 1e9)
        _record_start(arguments, folder, config)
        chosen = [find_checkpoint(folder, arguments.resume_from_checkpoint)]
        if chosen[0]:
            set_aside_after(folder, read_manifest(chosen[0])["global_step"])
        if not (folder / RUN_FILE).exists():
            write_json(folder / RUN_FILE, config)
        if writes_files(arguments.reporters):
            make_output_dir(arguments.logging_dir)
    if world.size > 1:
        with waiting(world):
            meet(world)
            paddle.distributed.broadcast_object_list(chosen, src=0)
    leave_signs(folder)
    return chosen[0]


def _record_start(arguments: LDMTrainingArguments, folder: Path, config: dict) -> None:
    """Begin anew where `overwrite_output_dir` means it, and leave a record of this start."""
    last, job, command = read_start(folder), find_job(os.environ), checksum_of(config)
    overwrites, anew = arguments.overwrite_output_dir, False
    if overwrites:
        anew, why_not = begins_anew(last, job, command)
        if why_not:
            get_logger().warning(
                "--overwrite_output_dir: the run in %s goes on, as %s; remove the folder to start anew", folder, why_not
            )
    start = next_start(last, job, command, overwrites, anew)
    if anew:
        write_start(folder, dataclasses.replace(start, clearing=True))
        for old in (*list_checkpoints(folder), folder / METRICS_FILE):
            shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)
    write_start(folder, start)


def _check_output(arguments: LDMTrainingArguments, folder: Path) -> None:
    """Raises ConfigError for a folder with files that are no run of ours."""
    ours = (folder / RUN_FILE).exists() or list_checkpoints(folder)
    if not ours and not arguments.overwrite_output_dir and folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(
            f"--output_dir {folder} holds files that are no run of ppldm; "
            "choose another folder, or add --overwrite_output_dir to write among them"
        )


def resolved_config(*groups) -> dict:
    """All settings by group, JSON-ready, for run.json."""
    return {
        "ppldm": __version__,
        **{type(group).__name__: _plain(dataclasses.asdict(group)) for group in groups},
    }


def _plain(settings: dict) -> dict:
    return json.loads(json.dumps(settings, default=str))

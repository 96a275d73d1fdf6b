"""Checkpoints: one format for both loops, written whole or not at all.

docs/training.md lists the files. Their names are those of PaddleNLP's Trainer, so that its tools read them. There is no
random state: every draw is a function of (seed, epoch, row). The position in the data is `samples_seen`, the number of
samples taken from the endless order of `ppldm.data.order`.

A checkpoint takes its name by one rename, after every byte is on disk; older ones go after it was read back and found
sound. So whatever moment a process is killed at, the newest folder named checkpoint-<step> is whole; `verify` is what
decides that. `resume.py` reads it.

Paddle keys an optimizer's state by generated names. Models are built, and loops run, under a `unique_name` guard of
their own, so that these names are the same in every process and whatever ran before in it.
"""

from __future__ import annotations

import json
import platform
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from .. import __version__
from ..utils.checksums import checksum_file, checksum_json
from ..utils.errors import FULL_DISK, CheckpointError, ConfigError, DiskFullError, OutputError
from ..utils.files import (
    atomic_dir,
    count_free_bytes,
    make_output_dir,
    passing_over,
    read_json_object,
    remove_dir,
    write_json,
)
from ..utils.log import get_logger
from ..utils.machine.devices import device_model
from ..utils.processes.ranks import World
from ..utils.text import hide
from ..utils.variables import read
from ..weights.folders import checkpoint_name, list_checkpoints, may_be_dir, step_of
from ..weights.model_file import ModelDescription

if TYPE_CHECKING:
    import paddle

    from ..networks.ema import ExponentialMovingAverage

MANIFEST = "manifest.json"
_LATEST = ("", "latest", "last", "auto", "true", "1")  # spellings of --resume_from_checkpoint
_NOTHING = ("false", "none", "no", "0")
POSTHOC_STATE = "ema_posthoc_state.pdparams"
DATA_FILE = "data.json.gz"
_OVERHEAD_BYTES = 1 << 20  # names, pickle, JSON
TUNING = ("OMP_NUM_THREADS", "MKL_DEBUG_CPU_TYPE")  # variables that choose the order of sums on a CPU
# What PaddleNLP's TrainerState holds besides, at its start.
_STATE: dict[str, object] = {"log_history": []}
_STATE |= dict.fromkeys(("epoch", "best_metric", "best_model_checkpoint", "trial_name", "trial_params"))
_STATE |= dict.fromkeys(("consumed_samples", "num_train_epochs", "total_flos"), 0)
_STATE |= dict.fromkeys(("is_local_process_zero", "is_world_process_zero"), True)


@dataclass
class TrainerState:
    """trainer_state.json of the hand-written loop, which knows the step and the last one."""

    global_step: int = 0
    max_steps: int = 0

    def save_to_json(self, path: str) -> None:
        """Write the file as PaddleNLP does, to the byte."""
        fields = {**_STATE, "global_step": self.global_step, "max_steps": self.max_steps}
        Path(path).write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@dataclass
class TrainingState:
    """What a checkpoint holds besides the step: the objects that change while training."""

    model: paddle.nn.Layer
    optimizer: paddle.optimizer.Optimizer
    scheduler: paddle.optimizer.lr.LRScheduler
    ema: ExponentialMovingAverage | None = None
    scaler: paddle.amp.GradScaler | None = None
    posthoc: dict[float, ExponentialMovingAverage] = field(default_factory=dict)  # by relative standard deviation

    @property
    def shares(self):
        """The `ParameterShares` by which a rank holds only the parameters that it owns; None below stage 3."""
        return getattr(self.optimizer, "parameter_shares", None)

    @property
    def averages(self) -> list[ExponentialMovingAverage]:
        """All that are kept."""
        return [average for average in (self.ema, *self.posthoc.values()) if average]

    def whole_parameters(self):
        """A context in which all ranks hold all parameters. A collective call."""
        return self.shares.whole() if self.shares else nullcontext()

    def whole_averages(self):
        """A context in which the main process holds all of the averages. A collective call."""
        return self.shares.whole_averages(self.averages) if self.shares else nullcontext()

    def posthoc_state(self) -> dict[str, dict]:
        """What `POSTHOC_STATE` holds; nothing without --ema_posthoc."""
        return {f"{std:g}": average.state_dict() for std, average in self.posthoc.items()}

    @property
    def unsaved(self) -> tuple[str, ...]:
        """Prefixes of the weights that are not saved: of a model that others are told by its checksum."""
        return tuple(f"{name}." for name in getattr(self.model, "unsaved", ()))

    def untrained(self, step: int) -> set[str]:
        """The names of the parameters of components that are not trained yet after so many updates."""
        components = getattr(self.model, "components", {}).values()
        return {p.name for one in components if one.starts >= max(1, step) for p in one.layer.parameters()}


def contents_of(state: TrainingState) -> dict[str, dict]:
    """What the files of a checkpoint hold that change while training, by name. The tensors are those in use. Where
    ranks have shares it is a collective call, and whole on the main process, of averages in `whole_averages`."""
    weights = state.model.state_dict() | (state.shares.gather() if state.shares else {})
    contents = {
        "model_state.pdparams": without(weights, state.unsaved),
        "optimizer.pdopt": getattr(state.optimizer, "whole_state", state.optimizer.state_dict)(),
        "scheduler.pdparams": state.scheduler.state_dict(),
    }
    if state.scaler:
        contents["scaler.pdparams"] = state.scaler.state_dict()
    if state.ema:
        contents["ema_state.pdparams"] = state.ema.state_dict()
    if state.posthoc:
        contents[POSTHOC_STATE] = state.posthoc_state()
    return contents


def save_checkpoint(
    output_dir,
    contents: dict[str, dict],
    trainer_state: TrainerState,
    metadata: dict,
    save_total_limit: int | None = None,
    backup_every: int = 0,
    description: ModelDescription | None = None,
    records: dict[str, bytes] | None = None,
) -> Path:
    """Write `checkpoint-<global_step>`, verify it, then remove the oldest beyond `save_total_limit` (None, 0: none),
    but for those after a multiple of `backup_every` updates. `contents`: what `contents_of` gives, or copies of it.
    `metadata` go into the manifest, JSON-ready: `samples_seen`, `identity` and whatever else a resumed run wants back.
    `description`: without it other programs cannot read the checkpoint. `records`: further small files, by name. Raises
    DiskFullError, with the older checkpoints untouched."""
    from ..weights.formats.paddle_files import write_tree

    step = trainer_state.global_step
    folder = make_output_dir(output_dir) / checkpoint_name(step)
    num_bytes = count_bytes(contents) + (description.num_bytes if description else 0) + _OVERHEAD_BYTES
    with room_for(folder, num_bytes), atomic_dir(folder) as target:
        for name, content in contents.items():
            write_tree(target / name, content)
        trainer_state.save_to_json(str(target / "trainer_state.json"))
        if description:
            description.write(target)
        for name, content in (records or {}).items():
            (target / name).write_bytes(content)
        paths = sorted(path for path in target.rglob("*") if path.is_file())
        files = {path.relative_to(target).as_posix(): checksum_file(path) for path in paths}
        manifest = {"global_step": step, **metadata, "versions": versions(), "files": files}
        write_json(target / MANIFEST, {**manifest, "crc32": checksum_json(manifest)})
    if problem := verify(folder):
        raise CheckpointError(f"{folder} does not verify after writing ({problem}); check the disk")
    if save_total_limit and save_total_limit > 0:
        for old in removable(list_checkpoints(output_dir), step, save_total_limit, backup_every):
            with passing_over(old):
                remove_dir(old)
    return folder


def removable(folders: list[Path], step: int, limit: int, backup_every: int) -> list[Path]:
    """Of checkpoints, newest first, those beyond the newest `limit` up to `step`, without backups. Later ones than
    `step` are none of this run's making, and count for nothing."""
    own = [folder for folder in folders if step_of(folder) <= step]
    return [folder for folder in own[limit:] if not (backup_every > 0 and step_of(folder) % backup_every == 0)]


def count_bytes(state) -> int:
    """The bytes of all tensors in nested dicts."""
    if isinstance(state, dict):
        return sum(map(count_bytes, state.values()))
    return int(state.size) * state.element_size() if hasattr(state, "element_size") else 0


@contextmanager
def room_for(path: Path, num_bytes: int):
    """Raises DiskFullError where there is too little for a folder, or file, of so many bytes, or becomes so inside."""
    free = count_free_bytes(path.parent)
    if free < num_bytes:
        text = f"{path} needs {num_bytes / 1e9:.3f} GB, {path.parent} has {free / 1e9:.3f} GB free"
        raise DiskFullError(f"{text}; free some, or keep fewer checkpoints with --save_total_limit")
    try:
        yield
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        raise DiskFullError(f"the disk filled up while writing {path} ({error.strerror}); free some") from error


def versions() -> dict[str, str]:
    """What a checkpoint is written with: the same bits may need the same."""
    import paddle

    packages = {name: metadata.version(name) for name in ("paddlenlp", "ppdiffusers", "numpy")}
    return {"ppldm": __version__, "python": platform.python_version(), "paddle": paddle.__version__, **packages}


def without(weights: dict, prefixes: tuple[str, ...]) -> dict:
    """The weights whose names begin with none of these."""
    return {name: value for name, value in weights.items() if not name.startswith(prefixes)}


def machine_record(world: World) -> dict:
    """The kind of machine that this process computes on, JSON-ready: another one may give other last bits."""
    return {"device": device_model(), "ranks": world.size, **{name: read(name) for name in TUNING}}


def read_manifest(folder) -> dict:
    """The manifest of a checkpoint. Raises CheckpointError."""
    return read_json_object(Path(folder, MANIFEST), CheckpointError, "this is not a finished checkpoint")


def verify(folder) -> str | None:
    """None if manifest and files are there with their sizes and checksums, else what is wrong."""
    try:
        manifest = read_manifest(folder)
        files = dict(manifest["files"])
        # Those written before there was one have no checksum of the manifest itself.
        if manifest.pop("crc32", None) not in (None, checksum_json(manifest)):
            return f"{MANIFEST} has changed"
    except (CheckpointError, KeyError, TypeError, ValueError) as error:
        reason = getattr(error.__cause__, "strerror", None)
        return f"no readable {MANIFEST}{f' ({reason})' if reason else ''}"
    for name, expected in files.items():
        path = Path(folder, name)
        try:
            if not path.is_file():
                return f"{name} is missing"
            if checksum_file(path) != expected:
                return f"{name} has changed or is cut short"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror or error})"
    return None


def newest_checkpoint(output_dir) -> Path | None:
    """The newest checkpoint that verifies; says which it passed over, and why. None where there are no checkpoints.
    Raises CheckpointError where there are some and none of them verifies: to begin again from nothing is not for a
    restart at night to decide."""
    folders = list_checkpoints(output_dir)
    for folder in folders:
        if (problem := verify(folder)) is None:
            return folder
        get_logger().warning("passing over %s: %s", folder, problem)
    if folders:
        text = f"none of the {len(folders)} checkpoints in {output_dir} verifies"
        raise CheckpointError(f"{text}; restore one, or start anew with --overwrite_output_dir")
    return None


def named_checkpoint(output_dir, wanted: str | None) -> Path | None:
    """The folder that `--resume_from_checkpoint` names, by its path or by its name in `output_dir`; None for a word."""
    if wanted is None or wanted.strip().lower() in (*_LATEST, *_NOTHING):
        return None
    return next((path for path in (Path(wanted), Path(output_dir, wanted)) if may_be_dir(path)), Path(wanted))


def find_checkpoint(output_dir, wanted: str | None) -> Path | None:
    """The checkpoint that `--resume_from_checkpoint` means; None to start from nothing. Not given, `latest`, `last`,
    `auto` or `true`: the newest sound one of `output_dir`, if any. The folder of one: that one, or what this very
    command has reached from it before it was stopped. `false`, `none` or `no`: nothing, refused where there is
    something. Raises CheckpointError, ConfigError."""
    named = named_checkpoint(output_dir, wanted)
    if named:
        problem = verify(named) if may_be_dir(named) else "no such folder"
        if problem:
            raise CheckpointError(f"cannot resume from {wanted}: {problem}; choose another --resume_from_checkpoint")
        origin = hide(str(named.resolve()))
        sound = (folder for folder in list_checkpoints(output_dir) if verify(folder) is None)
        return next((one for one in sound if read_manifest(one).get("resumed_from") == origin), named)
    found = list_checkpoints(output_dir)
    if found and wanted and wanted.strip().lower() in _NOTHING:
        text = f"--resume_from_checkpoint {wanted}, but {output_dir} holds {found[0].name}"
        raise ConfigError(f"{text}; add --overwrite_output_dir to start anew, or choose another folder")
    return newest_checkpoint(output_dir)


def set_aside_after(output_dir, step: int) -> None:
    """Rename the checkpoints after update `step` to `abandoned-checkpoint-<n>`, so that no later start finds them."""
    for folder in list_checkpoints(output_dir):
        if step_of(folder) > step:
            target = folder.with_name(f"abandoned-{folder.name}")
            if target.exists():
                remove_dir(target)
            try:
                folder.rename(target)
            except OSError as error:
                text = f"cannot rename {folder} to {target.name} ({error.strerror}); move it away"
                raise OutputError(text) from error
            get_logger().warning("going on from update %d: %s is now %s", step, folder, target.name)

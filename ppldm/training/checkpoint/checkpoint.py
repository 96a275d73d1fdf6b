"""Checkpoints: one format for both loops, written whole or not at all, read only if it verifies.

    checkpoint-<step>/
        model_state.pdparams   every parameter, frozen ones included, each after the name of its component
        optimizer.pdopt        moments, and the learning rate's position
        scheduler.pdparams     learning rate schedule
        scaler.pdparams        loss scaler (float16 only)
        ema_state.pdparams     averaged weights and their number of updates (where an average is kept)
        ema_posthoc_state.pdparams  the same of the averages of --ema_posthoc, by standard deviation
        trainer_state.json     as PaddleNLP has it: global_step and the rest
        model.json             what it is made of: configs of all networks, noise schedule, tokenizer
        tokenizer/             the tokenizer's files (not of an autoencoder)
        data.json.gz           what the run is trained on, part by part (ppldm.data.fingerprint)
        recipe.yaml            all settings of the run (ppldm.config.write)
        manifest.json          written last: step, samples seen, flags, versions, size and CRC-32 of each file, its own

The names are those of PaddleNLP's Trainer, so that its tools read them. There is no random state: every draw is a
function of (seed, epoch, row). The position in the data is `samples_seen`, the number of samples taken from the
endless order of `ppldm.data.order.rows`.

A checkpoint takes its name by one rename, after every byte is on disk; older ones go after it was read back and found
sound. So whatever moment a process is killed at, the newest folder named checkpoint-<step> is whole.

Paddle keys an optimizer's state by generated names. Models are built, and loops run, under a `unique_name` guard of
their own, so that these names are the same in every process and whatever ran before in it.
"""

import dataclasses
import json
import platform
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import numpy as np
import paddle

from ... import __version__
from ...networks.ema import ExponentialMovingAverage
from ...utils.checksums import checksum_file, checksum_json
from ...utils.errors import FULL_DISK, CheckpointError, ConfigError, DiskFullError, OutputError
from ...utils.files import (
    atomic_dir,
    count_free_bytes,
    make_output_dir,
    passing_over,
    read_json_object,
    remove_dir,
    write_json,
)
from ...utils.hidden import hide
from ...utils.log import get_logger
from ...utils.machine.devices import device_model, host_memory
from ...utils.processes.world import World
from ...utils.variables import read
from ...weights.folders import checkpoint_name, list_checkpoints, may_be_dir, step_of
from ...weights.formats.paddle_files import NAME_TABLE, read_tree, write_tree
from ...weights.model_file import ModelDescription
from ..optimizer.sharding import ShardedOptimizer, parameter_of

MANIFEST = "manifest.json"
SNAPSHOTS = "ema_snapshots"  # of averages, in the output folder
_LATEST = ("", "latest", "last", "auto", "true", "1")  # spellings of --resume_from_checkpoint
_NOTHING = ("false", "none", "no", "0")
POSTHOC_STATE = "ema_posthoc_state.pdparams"
_OVERHEAD_BYTES = 1 << 20  # names, pickle, JSON
TUNING = ("OMP_NUM_THREADS", "MKL_DEBUG_CPU_TYPE")  # variables that choose the order of sums on a CPU


@dataclass
class TrainerState:
    """trainer_state.json: the fields of PaddleNLP's TrainerState. The hand-written loop knows the step and the last
    one."""

    epoch: float | None = None
    global_step: int = 0
    consumed_samples: int = 0
    max_steps: int = 0
    num_train_epochs: int = 0
    total_flos: float = 0
    log_history: list = field(default_factory=list)
    best_metric: float | None = None
    best_model_checkpoint: str | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    trial_name: str | None = None
    trial_params: dict | None = None

    def save_to_json(self, path: str) -> None:
        """Write the file as PaddleNLP does, to the byte."""
        text = json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True) + "\n"
        Path(path).write_text(text, encoding="utf-8")


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
    def averages(self) -> list[ExponentialMovingAverage]:
        """All that follow the weights."""
        return [*([self.ema] if self.ema else []), *self.posthoc.values()]

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


def contents_of(state: TrainingState, optimizer_state: dict | None = None) -> dict[str, dict]:
    """What the files of a checkpoint hold that change while training, by name. The tensors are those in use.

    `optimizer_state` is the whole of it where ranks have shares (None: all is in `state`).
    """
    contents = {
        "model_state.pdparams": _without(state.model.state_dict(), state.unsaved),
        "optimizer.pdopt": state.optimizer.state_dict() if optimizer_state is None else optimizer_state,
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
    """Write `checkpoint-<global_step>`, verify it, then remove the oldest beyond `save_total_limit` (None, 0: none).

    `contents`: what `contents_of` gives, or copies of it. `metadata` go into the manifest, JSON-ready: `samples_seen`,
    `identity` (what decides which samples a step sees; resuming compares it) and whatever else a resumed run wants
    back. A checkpoint after a multiple of `backup_every` updates is never removed.
    `description`: what the model is made of, without which other programs cannot read the checkpoint.
    `records` are further small files, by name.
    Raises DiskFullError, with the older checkpoints untouched.
    """
    step = trainer_state.global_step
    folder = make_output_dir(output_dir) / checkpoint_name(step)
    own_bytes = description.num_bytes if description else 0
    require_space(folder, count_bytes(contents) + own_bytes + _OVERHEAD_BYTES)
    try:
        with atomic_dir(folder) as target:
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
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        raise DiskFullError(f"the disk filled up while writing {folder} ({error.strerror}); free some") from error
    problem = verify(folder)
    if problem:
        raise CheckpointError(f"{folder} does not verify after writing ({problem}); check the disk")
    if save_total_limit and save_total_limit > 0:
        for old in removable(list_checkpoints(output_dir), step, save_total_limit, backup_every):
            with passing_over(old):
                remove_dir(old)
    return folder


def removable(folders: list[Path], step: int, limit: int, backup_every: int) -> list[Path]:
    """Of checkpoints, newest first, those beyond the newest `limit` up to `step`, without backups.

    Later ones than `step` are none of this run's making, and count for nothing.
    """
    own = [folder for folder in folders if step_of(folder) <= step]
    return [folder for folder in own[limit:] if not (backup_every > 0 and step_of(folder) % backup_every == 0)]


def count_bytes(state) -> int:
    """The bytes of all tensors in nested dicts."""
    if isinstance(state, dict):
        return sum(map(count_bytes, state.values()))
    return int(state.size) * state.element_size() if isinstance(state, paddle.Tensor) else 0


def require_space(folder: Path, num_bytes: int) -> None:
    """Raises DiskFullError where there is too little for `folder`, or a file, of so many bytes."""
    free = count_free_bytes(folder.parent)
    if free < num_bytes:
        raise DiskFullError(
            f"{folder} needs {num_bytes / 1e9:.3f} GB, {folder.parent} has {free / 1e9:.3f} GB free; "
            "free some, or keep fewer checkpoints with --save_total_limit"
        )


def versions() -> dict[str, str]:
    """What a checkpoint is written with: the same bits may need the same."""
    packages = {name: metadata.version(name) for name in ("paddlenlp", "ppdiffusers", "numpy")}
    return {"ppldm": __version__, "python": platform.python_version(), "paddle": paddle.__version__, **packages}


def load_model(folder: Path, state: TrainingState, kept: tuple[str, ...] = ()) -> None:
    """Read weights and their average into `state`, but for the components `kept`, whose weights stay as they are.

    Raises CheckpointError where they do not fit.
    """
    kept = (*(f"{name}." for name in kept), *state.unsaved)
    weights = _load(folder / "model_state.pdparams", return_numpy=True)
    own = state.model.state_dict()
    weights = _without(weights, kept)
    weights |= {name: value.numpy() for name, value in own.items() if name.startswith(kept)}
    for name, value in own.items():
        if name not in weights or tuple(weights[name].shape) != tuple(value.shape):
            found = tuple(weights[name].shape) if name in weights else "nothing"
            raise CheckpointError(
                f"{folder} holds {found} for {name}, this model wants {tuple(value.shape)}; "
                "resume with the flags the run was started with, or use another --output_dir"
            )
    if unknown := weights.keys() - own.keys():
        raise CheckpointError(
            f"{folder} holds weights that this model has not, {min(unknown)} for one; "
            "resume with the flags the run was started with, or use another --output_dir"
        )
    state.model.set_state_dict(weights)
    average = folder / "ema_state.pdparams"
    if state.ema:
        if not average.is_file():
            raise CheckpointError(
                f"{folder} holds no averaged weights; resume without --use_ema, as the run was started"
            )
        state.ema.load_state_dict(_load(average))
    elif average.is_file():
        get_logger().warning("%s holds averaged weights, which are dropped: --use_ema is not given", folder)
    _load_posthoc(folder / POSTHOC_STATE, state)


def _load_posthoc(path: Path, state: TrainingState) -> None:
    if not state.posthoc:
        if path.is_file():
            get_logger().warning("%s is dropped: --ema_posthoc is not given", path)
        return
    found = _load(path) if path.is_file() else {}
    for std, average in state.posthoc.items():
        if f"{std:g}" not in found:
            raise CheckpointError(
                f"{path.parent} holds no average of --ema_posthoc {std:g}, which is tracked from the first update on; "
                "resume as the run was started, or start anew in another --output_dir"
            )
        average.load_state_dict(found[f"{std:g}"])


def _without(weights: dict, prefixes: tuple[str, ...]) -> dict:
    return {name: value for name, value in weights.items() if not name.startswith(prefixes)}


def _load(path: Path, return_numpy: bool = False) -> dict:
    """What paddle.load would give of a file that paddle.save wrote; nothing in it is run. Raises ModelError."""
    tree = read_tree(path)
    names = tree.pop(NAME_TABLE, {})
    for key, name in names.items() if isinstance(names, dict) else ():
        if isinstance(tree.get(key), np.ndarray):
            tree[key] = (name, tree[key])
    return _as_tensors(tree, return_numpy)


def _as_tensors(value, return_numpy: bool):
    """Arrays, alone or as (name, array), as tensors of that name on the current device, or as arrays."""
    if isinstance(value, dict):  # which is emptied meanwhile: an optimizer's state is too large to have it twice
        return {key: _as_tensors(value.pop(key), return_numpy) for key in list(value)}
    name, array = value if isinstance(value, tuple) and len(value) == 2 else (None, value)
    if not isinstance(array, np.ndarray):
        return value
    if return_numpy:
        return array
    tensor = paddle.to_tensor(array)  # of uint16, which stands for it, bfloat16
    if name:
        tensor.name = name
    return tensor


def load_optimizer(folder: Path, state: TrainingState) -> None:
    """Read optimizer, schedule and scaler into `state`.

    Raises CheckpointError where some parameters have moments and others none; before the first update, none has.
    """
    with host_memory() if isinstance(state.optimizer, ShardedOptimizer) else nullcontext():
        moments = _load(folder / "optimizer.pdopt")
    known = {parameter_of(key) for key in moments} - {None}
    known |= state.untrained(read_manifest(folder)["global_step"]) if known else set()
    for parameter in state.model.parameters():
        if known and not parameter.stop_gradient and parameter.name not in known:
            raise CheckpointError(
                f"{folder} has no optimizer state for {parameter.name}; "
                "resume with the flags the run was started with, or use another --output_dir"
            )
    state.optimizer.set_state_dict(moments)
    state.scheduler.set_state_dict(_load(folder / "scheduler.pdparams"))
    # There is none where the run went on in float16 only now, which --accept_changes precision allows.
    if state.scaler and (folder / "scaler.pdparams").is_file():
        state.scaler.load_state_dict(_load(folder / "scaler.pdparams", return_numpy=True))


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
    restart at night to decide.
    """
    folders = list_checkpoints(output_dir)
    for folder in folders:
        problem = verify(folder)
        if problem is None:
            return folder
        get_logger().warning("passing over %s: %s", folder, problem)
    if folders:
        raise CheckpointError(
            f"none of the {len(folders)} checkpoints in {output_dir} verifies; "
            "restore one, or start anew with --overwrite_output_dir"
        )
    return None


def named_checkpoint(output_dir, wanted: str | None) -> Path | None:
    """The folder that `--resume_from_checkpoint` names, by its path or by its name in `output_dir`; None for a word."""
    if wanted is None or wanted.strip().lower() in (*_LATEST, *_NOTHING):
        return None
    return next((path for path in (Path(wanted), Path(output_dir, wanted)) if may_be_dir(path)), Path(wanted))


def find_checkpoint(output_dir, wanted: str | None) -> Path | None:
    """The checkpoint that `--resume_from_checkpoint` means; None to start from nothing.

    Not given, `latest`, `last`, `auto` or `true`: the newest sound one of `output_dir`, if any. The folder of one:
    that one, or what this very command has reached from it before it was stopped. `false`, `none` or `no`: nothing,
    refused where there is something. Raises CheckpointError, ConfigError.
    """
    named = named_checkpoint(output_dir, wanted)
    if named:
        problem = verify(named) if may_be_dir(named) else "no such folder"
        if problem:
            raise CheckpointError(f"cannot resume from {wanted}: {problem}; choose another --resume_from_checkpoint")
        return _reached_from(named, output_dir) or named
    found = list_checkpoints(output_dir)
    if found and wanted and wanted.strip().lower() in _NOTHING:
        raise ConfigError(
            f"--resume_from_checkpoint {wanted}, but {output_dir} holds {found[0].name}; "
            "add --overwrite_output_dir to start anew, or choose another folder"
        )
    return newest_checkpoint(output_dir)


def _reached_from(origin: Path, output_dir) -> Path | None:
    """The newest sound checkpoint of a run in `output_dir` that was told to resume from `origin`."""
    for folder in list_checkpoints(output_dir):
        if verify(folder) is None and read_manifest(folder).get("resumed_from") == hide(str(origin.resolve())):
            return folder
    return None


def set_aside_after(output_dir, step: int) -> None:
    """Rename the checkpoints after update `step` to `abandoned-checkpoint-<n>`: a run that goes on from `step` must not
    find them when it is started again."""
    for folder in list_checkpoints(output_dir):
        if step_of(folder) > step:
            target = folder.with_name(f"abandoned-{folder.name}")
            if target.exists():
                remove_dir(target)
            try:
                folder.rename(target)
            except OSError as error:
                raise OutputError(
                    f"cannot rename {folder} to {target.name} ({error.strerror}); move it away"
                ) from error
            get_logger().warning("going on from update %d: %s is now %s", step, folder, target.name)


def machine_record(world: World) -> dict:
    """The kind of machine that this process computes on, JSON-ready: another one may give other last bits."""
    return {"device": device_model(), "ranks": world.size, **{name: read(name) for name in TUNING}}

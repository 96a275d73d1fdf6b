"""Checkpoints: one format for both loops, written whole or not at all, read only if it verifies.

    checkpoint-<step>/
        model_state.pdparams   every parameter, frozen ones included (prefixes vae. text_encoder. unet.)
        optimizer.pdopt        moments, and the learning rate's position
        scheduler.pdparams     learning rate schedule
        scaler.pdparams        loss scaler (float16 only)
        ema_state.pdparams     averaged weights and their number of updates (where an average is kept)
        trainer_state.json     PaddleNLP's TrainerState: global_step and the rest
        manifest.json          written last: step, samples seen, size and CRC-32 of each file

The names are those of PaddleNLP's Trainer, so that its tools read them. There is no random state: every draw is a
function of (seed, epoch, row), and the position in the data is the step.

Paddle keys an optimizer's state by generated names. Models are built, and loops run, under a `unique_name` guard of
their own, so that these names are the same in every process and whatever ran before in it.
"""

import json
import re
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path

import paddle
from paddlenlp.trainer import TrainerState

from ..models.ema import ExponentialMovingAverage
from ..utils.errors import CheckpointError
from ..utils.files import atomic_dir, write_json
from ..utils.log import get_logger

MANIFEST = "manifest.json"
_NAME = re.compile(r"checkpoint-(\d+)")


@dataclass
class TrainingState:
    """What a checkpoint holds besides the step: the objects that change while training."""

    model: paddle.nn.Layer
    optimizer: paddle.optimizer.Optimizer
    scheduler: paddle.optimizer.lr.LRScheduler
    ema: ExponentialMovingAverage | None = None
    scaler: paddle.amp.GradScaler | None = None


def save_checkpoint(
    output_dir,
    state: TrainingState,
    trainer_state: TrainerState,
    samples_seen: int,
    identity: dict,
    unlogged: dict,
    save_total_limit: int | None,
) -> Path:
    """Write `checkpoint-<global_step>`, verify it, then remove the oldest beyond `save_total_limit`.

    `identity` is what decides which samples a step sees; resuming compares it. `unlogged` is what happened
    since the last log line, ready for JSON.
    """
    step = trainer_state.global_step
    folder = Path(output_dir, f"checkpoint-{step}")
    with atomic_dir(folder) as target:
        paddle.save(state.model.state_dict(), str(target / "model_state.pdparams"))
        paddle.save(state.optimizer.state_dict(), str(target / "optimizer.pdopt"))
        paddle.save(state.scheduler.state_dict(), str(target / "scheduler.pdparams"))
        if state.scaler:
            paddle.save(state.scaler.state_dict(), str(target / "scaler.pdparams"))
        if state.ema:
            paddle.save(state.ema.state_dict(), str(target / "ema_state.pdparams"))
        trainer_state.save_to_json(str(target / "trainer_state.json"))
        files = {path.name: _identity(path) for path in sorted(target.iterdir())}
        write_json(
            target / MANIFEST,
            {
                "global_step": step,
                "samples_seen": samples_seen,
                "identity": identity,
                "unlogged": unlogged,
                "files": files,
            },
        )
    problem = verify(folder)
    if problem:
        raise CheckpointError(f"{folder} does not verify after writing ({problem}); check the disk")
    if save_total_limit and save_total_limit > 0:
        for old in list_checkpoints(output_dir)[save_total_limit:]:
            shutil.rmtree(old)
    return folder


def load_model(folder: Path, state: TrainingState) -> None:
    """Read weights and their average into `state`. Raises CheckpointError where they do not fit."""
    weights = paddle.load(str(folder / "model_state.pdparams"), return_numpy=True)
    own = state.model.state_dict()
    for name, value in own.items():
        if name not in weights or tuple(weights[name].shape) != tuple(value.shape):
            found = tuple(weights[name].shape) if name in weights else "nothing"
            raise CheckpointError(
                f"{folder} holds {found} for {name}, this model wants {tuple(value.shape)}; "
                "resume with the flags the run was started with, or use another --output_dir"
            )
    state.model.set_state_dict(weights)
    average = folder / "ema_state.pdparams"
    if state.ema:
        if not average.is_file():
            raise CheckpointError(
                f"{folder} holds no averaged weights; resume without --use_ema, as the run was started"
            )
        state.ema.load_state_dict(paddle.load(str(average)))


def load_optimizer(folder: Path, state: TrainingState) -> None:
    """Read optimizer, schedule and scaler into `state`."""
    state.optimizer.set_state_dict(paddle.load(str(folder / "optimizer.pdopt")))
    state.scheduler.set_state_dict(paddle.load(str(folder / "scheduler.pdparams")))
    if state.scaler:
        state.scaler.load_state_dict(paddle.load(str(folder / "scaler.pdparams"), return_numpy=True))


def read_manifest(folder) -> dict:
    """The manifest of a checkpoint. Raises CheckpointError."""
    try:
        return json.loads(Path(folder, MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder} has no readable {MANIFEST} ({error}); it is not a finished checkpoint"
        ) from error


def verify(folder) -> str | None:
    """None if every file of the manifest is there with its size and checksum, else what is wrong."""
    try:
        files = read_manifest(folder)["files"]
    except (CheckpointError, KeyError, TypeError):
        return f"no readable {MANIFEST}"
    for name, expected in files.items():
        path = Path(folder, name)
        if not path.is_file():
            return f"{name} is missing"
        if _identity(path) != expected:
            return f"{name} has changed or is cut short"
    return None


def list_checkpoints(output_dir) -> list[Path]:
    """The folders `checkpoint-<step>` in `output_dir`, newest first."""
    found = [(int(m[1]), path) for path in Path(output_dir).glob("checkpoint-*") if (m := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def newest_checkpoint(output_dir) -> Path | None:
    """The newest checkpoint that verifies; says which it passed over."""
    for folder in list_checkpoints(output_dir):
        problem = verify(folder)
        if problem is None:
            return folder
        get_logger().warning("passing over %s: %s", folder, problem)
    return None


def _identity(path: Path) -> dict:
    checksum = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            checksum = zlib.crc32(block, checksum)
    return {"bytes": path.stat().st_size, "crc32": checksum}

"""What checkpoints are called, and which there are. No paddle here."""

import re
from pathlib import Path

_PREFIX = "checkpoint-"
_NAME = re.compile(rf"{_PREFIX}(\d+)")


def checkpoint_name(step: int) -> str:
    """The name of the folder of a checkpoint that was made after update `step`."""
    return f"{_PREFIX}{step}"


def is_checkpoint_name(name: str) -> bool:
    """Whether a folder of this name is a checkpoint."""
    return _NAME.fullmatch(name) is not None


def step_of(folder: Path) -> int:
    """The number in a name `checkpoint-<step>`."""
    return int(_NAME.fullmatch(folder.name)[1])


def share_trained(output_dir, max_steps: int) -> float:
    """How much of a run, of 1, its newest checkpoint saves from being trained again."""
    return next((step_of(path) / max_steps for path in list_checkpoints(output_dir)), 0.0)


def list_checkpoints(output_dir) -> list[Path]:
    """The folders `checkpoint-<step>` in `output_dir`, newest first; among them one that cannot be looked at, which
    whoever opens it passes over."""
    found = [
        path for path in Path(output_dir).glob(f"{_PREFIX}*") if is_checkpoint_name(path.name) and may_be_dir(path)
    ]
    return sorted(found, key=step_of, reverse=True)


def may_be_dir(path: Path) -> bool:
    """Whether `path` is a folder, or cannot be looked at: then whoever opens it says why."""
    try:
        return path.is_dir()
    except OSError:
        return True

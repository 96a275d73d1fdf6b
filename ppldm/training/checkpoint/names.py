"""What checkpoints are called, and which there are. No paddle here."""

import re
from pathlib import Path

_NAME = re.compile(r"checkpoint-(\d+)")


def step_of(folder: Path) -> int:
    """The number in a name `checkpoint-<step>`."""
    return int(_NAME.fullmatch(folder.name)[1])


def list_checkpoints(output_dir) -> list[Path]:
    """The folders `checkpoint-<step>` in `output_dir`, newest first."""
    found = [path for path in Path(output_dir).glob("checkpoint-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of, reverse=True)

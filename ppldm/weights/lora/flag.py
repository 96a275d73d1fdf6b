"""`--lora FILE:0.8 …`: files of LoRA, each with the weight that its change is multiplied by."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from ...utils.errors import ConfigError

Loras = Annotated[
    list[str],
    {"nargs": "+", "action": "extend", "type": str, "metavar": "FILE[:WEIGHT]"},
    "LoRA files to draw with, each with its weight: FILE:0.8; their changes add up",
]


def check_loras(words: Sequence[str] | None) -> list[str]:
    """The words of the flag, none where it is not given. Raises ConfigError."""
    for word in words or ():
        split_word(word)
    return [*(words or ())]


def split_word(word: str) -> tuple[Path, float]:
    """(file, weight) of "FILE:0.8", or of "FILE" with weight 1. Raises ConfigError, also for no such file."""
    name, colon, last = word.rpartition(":")
    try:
        name, weight = (name, float(last)) if colon else (word, 1.0)
    except ValueError:  # a colon of the file's name
        name, weight = word, 1.0
    if not math.isfinite(weight):
        raise ConfigError(f"--lora {word}: the weight is not a number; write FILE:0.8")
    file = Path(name).expanduser()
    if not name or not file.exists():
        raise ConfigError(f"--lora {word}: there is no {file}; write FILE, or FILE:0.8 with a weight")
    return file, weight

"""`--lora FILE:0.8 …`: files of LoRA, each with the weight that its change is multiplied by. And of textual inversions,
`--textual-inversion FILE:TOKEN …`, each with the word that stands for it."""

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

Inversions = Annotated[
    list[str],
    {"nargs": "+", "action": "extend", "type": str, "metavar": "FILE[:TOKEN]"},
    "textual inversions (.safetensors, .bin, .pt) to draw with, each by the token of the file, or TOKEN, in a prompt",
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


def split_inversion(word: str) -> tuple[Path, str]:
    """(file, token) of "FILE:TOKEN", or of "FILE" with the token "". Raises ConfigError for no such file."""
    for name, token in ((word, ""), (word.rpartition(":")[0], word.rpartition(":")[2])):
        if name and (file := Path(name).expanduser()).exists():
            return file, token
    raise ConfigError(f"--textual-inversion {word}: there is no such file; write FILE, or FILE:TOKEN")

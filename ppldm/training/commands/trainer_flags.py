"""The flags of PaddleNLP's Trainer which are not options of ours: taken at their defaults, else refused."""

import importlib.util
import re
from pathlib import Path

from ...utils.errors import ConfigError
from ...utils.machine.cpu import load_paddle

# What neither script does: the shared checkpoint would not hold the whole state.
_NOT_SUPPORTED = ("unified_checkpoint", "amp_master_grad", "load_best_model_at_end", "do_eval", "do_predict")
# What was seen to stand against a flag, on PaddleNLP 3.0.0b4 and Paddle 3.3.1.
_WHY_NOT = {
    "unified_checkpoint": "works for PaddleNLP's own model classes only; checkpoints here hold the whole model for any "
    "number of ranks as they are",
}


def refuse_other_flags(words: list[str], loop: bool) -> list[str]:
    """The words of a command line that are not flags of PaddleNLP's Trainer either.

    Raises ConfigError for one of its flags that would change something: nothing here does what it asks for.
    PaddleNLP, and with it Paddle, is imported only where one of its flags is among the words.
    """
    known = names_of_trainer_flags()
    given = {word.removeprefix("--").partition("=")[0] for word in words if word.startswith("--")}
    if known.isdisjoint(given | {name.removeprefix("no_") for name in given}):
        return words
    load_paddle()
    from ..trainer import parse_trainer_flags

    changed, others = parse_trainer_flags(words)
    for name in changed:
        if name in _NOT_SUPPORTED:
            raise ConfigError(f"--{name} {_WHY_NOT.get(name, 'is not supported yet')}; omit it")
        script = "the hand-written loop has no" if loop else "the Trainer script has no use for"
        raise ConfigError(f"{script} --{name}; omit it")
    return others


def names_of_trainer_flags() -> set[str]:
    """The names of all flags of PaddleNLP's Trainer, read from its source, which takes milliseconds."""
    found = importlib.util.find_spec("paddlenlp")
    source = found and Path(found.origin).parent / "trainer" / "training_args.py"
    if not source or not source.is_file():
        return set()
    text = source.read_text(encoding="utf-8")
    return set(re.findall(r"^    (\w+): [^\n]+ = field\(", text.partition("class TrainingArguments")[2], re.MULTILINE))

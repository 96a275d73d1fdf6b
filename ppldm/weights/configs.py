"""Configs of parts that have weights: read from the JSON files of all known forms, completed and checked."""

import json
from pathlib import Path

from ..networks.configs import check_config
from ..utils.errors import ModelError
from .components import to_paddle_config

CONFIG_FILES = ("config.json", "model_config.json")  # the second is PaddleNLP's name before 2.5


def read_json(path) -> dict:
    """The object in a JSON file. Raises ModelError."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}; check the path") from error
    except ValueError as error:
        raise ModelError(f"{path} is not JSON ({error}); copy it again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object; give another")
    return value


def read_config(kind: str, folder: Path) -> dict:
    """The completed config of the part in `folder`. Raises ModelError."""
    for name in CONFIG_FILES:
        if (folder / name).is_file():
            return complete_config(kind, _flat(read_json(folder / name)), folder / name)
    raise ModelError(f"the {kind} folder {folder} has no config.json; give the folder that holds it and the weights")


def complete_config(kind: str, config: dict, source) -> dict:
    """`config` as ppdiffusers' class takes it, with its defaults for what is not there. Raises ModelError."""
    return check_config(kind, to_paddle_config(kind, config, source), source)


def _flat(config: dict) -> dict:
    """PaddleNLP's older configs keep the settings in `init_args`, one inside the other."""
    for inner in config.get("init_args", ()):
        if isinstance(inner, dict):
            config = {**config, **_flat(inner)}
    return {key: value for key, value in config.items() if key not in ("init_args", "init_class")}

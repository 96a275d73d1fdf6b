"""Configs of components that have weights: read from the JSON files of all known forms, completed and checked."""

from pathlib import Path

from ..networks.configs import check_config
from ..utils.errors import ModelError
from ..utils.files import read_json_object
from .components import to_paddle_config
from .fetch import packaged_or
from .folders import find_component
from .model_file import has_model_file, read_model_file
from .runs import model_in

CONFIG_FILES = ("config.json", "model_config.json")  # the second is PaddleNLP's name before 2.5


def read_config(kind: str, folder: Path) -> dict:
    """The completed config of the component in `folder`. Raises ModelError."""
    for name in CONFIG_FILES:
        if (folder / name).is_file():
            return complete_config(kind, _flat(read_json_object(folder / name, ModelError, inside=True)), folder / name)
    raise ModelError(f"the {kind} folder {folder} has no config.json; give the folder that holds it and the weights")


def read_folder_config(kind: str, name: str) -> dict | None:
    """The completed config of a component in a folder of one of the known forms, where `name` is one that holds it as
    JSON; None for other forms and names, which are left to whoever fetches and reads them. Raises ModelError."""
    folder = model_in(Path(packaged_or(name)).expanduser())
    if has_model_file(folder) and (folder / "manifest.json").is_file():
        component = read_model_file(folder).components.get(kind)
        return component.config if component else None
    folder = find_component(folder, kind) or folder
    return read_config(kind, folder) if any((folder / file).is_file() for file in CONFIG_FILES) else None


def complete_config(kind: str, config: dict, source) -> dict:
    """`config` as ppdiffusers' class takes it, with its defaults for what is not there. Raises ModelError."""
    return check_config(kind, to_paddle_config(kind, config, source), source)


def _flat(config: dict) -> dict:
    """PaddleNLP's older configs keep the settings in `init_args`, one inside the other."""
    for inner in config.get("init_args", ()):
        if isinstance(inner, dict):
            config = {**config, **_flat(inner)}
    return {key: value for key, value in config.items() if key not in ("init_args", "init_class")}

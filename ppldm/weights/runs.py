"""Folders of trainings: which lie at a place, and the model that each has made. No paddle here."""

import os
from functools import cache
from pathlib import Path

from ..utils.errors import ConfigError, ModelError
from ..utils.files import local_path, read_json
from ..utils.log import get_logger
from .folders import EXPORTED_CKPT, FOLDERS, FURTHER_FOLDERS, find_component, is_checkpoint, list_checkpoints

RUN_FILE = "run.json"
_EXPORTED = ("pipeline", "vae", "vqgan")  # folders of whole models that a run leaves at its end
_GROWS = "metrics.jsonl"
_DEPTH = 2  # folders below that are looked into
_SHOWN = 5  # choices that a message lists


def is_run(folder) -> bool:
    """Whether a folder is one of a run, the --output_dir of a training."""
    return Path(folder, RUN_FILE).is_file() or Path(folder, _GROWS).is_file()


def find_runs(folder: Path, depth: int = _DEPTH) -> list[Path]:
    """The folder itself where it is a run's, else those of runs at most two folders below, the newest first."""
    if is_run(folder):
        return [folder]
    try:
        below = [Path(one) for one in os.scandir(folder) if depth and one.is_dir() and not one.name.startswith(".")]
    except OSError:
        return []
    found = [run for one in below for run in find_runs(one, depth - 1)]
    return sorted(found, key=lambda run: (-_changed(run), str(run)))


def runs_in(place) -> list[Path]:
    """As `find_runs`. Raises ConfigError where there is none."""
    folder = local_path(place)
    if found := find_runs(folder):
        return found
    raise ConfigError(f"{folder} is not a run's folder, nor holds one (no {RUN_FILE}); name a training's --output_dir")


def one_run(place) -> Path:
    """The run in a folder. Raises ConfigError where there is none, or more than one."""
    found = runs_in(place)
    if len(found) == 1:
        return found[0]
    raise ConfigError(f"{place} holds {len(found)} runs: {_list(found)}; name one")


def model_in(path: Path) -> Path:
    """What a place stands for where a model is wanted: itself, or, of a run's folder and of one with a run below, the
    model that the run has exported, or else its newest checkpoint. Autoencoders below do not count beside models that
    draw. Raises ModelError where runs have no model yet, or several have one."""
    if not path.is_dir() or is_checkpoint(path) or not is_run(path) and _holds_model(path):
        return path
    if not (runs := find_runs(path)):
        return path
    models = {run: model for run in runs if (model := _model_of(run))}
    if not models:
        raise ModelError(
            f"{_list(runs)} has no model yet; a checkpoint comes every --save_steps updates, a whole model at the end"
        )
    drawing = {run: model for run, model in models.items() if _draws(run)} if len(models) > 1 else models
    found = list((drawing or models).values())
    if len(found) > 1:
        raise ModelError(f"{path} holds {len(found)} models: {_list(found)}; name one")
    if is_checkpoint(found[0]):
        _say_that_it_goes_on(found[0])
    return found[0]


@cache
def _say_that_it_goes_on(checkpoint: Path) -> None:
    """Once, however often a command asks for the place."""
    get_logger().info("%s has not ended: its newest checkpoint is taken, %s", checkpoint.parent, checkpoint.name)


def _model_of(run: Path) -> Path | None:
    exported = next((run / name for name in _EXPORTED if (run / name).is_dir()), None)
    own = run if _holds_model(run) else next(filter(is_checkpoint, list_checkpoints(run)), None)
    return exported or own


def _holds_model(folder: Path) -> bool:
    return (folder / EXPORTED_CKPT).is_file() or any(find_component(folder, kind) for kind in FOLDERS | FURTHER_FOLDERS)


def _draws(run: Path) -> bool:
    """False of autoencoders."""
    from ..families.base import DEFAULT_FAMILY, get_family

    known = read_json(run / RUN_FILE, optional=True)
    name = known.get("family", DEFAULT_FAMILY) if isinstance(known, dict) else DEFAULT_FAMILY
    try:
        return get_family(name).needs_process
    except ConfigError:
        return True  # a family that is not of this package


def _changed(run: Path) -> float:
    return max((run / name).stat().st_mtime for name in (RUN_FILE, _GROWS) if (run / name).is_file())


def _list(places: list[Path]) -> str:
    return ", ".join(map(str, places[:_SHOWN])) + (", …" if len(places) > _SHOWN else "")

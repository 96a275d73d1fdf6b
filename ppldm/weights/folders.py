"""What lies where in the folders of models and of runs, what they are called, and how each kind is known; which runs
lie at a place, and the model that each has made. Importing it needs Python alone."""

import os
import re
from filecmp import cmp
from functools import cache
from pathlib import Path

from ..utils.errors import ConfigError, ModelError

_PREFIX = "checkpoint-"
_NAME = re.compile(rf"{_PREFIX}(\d+)")

# The folders of each component, by the scripts and libraries that write them.
COMPONENT_FOLDERS = {"vae": ("vqvae", "vae"), "text_encoder": ("bert", "ldmbert", "text_encoder"), "unet": ("unet",)}
# With those that a text-to-image model need not have.
FOLDERS = {**COMPONENT_FOLDERS, "transformer": ("transformer",), "controlnet": ("controlnet",)}
FURTHER_TEXT_ENCODERS = ("text_encoder_2", "text_encoder_3")  # of Stable Diffusion 3
# Of components of other models, which are read one at a time.
FURTHER_FOLDERS = {
    "cascade_prior": ("prior",), "cascade_decoder": ("decoder",), "effnet": ("effnet",), "vqgan": ("vqgan",),
    "projected_text_encoder": ("text_encoder",), "image_encoder": ("image_encoder",),
    **{name: (name,) for name in FURTHER_TEXT_ENCODERS},
    "cascade_controlnet": ("controlnet",),
}  # fmt: skip
EXPORTED_CKPT, EXPORTED_FILE = "model.ckpt", "model.safetensors"  # what `ppldm export --to compvis` writes
NOT_TEXT_TO_IMAGE = (
    "{} is not of a text-to-image model; name one, or, while its folder is still being trained, wait for the first "
    "checkpoint of the text-to-image model (where a VAE is wanted, name OUT/vae)"
)
CHECKPOINT_WEIGHTS, CHECKPOINT_AVERAGE = "model_state.pdparams", "ema_state.pdparams"
RUN_FILE = "run.json"
OPEN_CLIP = "open_clip_config.json"
_EXPORTED = ("pipeline", "vae", "vqgan")  # folders of whole models that a run leaves at its end
_DESCRIBED = ("config.json", "model_config.json", "model.json", "manifest.json")  # beside weights: what they are
_GROWS = "metrics.jsonl"
FOLDER, FILE, CHECKPOINT = "folder", "file", "checkpoint"  # forms of models
_DEPTH = 2  # folders below that are looked into
_SHOWN = 5  # choices that a message lists


def whole_model(names) -> tuple[str, ...]:
    """The components without which none draws: VAE, a text encoder and UNet, or a transformer where there is one."""
    texts = ("text_encoder", *FURTHER_TEXT_ENCODERS)
    text = next((name for name in texts if name in names), texts[0])
    return "vae", text, "transformer" if "transformer" in names else "unet"


def is_checkpoint(folder: Path) -> bool:
    """True for the folder of a checkpoint of ppldm."""
    return (folder / "manifest.json").is_file() and (folder / CHECKPOINT_WEIGHTS).is_file()


def find_component(folder: Path, kind: str) -> Path | None:
    """The folder of a component in a pipeline folder, if it has one."""
    return next((folder / name for name in (FOLDERS | FURTHER_FOLDERS)[kind] if (folder / name).is_dir()), None)


def is_tokenizer(folder: Path) -> bool:
    """True for a folder with a vocabulary, BERT's, CLIP's or T5's."""
    return any((folder / name).is_file() for name in ("vocab.txt", "merges.txt", "spiece.model", "tokenizer.json"))


def is_open_clip_folder(folder: Path) -> bool:
    """True for a repository of open_clip's that is of no other library too."""
    return (folder / OPEN_CLIP).is_file() and not (folder / "config.json").is_file()


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
    """The folders `checkpoint-<step>` in `output_dir`, newest first, also those that cannot be looked at."""
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
    from ..utils.files import local_path

    folder = local_path(place)
    if found := find_runs(folder):
        return found
    what = f"is not a run's folder, nor holds one (no {RUN_FILE})" if folder.exists() else "is not there"
    raise ConfigError(f"{folder} {what}; name a training's --output_dir, or wait until it has begun")


def one_run(place) -> Path:
    """The run in a folder. Raises ConfigError where there is none, or more than one."""
    found = runs_in(place)
    if len(found) == 1:
        return found[0]
    raise ConfigError(f"{place} holds {len(found)} runs: {_list(found)}; name one")


def model_in(path: Path) -> Path:
    """What a place stands for where a model is wanted: itself, or of a run there or below the exported model, else its
    newest checkpoint, autoencoders beside models that draw apart. Raises ModelError for none, and for several."""
    if not path.is_dir() or is_checkpoint(path) or not is_run(path) and holds_model(path):
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


def recognise(place: Path) -> tuple[Path, str]:
    """(the path of the `model_in` a place, or of the file of one that was exported for CompVis, or of a file with the
    weights of a checkpoint, beside it, that checkpoint's; its form)."""
    path = model_in(place)
    described = holds_model(path) or any((path / name).is_file() for name in _DESCRIBED)
    if (path / CHECKPOINT_WEIGHTS).is_file() and not described:
        path /= CHECKPOINT_WEIGHTS  # of PaddleMIX's training, or in a run's folder
    if path.name == CHECKPOINT_WEIGHTS and path.is_file():
        made = filter(is_checkpoint, (path.parent, *list_checkpoints(path.parent)))
        path = next((one for one in made if cmp(one / CHECKPOINT_WEIGHTS, path)), path)
    if not any(find_component(path, kind) for kind in COMPONENT_FOLDERS):
        path = exported_file(path) or path
    return path, FILE if path.is_file() else CHECKPOINT if is_checkpoint(path) else FOLDER


@cache
def _say_that_it_goes_on(checkpoint: Path) -> None:
    """Once, however often a command asks for the place."""
    from ..utils.log import get_logger

    get_logger().info("%s has not ended: its newest checkpoint is taken, %s", checkpoint.parent, checkpoint.name)


def _model_of(run: Path) -> Path | None:
    exported = next((run / name for name in _EXPORTED if (run / name).is_dir()), None)
    own = run if holds_model(run) else next(filter(is_checkpoint, list_checkpoints(run)), None)
    return exported or own


def holds_model(folder: Path) -> bool:
    """Whether the folder itself has the networks of a model."""
    names = {name for own in (FOLDERS | FURTHER_FOLDERS).values() for name in own}
    return bool(exported_file(folder)) or any((folder / name).is_dir() for name in names)


def exported_file(folder: Path) -> Path | None:
    """The one file that holds a model which `ppldm export --to compvis` left in a folder."""
    names = (EXPORTED_CKPT, *([EXPORTED_FILE] if (folder / "model.json").is_file() else []))
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _draws(run: Path) -> bool:
    """False of autoencoders."""
    from ..families.base import DEFAULT_FAMILY, get_family
    from ..utils.files import read_json

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

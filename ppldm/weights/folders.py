"""What lies where in the folders of models and of runs, what they are called, and how each kind is known. No paddle
here."""

import re
from pathlib import Path

_PREFIX = "checkpoint-"
_NAME = re.compile(rf"{_PREFIX}(\d+)")

# The folders of each component, by the scripts and libraries that write them.
COMPONENT_FOLDERS = {
    "vae": ("vqvae", "vae"),
    "text_encoder": ("bert", "ldmbert", "text_encoder"),
    "unet": ("unet",),
}
# With those that a text-to-image model need not have.
FOLDERS = {**COMPONENT_FOLDERS, "transformer": ("transformer",), "controlnet": ("controlnet",)}
# Of components of other models, which are read one at a time.
FURTHER_FOLDERS = {
    "cascade_prior": ("prior",), "cascade_decoder": ("decoder",), "effnet": ("effnet",), "vqgan": ("vqgan",),
    "projected_text_encoder": ("text_encoder",), "image_encoder": ("image_encoder",),
    "cascade_controlnet": ("controlnet",),
}  # fmt: skip
EXPORTED_CKPT = "model.ckpt"  # what `ppldm export --to compvis` writes, tokenizer/ and ppldm.json beside it
NOT_TEXT_TO_IMAGE = (
    "{} is not a checkpoint of a text-to-image run; name one of such a run, which begins after that of its "
    "autoencoder, or where an autoencoder is wanted its OUT/vae folder"
)
CHECKPOINT_WEIGHTS, CHECKPOINT_AVERAGE = "model_state.pdparams", "ema_state.pdparams"


def whole_model(names) -> tuple[str, ...]:
    """The components that a text-to-image model of some components, by name, must have: VAE, text encoder and what
    removes the noise, a transformer where there is one."""
    return "vae", "text_encoder", "transformer" if "transformer" in names else "unet"


def is_checkpoint(folder: Path) -> bool:
    """True for the folder of a checkpoint of ppldm."""
    return (folder / "manifest.json").is_file() and (folder / CHECKPOINT_WEIGHTS).is_file()


def find_component(folder: Path, kind: str) -> Path | None:
    """The folder of a component in a pipeline folder, if it has one."""
    return next((folder / name for name in (FOLDERS | FURTHER_FOLDERS)[kind] if (folder / name).is_dir()), None)


def is_tokenizer(folder: Path) -> bool:
    """True for a folder with a vocabulary, BERT's or CLIP's."""
    return any((folder / name).is_file() for name in ("vocab.txt", "merges.txt"))


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

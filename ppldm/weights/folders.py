"""What lies where in the folders of models, and how each kind of folder is known."""

from pathlib import Path

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
NOT_TEXT_TO_IMAGE = "{} is not a checkpoint of a text-to-image run; give an autoencoder's OUT/vae folder"
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

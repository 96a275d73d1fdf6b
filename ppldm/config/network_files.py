"""The configs of networks that come with the package, networks/*.json, and which of them published models have."""

from pathlib import Path

from ..utils.errors import ConfigError
from ..utils.text import did_you_mean

CONFIG_DIR = Path(__file__).parent / "networks"


def list_network_files() -> list[str]:
    """The names of the package's configs, as flags take them: `unet_tiny`."""
    return sorted(path.stem for path in CONFIG_DIR.glob("*.json"))


def find_network_file(value, flag: str = "") -> Path:
    """The file that `flag` means by `value`: a path, or the name of one of the package's configs, which
    `examples/config/NAME.json`, where they lay before, stands for too. Raises ConfigError."""
    path = Path(value).expanduser()
    if path.is_file():
        return path
    is_older_path = path.parts[-3:-1] == ("examples", "config") and path.suffix == ".json"
    name = path.stem if is_older_path else str(value)
    known = list_network_files()
    if name in known:
        return CONFIG_DIR / f"{name}.json"
    what = "is a folder" if path.is_dir() else "is not there"
    hint = did_you_mean(name, known, listing=False) or f"give the path of a JSON file, or one of {', '.join(known)}"
    raise ConfigError(f"{flag} {value} {what}; {hint}".lstrip())


# Published model names, each a size that is built from configs and initialised here as PyTorch does: those folders hold
# nothing but such initial weights, so nothing needs to be downloaded for them.
KNOWN_MODELS = {
    "CompVis/ldm_laion400M_pretrain": ("ldmbert", "unet"),
    "CompVis/ldm_12_laion400M_pretrain": ("ldmbert_12", "unet_12"),
}
DEFAULT_MODEL = "CompVis/ldm_laion400M_pretrain"
DEFAULT_VAE = "CompVis/stable-diffusion-v1-4/vae"
DEFAULT_TOKENIZER = "bert-base-uncased"
# What captions are padded with, by the name of a tokenizer of CLIP's that needs no folder: Stable Diffusion 1.x; 2.x.
END = "<|endoftext|>"
CLIP_PADDING = {"clip": END, "open-clip": "!"}

# The networks of published models whose shapes are known without a download, as configs of the package by component.
_SD1 = {"vae": "vae_kl_f8", "text_encoder": "clip_vit_l", "unet": "unet_sd1"}
_SD2 = {"vae": "vae_kl_f8", "text_encoder": "clip_vit_h", "unet": "unet_sd2"}
_NETWORKS = {
    **dict.fromkeys(("CompVis/stable-diffusion-v1-4", "stable-diffusion-v1-5/stable-diffusion-v1-5"), _SD1),
    **{f"stabilityai/stable-diffusion-{name}": _SD2 for name in ("2", "2-base", "2-1", "2-1-base")},
    "openai/clip-vit-large-patch14": {"text_encoder": "clip_vit_l", "image_encoder": "image_encoder_vit_l"},
    "laion/CLIP-ViT-bigG-14-laion2B-39B-b160k": {"text_encoder": "clip_vit_bigg"},
    "stabilityai/stable-cascade-prior": {
        **{"text_encoder": "clip_vit_bigg", "image_encoder": "image_encoder_vit_l", "prior": "cascade_c_3b"}
    },
    "stabilityai/stable-cascade-prior/prior_lite": {"prior": "cascade_c_1b"},
    "stabilityai/stable-cascade": {"text_encoder": "clip_vit_bigg", "vqgan": "vqgan_f4", "decoder": "cascade_b_3b"},
    "stabilityai/stable-cascade/decoder_lite": {"decoder": "cascade_b_700m"},
}


def published_network(component: str, name: str) -> str | None:
    """The package's config of a component of the model `owner/model[/component]`; None where it is not known."""
    return (_NETWORKS.get(name) or _NETWORKS.get("/".join(name.split("/")[:2]), {})).get(component)

"""What comes with the package: configs of networks (networks/*.json), which of them published models have, and the
vocabulary of CLIP, as single files of Stable Diffusion bring none.

`clip_merges.txt.gz` holds the 48,894 pairs that CLIP uses of bpe_simple_vocab_16e6.txt of github.com/openai/CLIP
(Copyright (c) 2021 OpenAI, MIT License). All ids follow from them, as in `simple_tokenizer.py` there: the 256 bytes,
the same at the end of a word, what each pair makes, start and end.
"""

import gzip
import tempfile
from functools import cache
from pathlib import Path

from ..utils.errors import ConfigError
from ..utils.files import make_output_dir, read_json_object, write_json, write_text
from ..utils.text import did_you_mean

CONFIG_DIR = Path(__file__).parent / "networks"
START = "<|startoftext|>"
TOKENIZER_CONFIG, MENDS = "tokenizer_config.json", "ftfy"  # the key there of whether text is mended
_TRAINED = ("ppldm.json", "manifest.json")  # beside the folder of a tokenizer
_MERGES = Path(__file__).with_name("clip_merges.txt.gz")
_LENGTH = 77
_holder = None  # of the folder, which goes when this process does


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
_SD3 = {"vae": "vae_sd3", "text_encoder": "clip_vit_l", "text_encoder_2": "clip_vit_bigg",
        "text_encoder_3": "t5_v1_1_xxl", "transformer": "sd3_medium"}  # fmt: skip
_SDXL = {"vae": "vae_kl_f8", "text_encoder": "clip_vit_l", "text_encoder_2": "clip_vit_bigg", "unet": "unet_sdxl"}
_NETWORKS = {
    "stabilityai/stable-diffusion-3-medium-diffusers": _SD3,
    **dict.fromkeys(("CompVis/stable-diffusion-v1-4", "stable-diffusion-v1-5/stable-diffusion-v1-5"), _SD1),
    **{f"stabilityai/stable-diffusion-{name}": _SD2 for name in ("2", "2-base", "2-1", "2-1-base")},
    "openai/clip-vit-large-patch14": {"text_encoder": "clip_vit_l", "image_encoder": "image_encoder_vit_l"},
    "apple/DFN5B-CLIP-ViT-H-14-378": {"text_encoder": "clip_dfn_vit_h"},
    "stabilityai/stable-diffusion-xl-base-1.0": _SDXL,
    **dict.fromkeys(
        ("google/t5-v1_1-xxl", "DeepFloyd/t5-v1_1-xxl"),
        dict.fromkeys(("text_encoder", "text_encoder_3"), "t5_v1_1_xxl"),
    ),
    "laion/CLIP-ViT-bigG-14-laion2B-39B-b160k": dict.fromkeys(("text_encoder", "text_encoder_2"), "clip_vit_bigg"),
    "stabilityai/stable-cascade-prior": {
        **{"text_encoder": "clip_vit_bigg", "image_encoder": "image_encoder_vit_l", "prior": "cascade_c_3b"}
    },
    "stabilityai/stable-cascade-prior/prior_lite": {"prior": "cascade_c_1b"},
    "stabilityai/stable-cascade": {"text_encoder": "clip_vit_bigg", "vqgan": "vqgan_f4", "decoder": "cascade_b_3b"},
    "stabilityai/stable-cascade/decoder_lite": {"decoder": "cascade_b_700m"},
    # What presets leave behind, and others start from.
    "shapes_world/autoencoder/vae": {"vae": "vae_shapes_world"},
    "shapes_world/diffusion/pipeline": {
        **{"vae": "vae_shapes_world", "text_encoder": "ldmbert_tiny", "unet": "unet_shapes_world"}
    },
    "shapes_world/cascade_a/vqgan": {"vqgan": "vqgan_tiny"},
    "shapes_world/cascade_c/prior": {"prior": "cascade_c_tiny"},
    "sd2-base-256/pipeline": _SD2,
    **dict.fromkeys(
        (f"micro-diffusion-{stage}/pipeline" for stage in ("256-masked", "256", "512-masked")),
        {"vae": "vae_kl_f8", "text_encoder": "clip_dfn_vit_h", "transformer": "microdit_xl2"},
    ),
}


def published_network(component: str, name: str) -> str | None:
    """The package's config of a component of the model `owner/model[/component]`, or of what a preset has made; None
    where it is not known."""
    name = name.removeprefix("./")
    return (_NETWORKS.get(name) or _NETWORKS.get("/".join(name.split("/")[:2]), {})).get(component)


@cache
def vocabulary_folder(name: str) -> Path:
    """A folder with vocab.json, merges.txt and tokenizer_config.json of a name in CLIP_PADDING, for this process."""
    return _write_vocabulary(name, name)


@cache
def sd3_vocabularies() -> Path:
    """The folder of Stable Diffusion 3's first tokenizer; the second lies `beside` it."""
    _write_vocabulary("open-clip", "sd3_2")
    return _write_vocabulary("clip", "sd3")


def _write_vocabulary(name: str, place: str) -> Path:
    global _holder
    _holder = _holder or tempfile.TemporaryDirectory(prefix="ppldm-clip-")
    folder = Path(_holder.name, place)
    make_output_dir(folder)
    text = gzip.decompress(_MERGES.read_bytes()).decode()
    write_text(folder / "merges.txt", text)
    write_json(folder / "vocab.json", {token: number for number, token in enumerate(tokens(text))})
    special = {"bos_token": START, "eos_token": END, "unk_token": END, "pad_token": CLIP_PADDING[name]}
    write_json(folder / "special_tokens_map.json", special)
    config = {"tokenizer_class": "CLIPTokenizer", "model_max_length": _LENGTH, "do_lower_case": True, **special}
    write_json(folder / TOKENIZER_CONFIG, config)
    return folder


def pieces_file(folder: Path) -> Path | None:
    """The file of T5's tokenizer in a folder: a model of sentencepiece, or, of a folder without another tokenizer,
    tokenizer.json; None where there is none."""
    others = any((folder / name).is_file() for name in ("vocab.txt", "merges.txt"))
    found = (folder / name for name in ("spiece.model", *["tokenizer.json"] * (not others)))
    return next((path for path in found if path.is_file()), None)


def mends_text(folder: Path) -> bool:
    """Whether the tokenizer in a folder mends text. Raises ConfigError."""
    path = folder / TOKENIZER_CONFIG
    said = read_json_object(path, ConfigError, inside=True).get(MENDS) if path.is_file() else None
    if said is None:
        return not any((folder.absolute().parent / name).is_file() for name in _TRAINED)
    if not isinstance(said, bool):
        raise ConfigError(f"{path}: {MENDS} {said!r:.80} is neither true nor false; copy the tokenizer again")
    return said


def write_mends(folder: Path, mends: bool) -> None:
    """Let the tokenizer_config.json in a folder say it."""
    path = folder / TOKENIZER_CONFIG
    write_json(path, {**(read_json_object(path, ConfigError) if path.is_file() else {}), MENDS: mends})


def beside(folder: Path, text_encoder: str) -> Path:
    """Where a text encoder's tokenizer lies if the first one lies in `folder`: `text_encoder_2` has tokenizer_2."""
    return folder.with_name(folder.name + text_encoder.removeprefix("text_encoder"))


def tokens(merges: str) -> list[str]:
    """All tokens by their ids, of the text of a merges.txt."""
    order = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters = [*map(chr, order), *(chr(256 + number) for number in range(256 - len(order)))]
    pairs = ["".join(line.split()) for line in merges.splitlines() if not line.startswith("#version")]
    return [*letters, *(f"{letter}</w>" for letter in letters), *pairs, START, END]

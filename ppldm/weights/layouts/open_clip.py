"""open_clip's repository form, as apple/DFN5B-CLIP-ViT-H-14-378 is published: a folder with `open_clip_config.json`
and `open_clip_model.safetensors` or `open_clip_pytorch_model.bin`. Its text encoder is read, as a CLIP's that is
transformers'; names and settings are those of open_clip 3.3. Here all layers are used; a Stable Diffusion 2.x leaves
the last out."""

from pathlib import Path

import numpy as np

from ...networks.config_fields import POSITIVE, fits
from ...utils.errors import ModelError
from ..components import from_torch
from ..folders import OPEN_CLIP
from ..formats.files import read_arrays
from .single_file import from_open_clip

_FILES = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
# Of text_cfg: what sets a size here, with its value where it is not said; and what may be said besides. Any other makes
# another network, or wants another tokenizer.
_SIZES = {
    "vocab_size": ("vocab_size", 49408), "hidden_size": ("width", 512), "num_attention_heads": ("heads", 8),
    "num_hidden_layers": ("layers", 12), "max_position_embeddings": ("context_length", 77),
}  # fmt: skip
_RATIO = "mlp_ratio"
_USUAL = {"pool_type": "argmax", "proj_type": "linear", "pad_id": 0, "eos_id": 2, "output_tokens": True}
_CUSTOM = "text."  # before all names, where model_cfg has custom_text
_TEXT = ("token_embedding.", "positional_embedding", "transformer.", "ln_final.", "text_projection")


def text_settings(said: dict, source) -> dict:
    """The settings of a CLIP text encoder, of an open_clip_config.json. Raises ModelError."""
    model = said.get("model_cfg")
    text = model.get("text_cfg") if isinstance(model, dict) else None
    if not isinstance(text, dict):
        raise ModelError(f"{source} has no model_cfg with a text_cfg; copy it again")
    known = {_RATIO, *(name for name, _ in _SIZES.values())}
    for key, value in text.items():
        if key not in known and value not in (None, False, _USUAL.get(key)):
            raise ModelError(
                f"{source}: text_cfg has {key} {value!r:.60}, which CLIP's text encoder has not; not supported"
            )
    found = {ours: text.get(theirs, default) for ours, (theirs, default) in _SIZES.items()}
    width, ratio = found["hidden_size"], text.get(_RATIO, 4.0)
    return found | {
        "intermediate_size": int(width * ratio) if fits(width, POSITIVE) and fits(ratio, POSITIVE) else ratio,
        "hidden_act": "quick_gelu" if model.get("quick_gelu") else "gelu",
        "projection_dim": model.get("embed_dim"),
    }


def read_text_encoder(folder: Path, starts: tuple[str, ...]) -> dict[str, np.ndarray]:
    """The arrays of the text encoder whose names have one of these `starts`, as Paddle has them. Raises ModelError."""
    file = next((folder / name for name in _FILES if (folder / name).is_file()), None)
    if file is None:
        raise ModelError(f"{folder} has {OPEN_CLIP} and no weights ({' or '.join(_FILES)}); copy them there")
    arrays = read_arrays(file, lambda name: name.removeprefix(_CUSTOM).startswith(_TEXT))
    named = {name.removeprefix(_CUSTOM): array for name, array in arrays.items()}
    projection = named.pop("text_projection", None)  # words x projection, which is Paddle's orientation
    torch = {ours: one for name, array in named.items() for ours, one in from_open_clip(name, array).items()}
    found = from_torch(torch) | ({} if projection is None else {"text_projection.weight": projection})
    return {name: array for name, array in found.items() if name.startswith(starts)}

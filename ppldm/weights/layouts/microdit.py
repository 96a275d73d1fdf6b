"""A MicroDiT as micro_diffusion's code has it: the state of its class DiT, in a .pt or beside a config.

It has two tables that are computed here: positions, and what stands in place of patches that are left out (zeros).
"""

from pathlib import Path

import numpy as np

from ...config.network_files import CONFIG_DIR
from ...utils.errors import ModelError
from ...utils.files import read_json_object
from ..components import ComponentWeights, from_torch
from ..configs import complete_config
from ..formats.files import read_arrays

PUBLISHED_CLASS = "DiT"
_POSITIONS, _MASKED = "pos_embed", "mask_token"
_PREFIX = "dit."  # of a whole model of micro_diffusion
# The settings that differ between the released files, by what has their size as its second side.
_OWN = {"in_channels": "x_embedder.proj.weight", "caption_channels": "y_embedder.y_proj.fc1.weight"}


def read_published(path: Path) -> ComponentWeights:
    """A transformer from a file with nothing but its weights. Its config is the .json of its name beside it, else that
    of MicroDiT_XL_2 with the file's channels. Raises ModelError."""
    found = read_arrays(path)
    found = {name.removeprefix(_PREFIX): array for name, array in found.items() if name.startswith(_PREFIX)} or found
    if any(name not in found or found[name].ndim < 2 for name in _OWN.values()):
        raise ModelError(f"{path} is not a transformer of micro_diffusion; give the folder of another with its config")
    source = path.with_suffix(".json")
    if source.is_file():
        config = read_json_object(source, ModelError, inside=True)
    else:
        config = read_json_object(CONFIG_DIR / "microdit_xl2.json", ModelError)
        config |= {key: found[name].shape[1] for key, name in _OWN.items()}
    return ComponentWeights(
        complete_config("transformer", config, source), without_tables(from_torch(found)), str(path)
    )


def without_tables(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Arrays of a transformer without those that a MicroDiT computes; of another one all of them."""
    if _MASKED not in arrays:
        return arrays
    return {name: array for name, array in arrays.items() if name not in (_POSITIONS, _MASKED)}


def with_tables(config: dict, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Arrays of a MicroDiT of `config`, and the two of its own latents."""
    from ...networks.transformers.microdit import positions

    patch, dtype = config["patch_size"], arrays["x_embedder.proj.weight"].dtype
    side = config["sample_size"] // patch
    masked = np.zeros((1, 1, patch**2 * config["in_channels"]), dtype)
    return arrays | {_POSITIONS: positions(side, side, side, config["dim"]).astype(dtype), _MASKED: masked}

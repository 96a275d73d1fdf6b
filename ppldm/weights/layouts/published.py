"""Networks in the files that they were first published in, with nothing but weights: Stable Cascade's, and a MicroDiT;
and a T5, in folders of either library.

Those of Stable Cascade have PyTorch's attention, of one matrix for queries, keys and values, and no config: shapes say
it. A MicroDiT is the state of micro_diffusion's class DiT, with two tables that are computed here: positions, and what
stands in place of patches that are left out (zeros).
"""

from pathlib import Path

import numpy as np

from ...config.network_files import CONFIG_DIR
from ...networks.configs import LABELS
from ...utils.errors import ModelError
from ...utils.files import read_json_object
from ..components import ComponentWeights, from_torch
from ..configs import complete_config
from ..formats.files import read_arrays, read_component_arrays
from ..model_file import TRANSFORMER

# The configs of this package that a single file may have, and the first sides of arrays that tell them apart.
_PUBLISHED = {"cascade_prior": "cascade_c_*", "cascade_decoder": "cascade_b_*", "effnet": "effnet_*"}
_ATTENTION, _OLDER = ".attention.attn.", {"clip_mapper": "clip_txt_pooled_mapper"}
_OWN_BIAS = {"cascade_prior": "clip_txt_mapper.bias", "cascade_decoder": "effnet_mapper.0.bias"}
STAGES = tuple(_OWN_BIAS)

_WORDS_OF_T5 = ("shared.weight", "encoder.embed_tokens.weight")
MICRODIT_CLASS = "DiT"
_POSITIONS, _MASKED = "pos_embed", "mask_token"
_PREFIX = "dit."  # of a whole model of micro_diffusion
# The settings that differ between the released files, by what has their size as its second side.
_OWN = {"in_channels": "x_embedder.proj.weight", "caption_channels": "y_embedder.y_proj.fc1.weight"}


def read_published(kind: str, path: Path, config_file=None) -> ComponentWeights:
    """A component of a file. `config_file`: by default the .json of its name beside it, else the config of this package
    that has its sizes. Raises ModelError."""
    stored = modern_names(read_arrays(path))
    if kind == TRANSFORMER:
        own = {name.removeprefix(_PREFIX): array for name, array in stored.items() if name.startswith(_PREFIX)}
        stored = own or stored
        if any(name not in stored or stored[name].ndim < 2 for name in _OWN.values()):
            raise ModelError(
                f"{path} is not a transformer of micro_diffusion; give the folder of another with its config"
            )
    arrays = from_torch(stored)
    source = Path(config_file) if config_file else path.with_suffix(".json")
    if config_file or source.is_file():
        config = read_json_object(source, ModelError, inside=not config_file)
    elif kind == TRANSFORMER:
        config = read_json_object(CONFIG_DIR / "microdit_xl2.json", ModelError)
        config |= {key: stored[name].shape[1] for key, name in _OWN.items()}
    else:
        source, config = _published_config(kind, arrays, path)
    return ComponentWeights(complete_config(kind, config, source), without_tables(arrays), str(path))


def holds_stage(kind: str, path: Path) -> bool:
    """Whether a .safetensors file has the layer that only this stage has. Raises ModelError for a damaged one."""
    return bool(read_arrays(path, lambda name: name == _OWN_BIAS[kind]))


def modern_names(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Arrays of a published file, in PyTorch's orientation, by the names of diffusers; others as they are."""
    found = {}
    for name, array in arrays.items():
        block, dot, leaf = name.partition(_ATTENTION)
        first, _, rest = name.partition(".")
        if dot and leaf.startswith("in_proj_"):
            parts = zip("qkv", np.split(array, 3), strict=True)
            found |= {f"{block}.attention.to_{one}.{leaf.removeprefix('in_proj_')}": part for one, part in parts}
        elif dot:
            found[f"{block}.attention.{leaf.replace('out_proj', 'to_out.0')}"] = array
        else:
            found[f"{_OLDER[first]}.{rest}" if first in _OLDER else name] = array
    return found


def _published_config(kind: str, arrays: dict[str, np.ndarray], path: Path) -> tuple[Path, dict]:
    for file in sorted(CONFIG_DIR.glob(f"{_PUBLISHED.get(kind, '')}.json")):
        config = read_json_object(file, ModelError)
        sides = {name: arrays[name].shape[0] for name in _sides(config) if name in arrays}
        if sides == _sides(config):
            return file, config
    raise ModelError(f"{path} is no {LABELS[kind]} of a size that is known; put its config beside it, as a .json file")


def _sides(config: dict) -> dict[str, int]:
    """By the name of an array its first side, as a config has it."""
    if stages := config.get("stage_channels"):
        return {f"backbone.{place}.0.weight": stages[place] for place in (0, 7)}
    pooled = {"clip_txt_pooled_mapper.bias": config["conditioning_dim"] * config["clip_seq"]}
    widths = enumerate(config["block_out_channels"])
    return pooled | {f"down_blocks.{level}.0.depthwise.bias": width for level, width in widths}


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


def read_t5(folder: Path) -> dict[str, np.ndarray]:
    """The encoder of a T5, which may be whole, and PaddleNLP's. Its table of words has two names, and is stored under
    one or both."""
    arrays = read_component_arrays(folder, lambda name: name.removeprefix("t5.").startswith(("shared.", "encoder.")))
    arrays = {name.removeprefix("t5."): array for name, array in arrays.items()}
    words = [name for name in _WORDS_OF_T5 if name in arrays]
    return arrays | {name: arrays[words[0]] for name in _WORDS_OF_T5 if words}

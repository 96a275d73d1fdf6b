"""Stable Cascade's networks in files: the single ones that were published first, and folders of diffusers' pipelines.

A single file (stage_c_bf16.safetensors, stage_b.safetensors, effnet_encoder.safetensors) has PyTorch's attention, of
one matrix for queries, keys and values, and no config: what it is follows from its shapes.
"""

from pathlib import Path

import numpy as np

from ...config.network_files import CONFIG_DIR
from ...networks.configs import LABELS
from ...utils.checksums import checksum_file
from ...utils.errors import ModelError
from ...utils.files import atomic_dir, read_json_object, write_json
from ..components import ComponentWeights, cast, from_torch
from ..configs import complete_config
from ..folders import FURTHER_FOLDERS
from ..formats.files import read_arrays
from ..model_file import TOKENIZER_FOLDER, class_of
from ..write import copy_tokenizer, version_of, write_component, write_index

# The configs of this package that a single file may have, and the first sides of arrays that tell them apart.
_PUBLISHED = {"cascade_prior": "cascade_c_*", "cascade_decoder": "cascade_b_*", "effnet": "effnet_*"}
_ATTENTION, _OLDER = ".attention.attn.", {"clip_mapper": "clip_txt_pooled_mapper"}
# By kind: the class of diffusers' pipeline, with what else it has besides scheduler and tokenizer.
_PIPELINES: dict[str, tuple[str, dict]] = {
    "cascade_prior": ("StableCascadePriorPipeline", {"feature_extractor": [None, None], "image_encoder": [None, None]}),
    "cascade_decoder": ("StableCascadeDecoderPipeline", {"latent_dim_scale": 10.67}),
}
STAGES = tuple(_PIPELINES)
_OWN_BIAS = {"cascade_prior": "clip_txt_mapper.bias", "cascade_decoder": "effnet_mapper.0.bias"}
_SCHEDULER = "DDPMWuerstchenScheduler"
# Where diffusers looks for the classes that are not its own at the top.
_LIBRARIES = {"vqgan": "wuerstchen", "projected_text_encoder": "transformers", "image_encoder": "transformers"}


def read_single_file(kind: str, path: Path, config_file=None) -> ComponentWeights:
    """A component from a file with nothing but its weights, by diffusers' names or the published ones.

    `config_file`: by default the .json of its name beside it, else the config of this package that has its sizes.
    Raises ModelError.
    """
    arrays = from_torch(modern_names(read_arrays(path)))
    source = Path(config_file) if config_file else path.with_suffix(".json")
    if config_file or source.is_file():
        config = read_json_object(source, ModelError, inside=not config_file)
    else:
        source, config = _published_config(kind, arrays, path)
    return ComponentWeights(complete_config(kind, config, source), arrays, str(path))


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


def write_cascade(
    components: dict[str, ComponentWeights],
    folder,
    tokenizer=None,
    dtype: str = "float32",
    metadata: dict | None = None,
) -> None:
    """Write `folder`, whole or not at all, as diffusers' pipeline of the prior or decoder among `components`, by kind:
    each in its own folder, scheduler/ and tokenizer/ (a folder, or what saves itself to one), and ppldm.json with
    `metadata` and checksums. An EfficientNet lies beside what the pipeline looks for. Raises ModelError."""
    stage = next((kind for kind in STAGES if kind in components), None)
    if stage is None:
        raise ModelError("there is no prior and no decoder of Stable Cascade to export; give one of them")
    name, further = _PIPELINES[stage]
    head = {"_class_name": name, "_diffusers_version": version_of("diffusers")}
    index = {**head, **further, "scheduler": ["diffusers", _SCHEDULER]}
    with atomic_dir(folder) as target:
        for kind, component in components.items():
            kept = ComponentWeights(component.config, cast(component.arrays, dtype), component.source)
            (own,) = FURTHER_FOLDERS[kind]
            write_component(kind, kept, target / own, "diffusers")
            if kind != "effnet":
                index[own] = [_LIBRARIES.get(kind, "diffusers"), class_of(kind, component.config)]
        if tokenizer is not None:
            copy_tokenizer(tokenizer, target / TOKENIZER_FOLDER)
            index["tokenizer"] = ["transformers", "CLIPTokenizer"]
        write_index(target, index, "diffusers", {"s": 0.008, "scaler": 1.0})
        files = {str(file.relative_to(target)): checksum_file(file) for file in sorted(target.glob("*/*.safetensors"))}
        write_json(target / "ppldm.json", {**(metadata or {}), "files": files})

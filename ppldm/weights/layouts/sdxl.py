"""Stable Diffusion XL in a single .safetensors file, by the names of StabilityAI's generative-models: CompVis' of UNet
and VAE; conditioner.embedders.0, transformers' CLIP; conditioner.embedders.1, open_clip's with its projection.

What shapes do not tell is as in the published base. A refiner, whose embedders.0 is open_clip's, is refused.
"""

import numpy as np

from ...config.network_files import sd3_vocabularies
from ...utils.errors import ModelError
from ..components import ComponentWeights, Weights, from_torch, to_torch
from ..configs import PUBLISHED_SCHEDULE, complete_config
from ..formats.files import read_arrays, read_names
from ..model_file import TOKENIZER_FOLDER
from . import single_file
from .compvis import split, state_of
from .sd3 import clip_config, read_beside

PREFIXES = {
    "unet": single_file.UNET,
    "vae": single_file.VAE,
    "text_encoder": "conditioner.embedders.0.transformer.",
    "text_encoder_2": single_file.SECOND_TEXT,
}
_PROJECTION = "text_projection"


def read(model, kinds) -> Weights:
    """The components `kinds`, by name, of a single file, a `source.ModelSource`. Raises ModelError."""
    path, (beside, said) = model.path, read_beside(model)
    names, components = read_names(path), {}
    for name in (name for name in kinds if any(one.startswith(PREFIXES.get(name, " ")) for one in names)):
        stored = read_arrays(path, lambda key, prefix=PREFIXES[name]: key.startswith(prefix))
        config = beside.components[name].config if beside else None
        if name in ("unet", "vae"):
            config = complete_config(name, config or single_file.configs_by_shapes(stored, path)[name], path)
            if name == "vae" and not beside:
                config["scaling_factor"] = single_file.SDXL_SCALE
            components |= split(stored, {name: config}, path, ema=False)
            continue
        try:
            arrays = _torch(name, {key.removeprefix(PREFIXES[name]): array for key, array in stored.items()})
            config = complete_config(name, config or clip_config(name, arrays), path)
        except (LookupError, ValueError) as error:
            raise ModelError(f"{path} lacks {PREFIXES[name]}{error.args[0]}, or has it in another shape; copy it "
                             "again") from error  # fmt: skip
        components[name] = ComponentWeights(config, from_torch(arrays), str(path))
    if beside:
        return Weights(components, dict(beside.process), path.parent / TOKENIZER_FOLDER, said)
    tables = read_arrays(path, single_file.TABLES.__contains__)
    schedule = single_file.read_schedule(model, tables, names, PUBLISHED_SCHEDULE, described=False, second=False)
    return Weights(components, schedule, sd3_vocabularies())


def join(weights: Weights) -> dict[str, np.ndarray]:
    """The arrays of all components by the names of a single file."""
    found = {}
    for name, component in weights.components.items():
        own = state_of(name, component) if name in ("unet", "vae") else to_torch(component.arrays)
        if name == "text_encoder_2":
            projection = own.pop(f"{_PROJECTION}.weight")
            own = single_file.to_open_clip(own) | {_PROJECTION: projection.T}
        found |= {f"{PREFIXES[name]}{key}": array for key, array in own.items()}
    return found


def _torch(name: str, stored: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays of a text encoder by transformers' names."""
    if name == "text_encoder":
        return {key: one for key, one in stored.items() if key.startswith("text_") and "position_ids" not in key}
    own = {ours: one for key, array in stored.items() for ours, one in single_file.from_open_clip(key, array).items()}
    return own | {f"{_PROJECTION}.weight": stored[_PROJECTION].T}

"""Stable Diffusion 3 in a single .safetensors file: the names of its published code, with PyTorch's orientation.

Queries, keys and values are one matrix there, and what modulates the output, and the words of the last block, says the
shift before the scale. A CLIP without a projection projects by the identity, as the ViT-L of the published file does.
"""

import math

import numpy as np

from ...config.network_files import sd3_vocabularies
from ...diffusion.process import FLOW
from ...networks.configs import CLIPS
from ...utils.errors import ModelError
from ...utils.log import get_logger
from ..components import ComponentWeights, Weights, from_torch, to_torch
from ..configs import PUBLISHED_SCHEDULE, complete_config
from ..folders import EXPORTED_FILE
from ..formats.files import read_arrays, read_names
from ..model_file import TOKENIZER_FOLDER, has_model_file, read_model_file, read_said
from ..names import Unmapped, rename
from .compvis import split, state_of
from .single_file import configs_by_shapes

PREFIXES = {
    "vae": "first_stage_model.",
    "transformer": "model.diffusion_model.",
    "text_encoder": "text_encoders.clip_l.transformer.",
    "text_encoder_2": "text_encoders.clip_g.transformer.",
    "text_encoder_3": "text_encoders.t5xxl.transformer.",
}
T5 = "text_encoder_3"  # whose tokenizer no file has
PREFIXES["projected_text_encoder"] = PREFIXES["text_encoder"]
_SHIFT = 3.0  # of the published model
_PIXELS, _FACTOR, _HEAD_WIDTH = 1024, 8, 64
_PROJECTION = "text_projection.weight"
_JOINED = {"x_block": [f"to_{one}" for one in "qkv"], "context_block": [f"add_{one}_proj" for one in "qkv"]}
_TOP = {
    "pos_embed.pos_embed": "pos_embed", "pos_embed.proj": "x_embedder.proj", "context_embedder": "context_embedder",
    "norm_out.linear": "final_layer.adaLN_modulation.1", "proj_out": "final_layer.linear",
    **{f"time_text_embed.{ours}.linear_{number}": f"{theirs}.mlp.{2 * number - 2}"
       for ours, theirs in (("timestep_embedder", "t_embedder"), ("text_embedder", "y_embedder")) for number in (1, 2)},
}  # fmt: skip
_BLOCK = {
    "norm1.linear": "x_block.adaLN_modulation.1", "norm1_context.linear": "context_block.adaLN_modulation.1",
    "attn.to_out.0": "x_block.attn.proj", "attn.to_add_out": "context_block.attn.proj",
    "ff.net.0.proj": "x_block.mlp.fc1", "ff.net.2": "x_block.mlp.fc2",
    "ff_context.net.0.proj": "context_block.mlp.fc1", "ff_context.net.2": "context_block.mlp.fc2",
}  # fmt: skip


def read_beside(model):
    """(the model.json, what the training said) beside a single file of ours, (None, {}) of another's."""
    folder = model.path.parent
    if model.path.name != EXPORTED_FILE or not has_model_file(folder):
        return None, {}
    return read_model_file(folder), {name: value for name, value in read_said(folder).items() if name != "files"}


def read(model, kinds) -> Weights:
    """The components `kinds`, by name, of a single file, a `source.ModelSource`. Raises ModelError."""
    path, (beside, said) = model.path, read_beside(model)
    names, components = read_names(path), {}
    for name in (name for name in kinds if any(one.startswith(PREFIXES.get(name, " ")) for one in names)):
        if name == T5 and not beside:
            get_logger().info("%s has a T5 and no tokenizer for it: it is left out, and zeros stand in its place; give "
                              "the folder of a pipeline for all of it", path)  # fmt: skip
            continue
        stored = read_arrays(path, lambda key, prefix=PREFIXES[name]: key.startswith(prefix))
        config = beside.components[name].config if beside else None
        if name == "vae":
            config = config or complete_config(name, configs_by_shapes(stored, path)[name], path)
            components |= split(stored, {name: config}, path, ema=False)
        else:
            own = {key.removeprefix(PREFIXES[name]): array for key, array in stored.items()}
            components[name] = _component(name, own, config, path)
    published = PUBLISHED_SCHEDULE | {"prediction_type": FLOW, "timestep_shift": _SHIFT}
    if beside:
        return Weights(components, dict(beside.process), path.parent / TOKENIZER_FOLDER, said)
    return Weights(components, published, sd3_vocabularies())


def join(weights: Weights) -> dict[str, np.ndarray]:
    """The arrays of all components by the names of a single file."""
    found = {}
    for name, component in weights.components.items():
        own = state_of(name, component) if name == "vae" else to_torch(component.arrays)
        own = _joined(component.config["num_layers"], own) if name == "transformer" else own
        found |= {f"{PREFIXES[name]}{key}": array for key, array in own.items()}
    return found


def _component(name: str, stored: dict[str, np.ndarray], config: dict | None, path) -> ComponentWeights:
    try:
        if name == "transformer":
            config, arrays = config or _config(stored), _apart(stored, path)
        elif name == T5:
            arrays = stored
        else:
            config = config or clip_config(name, stored)
            arrays = {_PROJECTION: np.eye(config["hidden_size"], dtype=np.float32), **stored}
            arrays = {key: one for key, one in arrays.items() if key.startswith("text_") and "position_ids" not in key}
    except (LookupError, ValueError, ZeroDivisionError) as error:
        raise ModelError(
            f"{path} lacks {PREFIXES[name]}{error.args[0]}, or has it in another shape; copy it again"
        ) from error
    return ComponentWeights(complete_config(name, config, path), from_torch(arrays), str(path))


def _config(stored: dict[str, np.ndarray]) -> dict:
    width, channels, patch, _ = stored["x_embedder.proj.weight"].shape
    return {
        "sample_size": _PIXELS // _FACTOR,
        "in_channels": channels,
        "out_channels": stored["final_layer.linear.weight"].shape[0] // patch**2,
        "patch_size": patch,
        "num_layers": len({name.split(".")[1] for name in stored if name.startswith("joint_blocks.")}),
        "num_attention_heads": max(1, width // _HEAD_WIDTH),
        "attention_head_dim": min(width, _HEAD_WIDTH),
        "joint_attention_dim": stored["context_embedder.weight"].shape[1],
        "caption_projection_dim": width,
        "pooled_projection_dim": stored["y_embedder.mlp.0.weight"].shape[1],
        "pos_embed_max_size": math.isqrt(stored["pos_embed"].shape[1]),
    }


def clip_config(name: str, stored: dict[str, np.ndarray]) -> dict:
    """Of a text encoder by its arrays, by transformers' names, whose heads are of the usual width."""
    words, width = stored["text_model.embeddings.token_embedding.weight"].shape
    layers = {key.split(".")[3] for key in stored if key.startswith("text_model.encoder.layers.")}
    return {
        "vocab_size": words,
        "hidden_size": width,
        "intermediate_size": stored["text_model.encoder.layers.0.mlp.fc1.weight"].shape[0],
        "num_hidden_layers": len(layers),
        "num_attention_heads": max(1, width // _HEAD_WIDTH),
        "max_position_embeddings": stored["text_model.embeddings.position_embedding.weight"].shape[0],
        "hidden_act": "quick_gelu" if name == CLIPS[0] else "gelu",
        "layer_norm_eps": 1e-5,
        "projection_dim": len(stored[_PROJECTION]) if _PROJECTION in stored else width,
    }


def _names(num_layers: int) -> dict[str, str]:
    """Our prefixes to theirs."""
    blocks = {
        f"transformer_blocks.{number}.{ours}": f"joint_blocks.{number}.{theirs}"
        for number in range(num_layers)
        for ours, theirs in _BLOCK.items()
    }
    return _TOP | blocks


def _swapped(name: str, num_layers: int) -> bool:
    """Whether the halves of an array of ours are the other way about there."""
    return name.startswith(("norm_out.linear", f"transformer_blocks.{num_layers - 1}.norm1_context.linear"))


def _halves_swapped(array: np.ndarray) -> np.ndarray:
    return np.concatenate(np.split(array, 2)[::-1])


def _apart(stored: dict[str, np.ndarray], path) -> dict[str, np.ndarray]:
    """Theirs by our names, in PyTorch's orientation."""
    layers = _config(stored)["num_layers"]
    ours, found = {theirs: ours for ours, theirs in _names(layers).items()}, {}
    for name, array in stored.items():
        if ".attn.qkv." in name:
            _, number, half, _, _, leaf = name.split(".")
            parts = zip(_JOINED[half], np.split(array, 3), strict=True)
            found |= {f"transformer_blocks.{number}.attn.{own}.{leaf}": part for own, part in parts}
            continue
        try:
            own = rename(name, ours)
        except Unmapped:
            raise ModelError(f"{path} has {PREFIXES['transformer']}{name}, which no Stable Diffusion 3 has: 3.5 is not "
                             "supported") from None  # fmt: skip
        found[own] = _halves_swapped(array) if _swapped(own, layers) else array
    return found


def _joined(layers: int, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What `_apart` takes apart."""
    theirs, found = _names(layers), {}
    of = {own: (half, place) for half, names in _JOINED.items() for place, own in enumerate(names)}
    for name, array in arrays.items():
        start, _, rest = name.partition(".attn.")
        own, _, leaf = rest.partition(".")
        if own not in of:
            found[rename(name, theirs)] = _halves_swapped(array) if _swapped(name, layers) else array
        elif of[own][1] == 0:
            half = of[own][0]
            parts = [arrays[f"{start}.attn.{one}.{leaf}"] for one in _JOINED[half]]
            found[f"{start.replace('transformer_blocks', 'joint_blocks')}.{half}.attn.qkv.{leaf}"] = np.concatenate(
                parts
            )
    return found

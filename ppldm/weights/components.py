"""The form that all weights take between reading and writing: names and Linear weights as ppdiffusers has them.

`networks.configs.LABELS` has the kinds of components. PyTorch stores a Linear weight as [out, in], Paddle as [in, out],
and the statistics of a batch norm have other names; all else is the same. Turning is a view, so nothing is rounded.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..networks.configs import is_effnet, is_sd3, is_t5
from ..utils.checksums import sha256_arrays
from ..utils.errors import ModelError

# Tables of vectors, looked up and not multiplied: 2-D, and stored the same way by both.
_TABLES = [
    "embed_tokens", "embed_positions", "token_embedding", "position_embedding", "class_embedding", "embedding",
    "shared", "relative_attention_bias",
]  # fmt: skip
# Of a batch norm, by PyTorch's names; it counts batches too, which nothing here needs.
STATISTICS = {"running_mean": "_mean", "running_var": "_variance"}
OLDER_TORCH_START = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # a number: so PyTorch's files began before 1.6
_COUNT = "num_batches_tracked"

# Settings that only one library's classes have, with the value at which both build the same network.
PADDLE_ONLY: dict[str, dict] = {
    "unet": {"data_format": "NCHW"},
    "vae": {"down_block_out_channels": None, "up_block_out_channels": None},
    "transformer": {
        "num_vector_embeds": None, "use_linear_projection": False, "only_cross_attention": False,
        "double_self_attention": False, "data_format": "NCHW",
    },
}  # fmt: skip
TORCH_ONLY: dict[str, dict] = {
    "vae": {"mid_block_add_attention": True},
    "transformer": {"interpolation_scale": None, "use_additional_conditions": None},
    "sd3": {"dual_attention_layers": [], "qk_norm": None},
}

# What of a VAE the posterior depends on besides shapes of weights, and the weights.
_ENCODER_SETTINGS = (
    "in_channels", "latent_channels", "down_block_types", "block_out_channels", "down_block_out_channels",
    "layers_per_block", "act_fn", "norm_num_groups", "use_quant_conv",
)  # fmt: skip
_ENCODER = ("encoder.", "quant_conv.")
# The same of a text encoder but a T5, and its hidden states.
_TEXT_ENCODER_SETTINGS = (
    "encoder_attention_heads", "head_dim", "activation_function", "scale_embedding",
    "num_attention_heads", "hidden_act", "layer_norm_eps", "pad_token_id",
)  # fmt: skip
_UNUSED = "to_logits."
# What diffusers called the layers of the VAE's attention before 0.17.
_OLD_VAE_ATTENTION = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}


@dataclass
class ComponentWeights:
    """One network: its config, as the keyword arguments of ppdiffusers' class, and its arrays by name."""

    config: dict
    arrays: dict[str, np.ndarray]
    source: str = ""  # where it came from, for messages


@dataclass
class Weights:
    """The components of a model, any of which may be missing. `scheduler`: the settings of a scheduler, those of the
    noise schedule and prediction_type among them. `tokenizer`: its folder, or an object whose `save(folder)` writes it.
    `metadata`: what ppldm.json says. `frozen`: the components that were not trained."""

    components: dict[str, ComponentWeights] = field(default_factory=dict)
    scheduler: dict = field(default_factory=dict)
    tokenizer: Path | Any = None
    metadata: dict = field(default_factory=dict)
    frozen: tuple[str, ...] = ("vae",)


def encoder_digest(vae: ComponentWeights) -> str:
    """32 hexadecimal digits of what a VAE encodes by, whatever its decoder and scaling; of an EfficientNet of all."""
    if is_effnet(vae.config):
        return _digest(vae, vae.config, lambda name: True)
    return _digest(vae, _ENCODER_SETTINGS, lambda name: name.startswith(_ENCODER))


def text_encoder_digest(text_encoder: ComponentWeights) -> str:
    """32 hexadecimal digits that no text encoder has whose hidden states differ."""
    settings = text_encoder.config if is_t5(text_encoder.config) else _TEXT_ENCODER_SETTINGS
    return _digest(text_encoder, settings, lambda name: not name.startswith(_UNUSED))


def _digest(component: ComponentWeights, settings: Iterable[str], matters: Callable[[str], bool]) -> str:
    config = json.dumps([[name, component.config.get(name)] for name in settings])
    own = ((name, array) for name, array in component.arrays.items() if matters(name))
    return sha256_arrays(own, config.encode())


def turn_linear(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every Linear weight transposed, as a view: Paddle's orientation to PyTorch's, or back."""
    return {name: array.T if is_linear_weight(name, array) else array for name, array in arrays.items()}


def widen_bfloat16(bits: np.ndarray) -> np.ndarray:
    """uint16 bit patterns of bfloat16 to the float32 of the same values."""
    wide = np.left_shift(bits, 16, out=np.empty(bits.shape, np.uint32), dtype=np.uint32)
    return wide.view(np.float32)


def from_torch(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Arrays of PyTorch, by name, as Paddle has them."""
    kept = {name: array for name, array in arrays.items() if not name.endswith(f".{_COUNT}")}
    return turn_linear({_rename_leaf(name, STATISTICS): array for name, array in kept.items()})


def to_torch(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Arrays of Paddle, by name, as PyTorch has them."""
    named = {
        _rename_leaf(name, {ours: theirs for theirs, ours in STATISTICS.items()}): array
        for name, array in turn_linear(arrays).items()
    }
    counts = {_rename_leaf(name, {"running_mean": _COUNT}) for name in named if name.endswith(".running_mean")}
    return named | dict.fromkeys(sorted(counts), np.zeros([], np.int64))


def _rename_leaf(name: str, leaves: dict[str, str]) -> str:
    layer, dot, leaf = name.rpartition(".")
    return f"{layer}{dot}{leaves.get(leaf, leaf)}"


def is_linear_weight(name: str, array: np.ndarray) -> bool:
    """True for the weight of a Linear layer: 2-D, and no table of embeddings."""
    layer, _, leaf = name.rpartition(".")
    return leaf == "weight" and array.ndim == 2 and layer.rpartition(".")[2] not in _TABLES


def modern_vae_name(name: str) -> str:
    """The name of a VAE's parameter today, from today's or that of a diffusers before 0.17."""
    start, found, rest = name.partition(".attentions.0.")
    layer, dot, leaf = rest.rpartition(".")
    return f"{start}{found}{_OLD_VAE_ATTENTION.get(layer, layer)}{dot}{leaf}" if found else name


def to_paddle_config(kind: str, config: dict, source) -> dict:
    """A config of diffusers or ppdiffusers as ppdiffusers' class takes it. Raises ModelError for a network it lacks."""
    if "_encoder" in kind:  # of a CLIP with both
        return config.get("vision_config" if kind == "image_encoder" else "text_config", config)
    return _without(TORCH_ONLY.get(_settled(kind, config), {}), config, source, "ppdiffusers")


def to_torch_config(kind: str, config: dict, source) -> dict:
    """The config of a component as diffusers' class takes it. Raises ModelError for a network it lacks."""
    return {
        **TORCH_ONLY.get(_settled(kind, config), {}),
        **_without(PADDLE_ONLY.get(kind, {}), config, source, "diffusers"),
    }


def _settled(kind: str, config: dict) -> str:
    """The name above of what only one library's class of a network has."""
    return "sd3" if kind == "transformer" and is_sd3(config) else kind


def _without(only: dict, config: dict, source, library: str) -> dict:
    for key, neutral in only.items():
        if config.get(key, neutral) != neutral:
            raise ModelError(f"{source}: {key} {config[key]!r} makes a network that {library} does not have")
    return {key: value for key, value in config.items() if key not in only}


def require_finite(arrays: dict[str, np.ndarray], source) -> None:
    """To be called before weights are written. Raises ModelError where a number of them is not finite."""
    for name, array in arrays.items():
        if array.dtype.kind == "f" and not (finite := np.isfinite(array)).all():
            half = array.dtype == np.float16
            raise ModelError(
                f"{source} is not written: {array.size - finite.sum():,} of {array.size:,} numbers of {name} are not "
                f"finite{' in float16' * half}; {'choose float32, or ' * half}give another, or an earlier checkpoint"
            )


def cast(arrays: dict[str, np.ndarray], dtype: str) -> dict[str, np.ndarray]:
    """Floating-point arrays as `dtype`; those that have it already as they are."""
    with np.errstate(over="ignore"):  # `require_finite` says so
        return {
            name: array.astype(dtype, copy=False) if array.dtype.kind == "f" else array
            for name, array in arrays.items()
        }

"""Networks of completed configs: each as its class makes it, or new, with initial weights.

Those are as PyTorch draws them, with which the published models were initialised, by rule, from a seed: each parameter
from `make_rng(seed, Stream.INIT, row=k)`, k being its place in `named_parameters`.

Every builder of a whole model makes its parameters under a fresh `unique_name` guard, so that Paddle's own parameter
names, which key its optimizer's state, are the same in every process that builds the same model.
"""

import math
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pkgutil import resolve_name
from threading import RLock
from unittest import mock

import numpy as np
import paddle
from paddle import nn
from paddle.base import initializer as base

from ..utils.errors import ConfigError
from ..utils.log import get_logger
from ..utils.rng import Stream, make_rng
from .config_fields import CLASSES
from .configs import LABELS, check_config, network_class, table_of
from .cpu_operators.layers import use_cpu_operators

# What the classes raise on settings that no network can have.
UNBUILDABLE = (TypeError, ValueError, AttributeError, LookupError, AssertionError, ArithmeticError)
_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.BatchNorm2D)
_ONE_THREAD = RLock()  # at a time has zeros, so that each leaves Paddle's own setting as it was


@contextmanager
def uninitialized():
    """Inside, new weights are zeros, for callers that set all of them: a class's own draw takes seconds for many."""
    from paddlenlp.transformers.model_utils import no_init_weights

    zero = nn.initializer.Constant(0.0)
    zeros = mock.patch.multiple(base, _global_weight_initializer_=zero, _global_bias_initializer_=zero)
    with _ONE_THREAD, no_init_weights(), zeros:
        yield


@uninitialized()
def make_network(kind: str, config: dict) -> nn.Layer:
    """The network of a completed config, with zeros for weights; on a CPU by our operators. Raises UNBUILDABLE."""
    if kind == "transformer":
        from .transformers.transform import make_transformer

        return use_cpu_operators(make_transformer(config))
    network = network_class(kind, config)
    settings = CLASSES[table_of(kind, config)] if kind in LABELS else network
    made = resolve_name(settings)(**config)  # which encoders take as an object
    return use_cpu_operators(made if settings == network else resolve_name(network)(made))


def build_network(kind: str, config: dict, seed: int) -> nn.Layer:
    """A new network of a completed config, with the initial weights of its kind. Raises ConfigError."""
    try:
        made = make_network(kind, config)
    except UNBUILDABLE as error:
        raise ConfigError(f"no {LABELS[kind]} can be built of this config: {error}") from error
    return init_network(made, table_of(kind, config), seed)


def resize_text_encoder(config: dict, arguments, vocab_size: int, component: str = "text_encoder") -> dict:
    """The config of a new text encoder of `families.settings`, with the tokenizer's sizes, checked again."""
    source = arguments.file_of(component)
    sizes = {"vocab_size": vocab_size, "max_position_embeddings": arguments.model_max_length}
    sizes = {key: value for key, value in sizes.items() if key in config}
    for name, value in sizes.items():
        if config[name] != value:
            get_logger().info("text encoder: %s %s of %s becomes the tokenizer's %d", name, config[name], source, value)
    return check_config(component, config | sizes, source, ConfigError)


def save_component(component, folder) -> None:
    """config.json and model_state.pdparams of one component, as `from_pretrained` reads them."""
    plain = {} if hasattr(component, "to_logits") else {"safe_serialization": False}  # which LDMBert's does not take
    component.save_pretrained(str(folder), **plain)


@dataclass(frozen=True)
class _Parameter:
    """What a rule draws: the parameter `name` of a layer, which is at `path` in the module `whole`."""

    whole: nn.Layer
    layer: nn.Layer
    path: str
    name: str
    shape: list[int]
    rng: np.random.Generator

    def normal(self, std: float) -> np.ndarray:
        """N(0, std**2)."""
        return self.rng.standard_normal(self.shape, dtype=np.float32) * np.float32(std)

    def uniform(self, bound: float) -> np.ndarray:
        """U(-bound, bound)."""
        return (self.rng.random(self.shape, dtype=np.float32) * 2 - 1) * np.float32(bound)

    def zeros(self) -> np.ndarray:
        """No draw at all."""
        return np.zeros(self.shape, np.float32)

    def he(self) -> np.ndarray:
        """Weights ~ N(0, 2 / fan_in), biases 0 (He et al. 2015, arXiv:1502.01852, equation 10)."""
        return self.normal(math.sqrt(2.0 / self.fan_in) if self.name == "weight" else 0.0)

    def xavier(self) -> np.ndarray:
        """U(-b, b), b = sqrt(6 / (fan_in + fan_out))."""
        fan_out = self.shape[1] if isinstance(self.layer, nn.Linear) else self.shape[0]
        return self.uniform(math.sqrt(6.0 / (self.fan_in + fan_out)))

    @property
    def fan_in(self) -> int:
        """Inputs to one output: rows of a Linear (Paddle stores [in, out]), channels x kernel of a Conv2D; of a
        Conv2DTranspose its outputs x kernel, as PyTorch counts them."""
        if not isinstance(self.layer, (nn.Linear, nn.Conv2D, nn.Conv2DTranspose)):
            raise TypeError(f"no initialisation rule for {type(self.layer).__name__}.{self.name}")
        shape = self.layer.weight.shape
        return shape[0] if isinstance(self.layer, nn.Linear) else int(np.prod(shape[1:]))


@paddle.no_grad()
def _redraw(module: nn.Layer, seed: int, salt: int, draw: Callable[[_Parameter], np.ndarray]) -> nn.Layer:
    """Set every parameter to what `draw` gives; norms to 1 and 0. `salt` tells modules of one model apart."""
    row = 0
    for path, layer in module.named_sublayers(include_self=True):
        for name, parameter in layer.named_parameters(include_sublayers=False):
            rng = make_rng(seed, Stream.INIT, epoch=salt, row=row)
            row += 1
            if isinstance(layer, _NORMS):
                value = np.full(parameter.shape, 1.0 if name in ("weight", "_variance") else 0.0, np.float32)
            else:
                value = draw(_Parameter(module, layer, path, name, parameter.shape, rng))
            parameter.set_value(value)
    return module


def init_like_pytorch(module: nn.Layer, seed: int, salt: int) -> nn.Layer:
    """By `_like_pytorch`."""
    return _redraw(module, seed, salt, _like_pytorch)


def init_network(module: nn.Layer, kind: str, seed: int) -> nn.Layer:
    """By the rule of a kind: a name in `CLASSES`, or of a network that has no config."""
    _redraw(module, seed, *_RULES[kind])
    if kind == "unet":
        _end_with_zeros(module)
    elif kind == "effnet":
        _normalise(module, seed)
    return module


def _like_pytorch(one: _Parameter, embedding_std: float = 1.0) -> np.ndarray:
    """Linear and Conv2D: weight and bias ~ U(-b, b), b = 1 / sqrt(fan_in); Embedding: N(0, embedding_std**2); the
    query with which a UNet of width d pools a caption: N(0, 1 / d), as DeepFloyd's IF."""
    if (is_query := one.name == "positional_embedding") or isinstance(one.layer, nn.Embedding):
        return one.normal(one.shape[-1] ** -0.5 if is_query else embedding_std)
    return one.uniform(1.0 / math.sqrt(one.fan_in))


def _clip(one: _Parameter) -> np.ndarray:
    """Biases 0, weights ~ N(0, std**2) as of Radford et al. 2021 (arXiv:2103.00020, section 2.4, and their code), for
    width d and N layers: tokens 0.02, positions 0.01, queries, keys and values d**-0.5, the first layer of an MLP
    (2 d)**-0.5, the projection d**-0.5, and what ends a residual branch d**-0.5 (2 N)**-0.5."""
    width, layers = one.whole.config.hidden_size, one.whole.config.num_hidden_layers
    stds = {"token_embedding": 0.02, "position_embedding": 0.01, "fc1": (2 * width) ** -0.5}
    stds |= dict.fromkeys(("q_proj", "k_proj", "v_proj", "text_projection"), width**-0.5)
    stds |= dict.fromkeys(("out_proj", "fc2"), (2 * width * layers) ** -0.5)
    return one.normal(stds[one.path.rpartition(".")[2]] if one.name == "weight" else 0.0)


def _t5(one: _Parameter) -> np.ndarray:
    """Weights ~ N(0, std**2) as transformers draws a T5's: words 1, queries (d_model d_kv)**-0.5, what ends a residual
    branch the inverse root of the width it comes from, all else d_model**-0.5; norms 1."""
    config, leaf = one.whole.config, one.path.rpartition(".")[2]
    if leaf.endswith("layer_norm"):
        return np.ones(one.shape, np.float32)
    wide = {"shared": 1, "q": config.d_model * config.d_kv, "o": config.num_heads * config.d_kv, "wo": config.d_ff}
    return one.normal(wide.get(leaf, config.d_model) ** -0.5)


@paddle.no_grad()
def _end_with_zeros(unet: nn.Layer) -> None:
    """Zeros in the last layer of every residual branch: the first loss of epsilon is 1.0."""
    ends = [unet.conv_out]
    for layer in unet.sublayers():
        kind = type(layer).__name__
        if kind == "ResnetBlock2D":
            ends.append(layer.conv2)
        elif kind == "Transformer2DModel":
            ends.append(layer.proj_out)
        elif kind == "Attention" and layer.group_norm is not None:
            ends.append(layer.to_out[0])
    for parameter in (one for layer in ends for one in layer.parameters()):
        parameter.zero_()


def _transformer(one: _Parameter) -> np.ndarray:
    """UViT: as published, biases 0, Linear weights and positions ~ N(0, 0.02**2), convolutions as PyTorch draws them.
    DiT: as PixArt-alpha's, biases 0, weights ~ U(-b, b), b = sqrt(6 / (fan_in + fan_out)), but for noise levels and
    captions, N(0, 0.02**2); what a block adds of captions and the output start as 0. Its tables ~ N(0, 1 / width).
    Stable Diffusion 3: the same, as that of DiT's code, where also what shifts, scales and gates starts as 0."""
    uvit = hasattr(one.whole, "decoder_pred")
    if one.name == "scale_shift_table":
        return one.normal(1.0) / np.float32(math.sqrt(one.shape[-1]))
    if uvit and isinstance(one.layer, nn.Conv2D):
        return _like_pytorch(one)
    modulates = "norm" in one.path and one.path.endswith(".linear")
    if one.name == "bias" or one.path == "proj_out" or ".attn2.to_out." in one.path or modulates:
        return one.zeros()
    is_small = uvit or one.path.startswith(("adaln_single", "caption_projection", "time_text"))
    return one.normal(0.02) if is_small else one.xavier()


def _microdit(one: _Parameter) -> np.ndarray:
    """As micro_diffusion's code has it: biases 0 (there not that of patches), weights ~ N(0, 0.02**2), but for those of
    patches and between widths, U(-b, b), b = sqrt(6 / (fan_in + fan_out)). What ends a residual branch of the n-th
    block, and the second matrix of a gated layer, have 0.02 (2 n)**-0.5, in the mixer with all blocks for n. What
    depends on noise levels (adaLN), what mixes captions, and the output start as 0."""
    first, *inner = f"{one.path}.{one.name}".removesuffix(".weight").split(".")
    ends = inner[-1] in ("proj", "w2", "w3")
    mixes_captions = first == "y_emb_preprocess" and inner[-1] in ("proj", "w3")
    if one.name == "bias" or "adaLN_modulation" in inner or inner[-1] == "linear" or mixes_captions:
        return one.zeros()
    if first.startswith(("x_embedder", "patch_mixer_map")):
        return one.xavier()
    std = 0.02
    if ends and first in ("blocks", "patch_mixer"):
        std *= (2 * (int(inner[0]) + 1 if first == "blocks" else one.whole.config.depth)) ** -0.5
    return one.normal(std)


def _single_stream(one: _Parameter) -> np.ndarray:
    """Biases 0, weights ~ N(0, 0.02**2), but for those of patches, U(-b, b), b = sqrt(6 / (fan_in + fan_out)), and what
    ends a residual branch, 0.02 (2 depth)**-0.5; norms' weights 1. What depends on noise levels, with the tables of
    blocks, and the output start as 0."""
    if len(one.shape) == 1 and one.name == "weight":
        return one.zeros() + 1
    if one.name != "weight" or one.path in ("modulation.1", "final_layer.linear"):
        return one.zeros()
    if one.path.startswith("x_embedder"):
        return one.xavier()
    ends = one.path.endswith(("attn.proj", "mlp.w3"))
    return one.normal(0.02 * ((2 * one.whole.config.depth) ** -0.5 if ends else 1.0))


@paddle.no_grad()
def _normalise(effnet: nn.Layer, seed: int) -> None:
    """In its last norm the statistics of pictures of random squares, rounded for all machines."""
    rng, sides = make_rng(seed, Stream.INIT, epoch=8), (1, 2, 4, 8, 16, 32)
    squares = (rng.standard_normal((32, 3, n, n)).repeat(64 // n, axis=2).repeat(64 // n, axis=3) for n in sides)
    pixels = np.clip(0.5 + 0.3 * sum(squares) / math.sqrt(len(sides)), 0.0, 1.0)
    latents = effnet(paddle.to_tensor(pixels, "float32")).numpy()
    effnet.mapper[1]._mean.set_value(latents.mean((0, 2, 3)).round(2))
    effnet.mapper[1]._variance.set_value(latents.var((0, 2, 3)).round(2).clip(0.01))


def _paella(one: _Parameter) -> np.ndarray:
    """Weights ~ N(0, 1 / fan_in), biases 0, and zeros in what its blocks add: latents vary about as much as pixels. Its
    codes ~ N(0, 1), so that each is near to some latents and learns."""
    if one.name != "weight":
        return one.zeros()
    return one.normal(1.0 if isinstance(one.layer, nn.Embedding) else one.fan_in**-0.5)


def _cascade(one: _Parameter) -> np.ndarray:
    """Stable Cascade's network as it was published: weights of Linear and Conv2D ~ U(-b, b), b = sqrt(6 / (fan_in +
    fan_out)) (Glorot and Bengio 2010), biases 0, and of that 0.02 where latents come in; what embeds conditions
    ~ N(0, 0.02**2); zero in what scales by noise levels, in global response norms and where the prediction comes out;
    what ends an MLP divided by the square root of the number of layers down."""
    path, shape = one.path, one.shape
    if isinstance(one.layer, nn.Conv2DTranspose):  # PyTorch's own
        return _like_pytorch(one)
    if one.name != "weight" or path == "clf.1" or ".mapper" in path:
        return one.zeros()
    if path.startswith(("clip_", "effnet_mapper", "pixels_mapper")):
        return one.normal(0.02)
    damping = math.sqrt(1 / sum(one.whole.config.down_num_layers_per_block))
    # Queries, keys and values were one matrix.
    size, parts = float(np.prod(shape[2:])), 3 if path.endswith(("to_q", "to_k", "to_v")) else 1
    bound = math.sqrt(6 / (size * (shape[0] + parts * shape[1])))
    bound *= 0.02 if path == "embedding.1" else damping if path.endswith("channelwise.4") else 1
    return one.uniform(bound)


# By kind: the salt, and the rule. Both embeddings of an LDMBert are ~ N(0, init_std**2), by default 0.02**2. An
# autoencoder has no shortcut, so that from PyTorch's smaller weights it learns more slowly. Convolutions of a
# discriminator are ~ N(0, 0.02**2) as of Isola et al. 2017 (arXiv:1611.07004, section 6.2), biases 0; of LPIPS VGG16's
# are as `he` draws them, and the weights of its features ~ U(0, 1).
_RULES: dict[str, tuple[int, Callable[[_Parameter], np.ndarray]]] = {
    "unet": (2, _like_pytorch), "vae": (3, _Parameter.he), "clip": (4, _clip), "t5": (4, _t5),
    "uvit": (5, _transformer), "dit": (5, _transformer), "microdit": (5, _microdit),
    "single_stream": (5, _single_stream), "sd3": (5, _transformer),
    "cascade_prior": (6, _cascade), "cascade_decoder": (6, _cascade), "effnet": (3, _Parameter.he),
    "vqgan": (7, _paella), "inception": (28, _Parameter.he),
    "ldmbert": (1, lambda one: _like_pytorch(one, one.whole.config.init_std)),
    "discriminator": (26, lambda one: one.normal(0.02 if one.name == "weight" else 0.0)),
    "lpips": (27, lambda one: one.rng.random(one.shape, dtype=np.float32) if one.shape[0] == 1 else one.he()),
}  # fmt: skip

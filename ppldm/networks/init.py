"""Initial weights as PyTorch draws them, by rule, from a seed: the same on every rank, whatever was built before.

Paddle's own defaults (Xavier-uniform Linear, Kaiming-normal Conv, zero biases) differ from PyTorch's, with which the
published models were initialised. Each parameter is drawn from `make_rng(seed, Stream.INIT, row=k)`, k being its place
in `named_parameters`.
"""

import math

import numpy as np
import paddle
from paddle import nn

from ..utils.rng import Stream, make_rng


def init_like_pytorch(module: nn.Layer, seed: int, salt: int, embedding_std: float = 1.0) -> nn.Layer:
    """Draw every parameter of `module` anew, in place, and return it.

    Linear and Conv2D: weight and bias ~ U(-b, b), b = 1 / sqrt(fan_in) (torch.nn.Linear.reset_parameters).
    Embedding: N(0, embedding_std**2). LayerNorm, GroupNorm and BatchNorm: weight 1, bias 0; BatchNorm's running mean 0
    and variance 1, which are parameters in Paddle.
    `salt` tells modules of one model apart, so that equal layers of two modules do not start equal.
    """

    def draw(layer: nn.Layer, name: str, shape, rng: np.random.Generator) -> np.ndarray:
        if isinstance(layer, nn.Embedding):
            return rng.standard_normal(shape, dtype=np.float32) * np.float32(embedding_std)
        if isinstance(layer, (nn.Linear, nn.Conv2D)):
            bound = np.float32(1.0 / math.sqrt(_fan_in(layer)))
            return (rng.random(shape, dtype=np.float32) * 2 - 1) * bound
        return _draw_norm(layer, name, shape)

    return _redraw(module, seed, salt, draw)


@paddle.no_grad()
def _redraw(module: nn.Layer, seed: int, salt: int, draw) -> nn.Layer:
    row = 0
    for layer in module.sublayers(include_self=True):
        for name, parameter in layer.named_parameters(include_sublayers=False):
            rng = make_rng(seed, Stream.INIT, epoch=salt, row=row)
            row += 1
            parameter.set_value(draw(layer, name, parameter.shape, rng))
    return module


def _draw_norm(layer: nn.Layer, name: str, shape) -> np.ndarray:
    if isinstance(layer, (nn.LayerNorm, nn.GroupNorm, nn.BatchNorm2D)):
        return np.full(shape, 1.0 if name in ("weight", "_variance") else 0.0, dtype=np.float32)
    raise TypeError(f"no initialisation rule for {type(layer).__name__}.{name}")


def _fan_in(layer) -> int:
    """Inputs to one output: rows of a Linear (Paddle stores [in, out]), channels x kernel of a Conv2D."""
    shape = layer.weight.shape
    return shape[0] if isinstance(layer, nn.Linear) else int(np.prod(shape[1:]))


def init_text_encoder(text_encoder: nn.Layer, seed: int) -> nn.Layer:
    """LDMBert: the general rule, then both embeddings ~ N(0, init_std**2), init_std being 0.02 by default."""
    return init_like_pytorch(text_encoder, seed, salt=1, embedding_std=text_encoder.config.init_std)


def init_clip(text_encoder: nn.Layer, seed: int) -> nn.Layer:
    """CLIP's text encoder: biases 0, weights ~ N(0, std**2) as of Radford et al. 2021 (arXiv:2103.00020, section 2.4,
    and their code), for width d and N layers: tokens 0.02, positions 0.01, queries, keys and values d**-0.5, the first
    layer of an MLP (2 d)**-0.5, and what ends a residual branch d**-0.5 (2 N)**-0.5."""
    width, layers = text_encoder.config.hidden_size, text_encoder.config.num_hidden_layers
    stds = {"token_embedding": 0.02, "position_embedding": 0.01, "fc1": (2 * width) ** -0.5}
    stds |= dict.fromkeys(("q_proj", "k_proj", "v_proj"), width**-0.5)
    stds |= dict.fromkeys(("out_proj", "fc2"), (2 * width * layers) ** -0.5)
    leaves = {id(layer): name.rpartition(".")[2] for name, layer in text_encoder.named_sublayers()}

    def draw(layer: nn.Layer, name: str, shape, rng: np.random.Generator) -> np.ndarray:
        if isinstance(layer, (nn.Linear, nn.Embedding)):
            std = stds[leaves[id(layer)]] if name == "weight" else 0.0
            return rng.standard_normal(shape, dtype=np.float32) * np.float32(std)
        return _draw_norm(layer, name, shape)

    return _redraw(text_encoder, seed, salt=4, draw=draw)


@paddle.no_grad()
def init_unet(unet: nn.Layer, seed: int) -> nn.Layer:
    """UNet: the general rule, then the last layer of every residual branch to zero.

    So each branch starts as the identity and the whole network's output as exactly 0: the first loss of epsilon
    prediction is the mean square of unit noise, 1.0.
    """
    init_like_pytorch(unet, seed, salt=2)
    for layer in unet.sublayers():
        kind = type(layer).__name__
        if kind == "ResnetBlock2D":
            _zero(layer.conv2)
        elif kind == "Transformer2DModel":
            _zero(layer.proj_out)
        elif kind == "Attention" and layer.group_norm is not None:
            _zero(layer.to_out[0])
    _zero(unet.conv_out)
    return unet


def init_autoencoder(vae: nn.Layer, seed: int) -> nn.Layer:
    """AutoencoderKL: Linear and Conv2D weights ~ N(0, 2 / fan_in) (He et al. 2015, arXiv:1502.01852), biases 0.

    Its path from pixels to pixels has no shortcut around it, so PyTorch's smaller weights learn more slowly: after the
    quickstart's 1,500 updates the reconstructions had 24.9 dB from those.
    """

    def draw(layer: nn.Layer, name: str, shape, rng: np.random.Generator) -> np.ndarray:
        if isinstance(layer, (nn.Linear, nn.Conv2D)):
            scale = math.sqrt(2.0 / _fan_in(layer)) if name == "weight" else 0.0
            return rng.standard_normal(shape, dtype=np.float32) * np.float32(scale)
        return _draw_norm(layer, name, shape)

    return _redraw(vae, seed, salt=3, draw=draw)


def _zero(layer: nn.Layer) -> None:
    for parameter in layer.parameters():
        parameter.set_value(np.zeros(parameter.shape, dtype=np.float32))

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
    layer of an MLP (2 d)**-0.5, the projection d**-0.5, and what ends a residual branch d**-0.5 (2 N)**-0.5."""
    width, layers = text_encoder.config.hidden_size, text_encoder.config.num_hidden_layers
    stds = {"token_embedding": 0.02, "position_embedding": 0.01, "fc1": (2 * width) ** -0.5}
    stds |= dict.fromkeys(("q_proj", "k_proj", "v_proj", "text_projection"), width**-0.5)
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


def init_transformer(transformer: nn.Layer, seed: int) -> nn.Layer:
    """UViT: as published (arXiv:2209.12152 and its code), biases 0, Linear weights and positions ~ N(0, 0.02**2),
    convolutions as PyTorch draws them.

    DiT: as PixArt-alpha's code has it, biases 0, weights ~ U(-b, b), b = sqrt(6 / (fan_in + fan_out)), but for the
    layers of noise levels and captions, N(0, 0.02**2); what a block adds of captions and the output start as 0, so that
    the first loss of epsilon prediction is 1. Its tables ~ N(0, 1 / width). A MicroDiT: `_draw_microdit`.
    """
    if type(transformer).__name__ == "MicroDiT":
        return _redraw(transformer, seed, salt=5, draw=_draw_microdit(transformer))
    names = {id(layer): name for name, layer in transformer.named_sublayers()}
    uvit = hasattr(transformer, "decoder_pred")

    def draw(layer: nn.Layer, name: str, shape, rng: np.random.Generator) -> np.ndarray:
        whole = names.get(id(layer), "")
        if isinstance(layer, nn.LayerNorm):
            return _draw_norm(layer, name, shape)
        if name == "scale_shift_table":
            return rng.standard_normal(shape, dtype=np.float32) / np.float32(math.sqrt(shape[-1]))
        if uvit and isinstance(layer, nn.Conv2D):
            return (rng.random(shape, dtype=np.float32) * 2 - 1) * np.float32(1.0 / math.sqrt(_fan_in(layer)))
        if name == "bias" or whole == "proj_out" or ".attn2.to_out." in whole:
            return np.zeros(shape, np.float32)
        if uvit or whole.startswith(("adaln_single", "caption_projection")):
            return rng.standard_normal(shape, dtype=np.float32) * np.float32(0.02)
        fans = _fan_in(layer) + (shape[1] if isinstance(layer, nn.Linear) else shape[0])
        return (rng.random(shape, dtype=np.float32) * 2 - 1) * np.float32(math.sqrt(6.0 / fans))

    return _redraw(transformer, seed, salt=5, draw=draw)


def _draw_microdit(transformer: nn.Layer):
    """As micro_diffusion's code has it: biases 0 (there not that of patches), weights ~ N(0, 0.02**2), but for those of
    patches and between widths, U(-b, b), b = sqrt(6 / (fan_in + fan_out)). What ends a residual branch of the n-th
    block, and the second matrix of a gated layer, have 0.02 (2 n)**-0.5, in the mixer with all blocks for n. What
    depends on noise levels (adaLN), what mixes captions, and the output start as 0."""
    names = {id(layer): name for name, layer in transformer.named_sublayers()}

    def draw(layer: nn.Layer, name: str, shape, rng: np.random.Generator) -> np.ndarray:
        if isinstance(layer, nn.LayerNorm):
            return _draw_norm(layer, name, shape)
        first, *inner = f"{names[id(layer)]}.{name}".removesuffix(".weight").split(".")
        ends = inner[-1] in ("proj", "w2", "w3")
        mixes_captions = first == "y_emb_preprocess" and inner[-1] in ("proj", "w3")
        if name == "bias" or "adaLN_modulation" in inner or inner[-1] == "linear" or mixes_captions:
            return np.zeros(shape, np.float32)
        if first.startswith(("x_embedder", "patch_mixer_map")):
            fans = _fan_in(layer) + (shape[1] if isinstance(layer, nn.Linear) else shape[0])
            return (rng.random(shape, dtype=np.float32) * 2 - 1) * np.float32(math.sqrt(6.0 / fans))
        std = 0.02
        if ends and first in ("blocks", "patch_mixer"):
            std *= (2 * (int(inner[0]) + 1 if first == "blocks" else transformer.config.depth)) ** -0.5
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(std)

    return draw


def init_autoencoder(vae: nn.Layer, seed: int) -> nn.Layer:
    """An autoencoder: Linear and Conv2D weights ~ N(0, 2 / fan_in) (He et al. 2015,
    arXiv:1502.01852), biases 0.

    Its path from pixels to pixels has no shortcut around it, so PyTorch's smaller weights learn more slowly: after the
    quickstart's 1,500 updates the reconstructions had 24.9 dB from those.
    """

    def draw(layer: nn.Layer, name: str, shape, rng: np.random.Generator) -> np.ndarray:
        if isinstance(layer, (nn.Linear, nn.Conv2D)):
            scale = math.sqrt(2.0 / _fan_in(layer)) if name == "weight" else 0.0
            return rng.standard_normal(shape, dtype=np.float32) * np.float32(scale)
        return _draw_norm(layer, name, shape)

    return _redraw(vae, seed, salt=3, draw=draw)


@paddle.no_grad()
def init_effnet(effnet: nn.Layer, seed: int) -> nn.Layer:
    """A stand-in for the published weights: as of an autoencoder, and in its last norm the mean and variance that come
    there of pictures of random squares, so that latents vary about as much as published ones. Rounded, so that another
    machine finds the same."""
    init_autoencoder(effnet, seed)
    rng, sides = make_rng(seed, Stream.INIT, epoch=8), (1, 2, 4, 8, 16, 32)
    squares = (rng.standard_normal((32, 3, n, n)).repeat(64 // n, axis=2).repeat(64 // n, axis=3) for n in sides)
    pixels = np.clip(0.5 + 0.3 * sum(squares) / math.sqrt(len(sides)), 0.0, 1.0)
    latents = effnet(paddle.to_tensor(pixels, "float32")).numpy()
    effnet.mapper[1]._mean.set_value(latents.mean((0, 2, 3)).round(2))
    effnet.mapper[1]._variance.set_value(latents.var((0, 2, 3)).round(2).clip(0.01))
    return effnet


def init_paella(vqgan: nn.Layer, seed: int) -> nn.Layer:
    """A stand-in for the published weights of Paella's autoencoder, whose latents vary about as much as its pixels:
    weights ~ N(0, 1 / fan_in), biases 0, and zeros in what its blocks add. Its codes ~ N(0, 1), as latents are behind
    their norm, so that each is near to some and learns."""

    def draw(layer: nn.Layer, name: str, shape, rng: np.random.Generator) -> np.ndarray:
        if isinstance(layer, nn.BatchNorm2D):
            return _draw_norm(layer, name, shape)
        if name != "weight":
            return np.zeros(shape, np.float32)
        scale = 1.0 if isinstance(layer, nn.Embedding) else _fan_in(layer) ** -0.5
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(scale)

    return _redraw(vqgan, seed, salt=7, draw=draw)


def init_discriminator(discriminator: nn.Layer, seed: int) -> nn.Layer:
    """Convolutions ~ N(0, 0.02**2) as of Isola et al. 2017 (arXiv:1611.07004, section 6.2), biases 0."""

    def draw(layer: nn.Layer, name: str, shape, rng: np.random.Generator) -> np.ndarray:
        if isinstance(layer, nn.Conv2D):
            return rng.standard_normal(shape, dtype=np.float32) * np.float32(0.02 if name == "weight" else 0.0)
        return _draw_norm(layer, name, shape)

    return _redraw(discriminator, seed, salt=26, draw=draw)


def init_lpips(lpips: nn.Layer, seed: int) -> nn.Layer:
    """A stand-in for the published weights: VGG16's convolutions ~ N(0, 2 / fan_in), biases 0, and the weights of its
    features, which are not negative, ~ U(0, 1)."""

    def draw(layer: nn.Layer, name: str, shape, rng: np.random.Generator) -> np.ndarray:
        return rng.random(shape, dtype=np.float32) if shape[0] == 1 else _draw_before_relu(layer, name, shape, rng)

    return _redraw(lpips, seed, salt=27, draw=draw)


def init_inception(inception: nn.Layer, seed: int) -> nn.Layer:
    """A stand-in for the published weights: convolutions ~ N(0, 2 / fan_in), norms that change nothing."""

    def draw(layer: nn.Layer, name: str, shape, rng: np.random.Generator) -> np.ndarray:
        if isinstance(layer, nn.Conv2D):
            return _draw_before_relu(layer, name, shape, rng)
        return _draw_norm(layer, name, shape)

    return _redraw(inception, seed, salt=28, draw=draw)


def _draw_before_relu(layer: nn.Layer, name: str, shape, rng: np.random.Generator) -> np.ndarray:
    """Under which ReLUs keep the variance (He et al. 2015, arXiv:1502.01852, equation 10)."""
    scale = math.sqrt(2.0 / _fan_in(layer)) if name == "weight" else 0.0
    return rng.standard_normal(shape, dtype=np.float32) * np.float32(scale)


@paddle.no_grad()
def init_cascade(unet: nn.Layer, seed: int) -> nn.Layer:
    """Stable Cascade's network as it was published: weights of Linear and Conv2D ~ U(-b, b), b = sqrt(6 / (fan_in +
    fan_out)) (Glorot and Bengio 2010), biases 0, and of that 0.02 where latents come in; what embeds conditions
    ~ N(0, 0.02**2); zero in what scales by noise levels, in global response norms and where the prediction comes out;
    what ends an MLP divided by the square root of the number of layers down."""
    names = {id(layer): name for name, layer in unet.named_sublayers()}
    damping = math.sqrt(1 / sum(unet.config.down_num_layers_per_block))

    def draw(layer: nn.Layer, name: str, shape, rng: np.random.Generator) -> np.ndarray:
        path = names[id(layer)]
        is_upscaler = isinstance(layer, nn.Conv2DTranspose)  # PyTorch's own: fan_in is of its second side
        if is_upscaler:
            bound = 1 / math.sqrt(np.prod(layer.weight.shape[1:]))
        elif name != "weight" or path == "clf.1" or ".mapper" in path:
            return np.zeros(shape, np.float32)
        elif path.startswith(("clip_", "effnet_mapper", "pixels_mapper")):
            return rng.standard_normal(shape, dtype=np.float32) * np.float32(0.02)
        else:
            # Queries, keys and values were one matrix.
            size, parts = float(np.prod(shape[2:])), 3 if path.endswith(("to_q", "to_k", "to_v")) else 1
            bound = math.sqrt(6 / (size * (shape[0] + parts * shape[1])))
            bound *= 0.02 if path == "embedding.1" else damping if path.endswith("channelwise.4") else 1
        return (rng.random(shape, dtype=np.float32) * 2 - 1) * np.float32(bound)

    return _redraw(unet, seed, salt=6, draw=draw)


def _zero(layer: nn.Layer) -> None:
    for parameter in layer.parameters():
        parameter.set_value(np.zeros(parameter.shape, dtype=np.float32))

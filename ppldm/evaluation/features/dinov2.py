"""DINOv2 (Oquab et al. 2023, arXiv:2304.07193): the class token of a vision transformer, behind its last norm.

Weights are read under Meta's names (blocks.0.attn.qkv.weight) and transformers' (encoder.layer.0.attention.attention.
query.weight), of ViT-S, B and L, with register tokens (Darcet et al. 2023, arXiv:2309.16588) or without. Sizes follow
from the shapes of the weights; heads have 64 numbers.

Tables of positions are for 37 x 37 patches, and 224 pixels have 16 x 16. They are resized as Meta's code does: by
bicubic interpolation at a scale of 16.1 / 37, and with register tokens by a bicubic filter that does not alias.
transformers' code takes 16 / 37.
"""

import re
from pathlib import Path

import numpy as np
import paddle
from paddle import nn
from paddle.nn.functional import scaled_dot_product_attention

from ...utils.errors import ModelError
from ...utils.pictures import bicubic_filter
from ...weights.fill import fill_layer
from ...weights.formats.files import read_component_arrays
from .base import FeatureNetwork, network_of
from .resize import Convention

SIDE, _HEAD = 224, 64
_NAMES = (
    (r"^embeddings\.", ""),
    (r"^encoder\.layer\.", "blocks."),
    (r"^position_embeddings$", "pos_embed"),
    (r"^patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^layernorm\.", "norm."),
    (r"\.attention\.output\.dense\.", ".attn.proj."),
    (r"\.layer_scale([12])\.lambda1$", r".ls\1.gamma"),
)
_THIRDS = ("query", "key", "value")


class Dinov2(nn.Layer):
    """The vision transformer, under Meta's names. Pictures, float32 [N, 3, S, S], to class tokens [N, width]."""

    def __init__(self, width: int, depth: int, patch: int, positions: int, registers: int):
        super().__init__()
        self.cls_token = self.create_parameter([1, 1, width])
        self.pos_embed = self.create_parameter([1, positions, width])
        if registers:
            self.register_tokens = self.create_parameter([1, registers, width])
        self.patch_embed = nn.Layer()
        self.patch_embed.proj = nn.Conv2D(3, width, patch, patch)
        self.blocks = nn.LayerList([_Block(width) for _ in range(depth)])
        self.norm = nn.LayerNorm(width, epsilon=1e-6)
        self.num_registers = registers

    def forward(self, pictures):
        patches = self.patch_embed.proj(pictures)
        count, width, side = patches.shape[:3]
        patches = patches.flatten(2).transpose([0, 2, 1])
        first = self.cls_token.expand([count, 1, width])
        tokens = paddle.concat([first, patches], 1) + resize_positions(self.pos_embed, side, self.num_registers > 0)
        if self.num_registers:
            registers = self.register_tokens.expand([count, self.num_registers, width])
            tokens = paddle.concat([tokens[:, :1], registers, tokens[:, 1:]], 1)
        for block in self.blocks:
            tokens = block(tokens)
        return self.norm(tokens[:, 0])


class _Scale(nn.Layer):
    def __init__(self, width: int):
        super().__init__()
        self.gamma = self.create_parameter([width])

    def forward(self, tokens):
        return tokens * self.gamma


class _Attention(nn.Layer):
    def __init__(self, width: int):
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, tokens):
        count, length, width = tokens.shape
        query, key, value = self.qkv(tokens).reshape([count, length, 3, width // _HEAD, _HEAD]).unbind(2)
        return self.proj(scaled_dot_product_attention(query, key, value).reshape([count, length, width]))


class _Block(nn.Layer):
    def __init__(self, width: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, epsilon=1e-6), nn.LayerNorm(width, epsilon=1e-6)
        self.ls1, self.ls2 = _Scale(width), _Scale(width)
        self.attn = _Attention(width)
        self.mlp = nn.Layer()
        self.mlp.fc1, self.mlp.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, tokens):
        tokens = tokens + self.ls1(self.attn(self.norm1(tokens)))
        return tokens + self.ls2(self.mlp.fc2(nn.functional.gelu(self.mlp.fc1(self.norm2(tokens)))))


def load(path: Path, convention: Convention) -> FeatureNetwork:
    """The DINOv2 at `path`. Raises ModelError."""
    arrays = rename(read_component_arrays(path))
    layer = build(arrays, path)
    fill_layer(layer, arrays, path, "a DINOv2 of their size")
    return network_of("dinov2", layer, arrays["cls_token"].shape[-1], convention, SIDE)


def build(arrays: dict[str, np.ndarray], source) -> Dinov2:
    """A network of the size that weights under Meta's names have. Raises ModelError."""
    shapes = [arrays.get(name, np.empty(0)).shape for name in ("cls_token", "pos_embed", "patch_embed.proj.weight")]
    if [len(shape) for shape in shapes] != [3, 3, 4] or shapes[0][-1] % _HEAD:
        raise ModelError(f"{source} holds no DINOv2; give Meta's file of its weights or transformers' folder")
    depth = len({name.split(".")[1] for name in arrays if name.startswith("blocks.")})
    registers = arrays.get("register_tokens", np.empty((1, 0))).shape[1]
    return Dinov2(shapes[0][-1], depth, shapes[2][-1], shapes[1][1], registers)


def rename(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights under Meta's names, in Paddle's orientation, without the mask that only training needs."""
    renamed = {}
    for name, array in arrays.items():
        for pattern, ours in _NAMES:
            name = re.sub(pattern, ours, name)
        renamed[name] = array
    for name in [name for name in renamed if ".attention.attention.query." in name]:
        thirds = [renamed.pop(name.replace("query", third), np.empty(0)) for third in _THIRDS]
        if len({third.shape for third in thirds}) == 1:
            renamed[name.replace("attention.attention.query", "attn.qkv")] = np.concatenate(thirds, -1)
    renamed.pop("mask_token", None)
    return renamed


def resize_positions(table, side: int, filtered: bool):
    """The position embeddings [1, 1 + n^2, width] for [1, 1 + side^2, width]; the first is the class token's."""
    old = round((table.shape[1] - 1) ** 0.5)
    if old == side:
        return table
    matrix = paddle.to_tensor(bicubic_filter(old, side) if filtered else _cubic(old, side))
    grid = table[:, 1:].reshape([old, old, -1])
    resized = paddle.einsum("yi,xj,ijc->yxc", matrix, matrix, grid)
    return paddle.concat([table[:, :1], resized.reshape([1, side * side, -1])], 1)


def _cubic(old: int, new: int, offset: float = 0.1) -> np.ndarray:
    """float32 [new, old]: cubic interpolation (a = -0.75) along one axis at a scale of (new + offset) / old, between
    the four nearest of each position; beyond the ends they are repeated."""
    centres = (np.arange(new) + 0.5) * old / (new + offset) - 0.5
    matrix = np.zeros((new, old))
    for step in range(-1, 3):
        near = np.floor(centres) + step
        x = np.abs(centres - near)
        inner, outer = (1.25 * x - 2.25) * x * x + 1, ((-0.75 * x + 3.75) * x - 6) * x + 3
        np.add.at(matrix, (np.arange(new), near.clip(0, old - 1).astype(int)), np.where(x <= 1, inner, outer))
    return matrix.astype(np.float32)

"""DINOv2 (Oquab et al. 2023, arXiv:2304.07193), a vision transformer whose tokens are features of pictures.

Of ViT-S, B and L, with register tokens (Darcet et al. 2023, arXiv:2309.16588) or without; heads have 64 numbers.
Tables of positions, for 37 x 37 patches, are resized as Meta's code does: bicubic at a scale of 16.1 / 37 for 16
(transformers' code takes 16 / 37), and with register tokens by a bicubic filter that does not alias.
"""

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional as F

from ..utils.pictures import bicubic_filter

HEAD = 64
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet
_SIDE = 16  # pixels of a picture that become those of one patch, as of REPA: 256 become 224


class Dinov2(nn.Layer):
    """Under Meta's names. Float32 pictures [N, 3, H, W] of ImageNet's mean and deviation to class tokens [N, width]."""

    def __init__(self, width: int, depth: int, patch: int, positions: int, registers: int):
        super().__init__()
        self.config = {"width": width, "depth": depth, "patch": patch, "positions": positions, "registers": registers}
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
        return self.tokens(pictures)[:, 0]

    @paddle.no_grad()
    def features(self, pixel_values):
        """Of pictures, uint8 [N, 3, H, W] of 16 pixels a side and more, float32 [N, width, H / 16, W / 16], rounded
        down: the tokens of their patches, behind the last norm."""
        with paddle.amp.auto_cast(enable=False):
            return self.patches(pixel_values.astype("float32") / 255.0)

    def patches(self, pictures):
        """The same of float32 in 0 .. 1, with gradients."""
        sides = [side // _SIDE for side in pictures.shape[2:]]
        pictures = F.interpolate(pictures, [side * self.config["patch"] for side in sides], mode="bicubic")
        mean, std = (paddle.to_tensor(values).reshape([1, 3, 1, 1]) for values in (_MEAN, _STD))
        tokens = self.tokens((pictures - mean) / std)[:, 1 + self.num_registers :]
        return tokens.transpose([0, 2, 1]).reshape([len(tokens), -1, *sides])

    def tokens(self, pictures):
        """[N, T, width]: the class, registers, and patches row by row."""
        patches = self.patch_embed.proj(pictures)
        count, width, *sides = patches.shape
        patches = patches.flatten(2).transpose([0, 2, 1])
        first = self.cls_token.expand([count, 1, width])
        tokens = paddle.concat([first, patches], 1) + resize_positions(self.pos_embed, sides, self.num_registers > 0)
        if self.num_registers:
            registers = self.register_tokens.expand([count, self.num_registers, width])
            tokens = paddle.concat([tokens[:, :1], registers, tokens[:, 1:]], 1)
        for block in self.blocks:
            tokens = block(tokens)
        return self.norm(tokens)


class _Block(nn.Layer):
    def __init__(self, width: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, epsilon=1e-6), nn.LayerNorm(width, epsilon=1e-6)
        self.ls1, self.ls2 = nn.Layer(), nn.Layer()
        for scale in (self.ls1, self.ls2):
            scale.gamma = scale.create_parameter([width])
        self.attn, self.mlp = nn.Layer(), nn.Layer()
        self.attn.qkv, self.attn.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp.fc1, self.mlp.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, tokens):
        count, length, width = tokens.shape
        shape = [count, length, 3, width // HEAD, HEAD]
        query, key, value = self.attn.qkv(self.norm1(tokens)).reshape(shape).unbind(2)
        attended = F.scaled_dot_product_attention(query, key, value).reshape([count, length, width])
        tokens = tokens + self.attn.proj(attended) * self.ls1.gamma
        return tokens + self.mlp.fc2(F.gelu(self.mlp.fc1(self.norm2(tokens)))) * self.ls2.gamma


def resize_positions(table, sides, filtered: bool):
    """The position embeddings [1, 1 + n^2, width] of n x n patches for sides h, w; the first is the class token's."""
    old = round((table.shape[1] - 1) ** 0.5)
    if [old, old] == list(sides):
        return table
    rows, columns = (paddle.to_tensor((bicubic_filter if filtered else _cubic)(old, side)) for side in sides)
    resized = paddle.einsum("yi,xj,ijc->yxc", rows, columns, table[:, 1:].reshape([old, old, -1]))
    return paddle.concat([table[:, :1], resized.flatten(0, 1).unsqueeze(0)], 1)


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

"""A transformer of one stream: words and patches are one sequence, and every block attends to all of it.

    words, patches -> blocks of [norm, attention, gate; norm, gated feed-forward layer, gate] -> patches -> prediction

Nothing here is one paper's. Positions of patches turn their queries and keys (RoPE: Su et al. 2021, arXiv:2104.09864;
half of the numbers by the row, half by the column), so that scores between patches depend on how far apart they are
and pictures may have any sides; words, whose states know their places, are not turned. Norms are of the root mean
square (Zhang and Sennrich 2019, arXiv:1910.07467), of queries and keys too (Dehghani et al. 2023, arXiv:2302.05442).
Feed-forward layers are gated by SiLU (Shazeer 2020, arXiv:2002.05202). One layer makes of the noise level what scales
and gates all blocks, each of which adds a table of its own (PixArt-alpha, arXiv:2310.00426); nothing is shifted, as in
Lumina-Image 2.0 (arXiv:2503.21758). Large patches may come in by few numbers (`bottleneck`), as in arXiv:2511.13720.
With `value_residual` the values of each block but the first are a mixture of its own and the first's, halves at the
start and then learned (Zhou et al. 2024, arXiv:2410.17897).
"""

from functools import lru_cache

import numpy as np
import paddle
from paddle import nn
from paddle.distributed.fleet.utils import recompute
from paddle.nn import functional as F
from ppdiffusers.configuration_utils import ConfigMixin, register_to_config
from ppdiffusers.models.embeddings import get_timestep_embedding
from ppdiffusers.models.modeling_utils import ModelMixin

from ..cpu_operators.layers import attend
from .microdit import grid_of, take_patches

_EPSILON = 1e-6
_FREQUENCIES = 256  # numbers of the sinusoids of a noise level
_MASKED = -10000.0  # added to the scores of what is not attended to
_CHANGES = 4  # of a block: scale and gate, of attention and of the feed-forward layer
_STEP = 64  # of which widths of feed-forward layers are multiples


class SingleStreamTransformer(ModelMixin, ConfigMixin):
    """sample_size: side of the latents that are drawn by default. dim, depth: width and number of blocks. mlp_ratio:
    width of a feed-forward layer by dim, if it were not gated; it has two thirds of that. bottleneck: numbers by which
    a patch comes in; null for dim. rope_theta: the longest wave of positions, in patches, is 2 pi times about this.
    value_residual: blocks see the values of the first too."""

    gradient_checkpointing = False

    @register_to_config
    def __init__(
        self,
        sample_size: int = 32,
        patch_size: int = 2,
        in_channels: int = 4,
        dim: int = 1024,
        depth: int = 24,
        head_dim: int = 64,
        caption_channels: int = 1024,
        mlp_ratio: float = 4.0,
        bottleneck: int | None = None,
        rope_theta: float = 100.0,
        value_residual: bool = False,
    ):
        super().__init__()
        patches = [nn.Conv2D(in_channels, bottleneck or dim, patch_size, patch_size)]
        self.x_embedder = nn.LayerDict({"proj": patches[0]})
        if bottleneck:
            self.x_embedder["widen"] = nn.Linear(bottleneck, dim)
        self.t_embedder = nn.Sequential(nn.Linear(_FREQUENCIES, dim), nn.Silu(), nn.Linear(dim, dim))
        self.y_embedder = nn.Sequential(RMSNorm(caption_channels), nn.Linear(caption_channels, dim))
        self.modulation = nn.Sequential(nn.Silu(), nn.Linear(dim, (_CHANGES + 1) * dim))
        hidden = -(-int(dim * mlp_ratio * 2 / 3) // _STEP) * _STEP
        self.blocks = nn.LayerList([Block(dim, head_dim, hidden, value_residual and i > 0) for i in range(depth)])
        self.final_layer = nn.LayerDict({"norm": RMSNorm(dim), "linear": nn.Linear(dim, patch_size**2 * in_channels)})

    def enable_gradient_checkpointing(self) -> None:
        self.gradient_checkpointing = True

    def forward(self, noisy, timesteps, hidden, mask=None, kept=None):
        """The prediction [B, C, h, w] for latents at timesteps [B] under hidden states [B, L, D] of captions. mask: [B,
        L] int64, 0 where nothing looks. kept: [B, K] int64, the only patches there are, None for all; others are 0."""
        grid, config = grid_of(self, noisy), self.config
        patches = self.x_embedder["proj"](noisy).flatten(2).transpose([0, 2, 1])
        patches = self.x_embedder["widen"](patches) if config.bottleneck else patches
        turns = paddle.to_tensor(rotations(*grid.sides, config.head_dim, config.rope_theta))
        if kept is not None:
            patches = take_patches(patches, kept)
            turns = take_patches(turns.expand([kept.shape[0], -1, -1]), kept)
        words = self.y_embedder(hidden)
        self.extras = words.shape[1]  # tokens before the patches
        unturned = paddle.to_tensor(_unturned(self.extras, config.head_dim)).expand([turns.shape[0], -1, -1])
        tokens, turns = paddle.concat([words, patches], 1), paddle.concat([unturned, turns], 1)
        bias = None
        if mask is not None:
            hides = (1 - mask.astype(tokens.dtype)) * _MASKED
            bias = F.pad(hides, [0, 0, 0, patches.shape[1]]).unsqueeze([1, 2])
        frequencies = get_timestep_embedding(timesteps, _FREQUENCIES, True, 0).astype(noisy.dtype)
        *changes, last = self.modulation(self.t_embedder(frequencies)).unsqueeze(1).chunk(_CHANGES + 1, -1)
        changes = paddle.concat(changes, 1)
        again = self.gradient_checkpointing and self.training
        first = self.blocks[0].values(tokens, changes) if config.value_residual else None
        for block in self.blocks:
            given = (tokens, turns, changes, bias, first)
            tokens = recompute(block, *given) if again else block(*given)
        patches = self.final_layer["norm"](tokens[:, self.extras :]) * (1 + last)
        return grid.join(self.final_layer["linear"](patches), kept)


class Block(nn.Layer):
    """Tokens [B, T, dim], which `turns` [1 or B, T, head_dim] says how to turn; bias: [B, 1, 1, words and all patches],
    of which the first T count; changes: [B, 4, dim] of the noise level, to which the block's own are added; first: [B,
    T, dim], the first block's values, where it `mixes` them with its own."""

    of_tokens = (1, 4)  # the places of further arguments that have a row for each token

    def __init__(self, dim: int, head_dim: int, hidden: int, mixes: bool = False):
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(dim), RMSNorm(dim)
        self.attn = Attention(dim, head_dim, mixes)
        self.mlp = FeedForward(dim, hidden)
        self.scale_table = self.create_parameter([_CHANGES, dim])

    def values(self, tokens, changes):
        """[B, T, dim]: those of its attention."""
        return self.attn.qkv(self.norm1(tokens) * (1 + (changes + self.scale_table)[:, :1])).chunk(3, -1)[2]

    def forward(self, tokens, turns, changes, bias=None, first=None):
        """[B, T, dim]."""
        scale, gate, mlp_scale, mlp_gate = (changes + self.scale_table).split(_CHANGES, 1)
        tokens = tokens + gate * self.attn(self.norm1(tokens) * (1 + scale), turns, bias, first)
        return tokens + mlp_gate * self.mlp(self.norm2(tokens) * (1 + mlp_scale))


class Attention(nn.Layer):
    """Among all tokens; of each head queries and keys are normalised, and turned. mixes: the values are (1/2 + m0) of
    its own and (1/2 + m1) of the first block's, with m learned from 0."""

    def __init__(self, dim: int, head_dim: int, mixes: bool = False):
        super().__init__()
        self.mixture = self.create_parameter([2], default_initializer=nn.initializer.Constant(0.0)) if mixes else None
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias_attr=False), nn.Linear(dim, dim, bias_attr=False)
        self.norm_q, self.norm_k = RMSNorm(head_dim), RMSNorm(head_dim)
        self.heads = dim // head_dim

    def forward(self, tokens, turns, bias=None, first=None):
        """[B, T, dim]."""
        q, k, v = self.qkv(tokens).chunk(3, -1)
        if self.mixture is not None:
            own, other = (self.mixture + 0.5).split(2)
            v = (own * v + other * first).astype(v.dtype)
        heads = [0, 0, self.heads, -1]
        q, k = (turn(norm(x.reshape(heads)), turns).astype(v.dtype) for norm, x in ((self.norm_q, q), (self.norm_k, k)))
        bias = None if bias is None else bias[..., : tokens.shape[1]]
        return self.proj(attend(q.flatten(2), k.flatten(2), v, self.heads, bias))


class FeedForward(nn.Layer):
    """Gated by SiLU."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.w1, self.w2 = nn.Linear(dim, hidden, bias_attr=False), nn.Linear(dim, hidden, bias_attr=False)
        self.w3, self.act = nn.Linear(hidden, dim, bias_attr=False), nn.Silu()

    def forward(self, tokens):
        return self.w3(self.act(self.w1(tokens)) * self.w2(tokens))


class RMSNorm(nn.Layer):
    """Over the last axis, in float32: x / sqrt(mean(x**2) + epsilon), by a weight."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = self.create_parameter([width], default_initializer=nn.initializer.Constant(1.0))
        self.epsilon = _EPSILON

    def forward(self, x):
        wide = x.astype("float32")
        return (wide * (wide.square().mean(-1, keepdim=True) + self.epsilon).rsqrt()).astype(x.dtype) * self.weight


def turn(x, turns):
    """x [B, T, H, D], whose numbers i and D / 2 + i are a pair, turned by `turns` [1 or B, T, D]: cosines, sines."""
    cosine, sine = turns.unsqueeze(2).chunk(2, -1)
    one, other = x.chunk(2, -1)
    return paddle.concat([one * cosine - other * sine, other * cosine + one * sine], -1)


@lru_cache(maxsize=64)
def rotations(rows: int, columns: int, head_dim: int, theta: float) -> np.ndarray:
    """Of patches [1, rows * columns, head_dim] float32: cosines of head_dim / 2 angles, then sines. The first half of
    the angles is row * frequency, the other column * frequency, with frequencies from 1 to about 1 / theta."""
    frequencies = theta ** -(np.arange(head_dim // 4) / (head_dim // 4))
    row, column = np.divmod(np.arange(rows * columns), columns)
    angles = np.concatenate([np.outer(row, frequencies), np.outer(column, frequencies)], 1)
    return np.concatenate([np.cos(angles), np.sin(angles)], 1)[None].astype(np.float32)


def _unturned(count: int, head_dim: int) -> np.ndarray:
    """The same of so many words: of angle 0."""
    return np.repeat(np.array([[[1.0, 0.0]]], np.float32), head_dim // 2, 2).repeat(count, 1)

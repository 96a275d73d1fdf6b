"""MicroDiT, the transformer of micro_diffusion: Sehwag et al. 2024 (arXiv:2407.15811), and its code (Apache 2.0).

    patches, with positions -> mixer: light blocks over all patches -> patches are left out -> blocks -> prediction

Blocks are wider the deeper they are. In every second one but the last the feed-forward layer is a mixture of experts,
each of which chooses its tokens (Zhou et al. 2022, arXiv:2202.09368). Noise level and the mean of the caption change
what blocks do (adaLN), and its words are attended to. Names and shapes of the parameters are those of the published
code, whose tables of positions and of masked patches are computed here.
"""

from dataclasses import dataclass
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

_EPSILON = 1e-6
_FREQUENCIES = 512  # numbers of the sinusoids of a noise level
_MLP_RATIO = 4.0  # of the layers that are not scaled with depth


class MicroDiT(ModelMixin, ConfigMixin):
    """sample_size: side of the latents whose positions count patches; at others these are over the same range. dim,
    depth: width and number of blocks. multiple_of: of which widths of feed-forward layers are rounded up. qkv_ratio,
    mlp_ratio: widths of self-attention and feed-forward layers by dim, in the first block and in the last."""

    gradient_checkpointing = False

    @register_to_config
    def __init__(
        self,
        sample_size: int = 32,
        patch_size: int = 2,
        in_channels: int = 4,
        dim: int = 1024,
        depth: int = 28,
        head_dim: int = 64,
        multiple_of: int = 256,
        caption_channels: int = 1024,
        qkv_ratio: tuple[float, float] = (0.5, 1.0),
        mlp_ratio: tuple[float, float] = (0.5, 4.0),
        patch_mixer_depth: int = 6,
        patch_mixer_dim: int = 768,
        num_experts: int = 8,
        expert_capacity: float = 2.0,
        experts_every_n: int = 2,
    ):
        super().__init__()

        def block(number: int, count: int, width: int, qkv: float, mlp: float) -> Block:
            experts = num_experts if number < count and (number + 1) % experts_every_n == 0 else 0
            inner, hidden = _round_up(int(width * qkv), 2 * head_dim) if qkv != 1 else width, int(width * mlp)
            make = _Experts if experts else _FeedForward
            given = (experts, expert_capacity) if experts else ()
            return Block(width, dim, inner, head_dim, make(width, hidden, multiple_of, *given))

        self.x_embedder = nn.LayerDict({"proj": nn.Conv2D(in_channels, dim, patch_size, patch_size)})
        self.t_embedder = nn.LayerDict(
            {"mlp": nn.Sequential(nn.Linear(_FREQUENCIES, dim), nn.GELU(True), nn.Linear(dim, dim))}
        )
        self.y_embedder = nn.LayerDict({"y_proj": _Mlp(caption_channels, dim)})
        self.y_emb_preprocess = _CaptionBlock(dim, head_dim, multiple_of)
        self.pooled_y_emb_process = _Mlp(dim, dim)
        self.patch_mixer = nn.LayerList(
            [block(i, patch_mixer_depth, patch_mixer_dim, 1, _MLP_RATIO) for i in range(patch_mixer_depth)]
        )
        maps = {"xin": (dim, patch_mixer_dim), "y": (dim, patch_mixer_dim), "xout": (patch_mixer_dim, dim)}
        for name, (before, after) in maps.items():
            layers = () if before == after else (_norm(before), nn.Linear(before, after, bias_attr=False))
            setattr(self, f"patch_mixer_map_{name}", nn.Sequential(*layers))
        ratios = zip(*(np.linspace(first, last, depth).tolist() for first, last in (qkv_ratio, mlp_ratio)), strict=True)
        self.blocks = nn.LayerList([block(i, depth - 1, dim, *ratio) for i, ratio in enumerate(ratios)])
        self.final_layer = _FinalLayer(dim, patch_size**2 * in_channels)

    def enable_gradient_checkpointing(self) -> None:
        self.gradient_checkpointing = True

    def forward(self, noisy, timesteps, hidden, kept=None):
        """The prediction [B, C, h, w] for latents at timesteps [B] under hidden states [B, L, D] of captions. kept: [B,
        K] int64, the patches that the blocks see behind the mixer, None for all; others are predicted as 0."""
        grid = grid_of(self, noisy)
        tokens = self.x_embedder["proj"](noisy).flatten(2).transpose([0, 2, 1])
        table = positions(*grid.sides, self.config.sample_size // grid.side, self.config.dim)
        tokens = tokens + paddle.to_tensor(table, dtype=tokens.dtype)
        frequencies = get_timestep_embedding(timesteps, _FREQUENCIES, True, 0).astype(noisy.dtype)
        words = self.y_emb_preprocess(self.y_embedder["y_proj"](hidden))
        state = self.t_embedder["mlp"](frequencies) + self.pooled_y_emb_process(words.mean(1))

        tokens = self._through(self.patch_mixer, self.patch_mixer_map_xin(tokens), self.patch_mixer_map_y(words), state)
        if kept is not None:
            tokens = take_patches(tokens, kept)
        tokens = self._through(self.blocks, self.patch_mixer_map_xout(tokens), words, state)
        return grid.join(self.final_layer(tokens, state), kept)

    def _through(self, blocks, tokens, words, state):
        again = self.gradient_checkpointing and self.training
        for block in blocks:
            tokens = recompute(block, tokens, words, state) if again else block(tokens, words, state)
        return tokens


class Block(nn.Layer):
    """Attention among tokens, of width `inner`, and to words, and `mlp`; state [B, dim] shifts, scales and gates."""

    def __init__(self, width: int, dim: int, inner: int, head_dim: int, mlp: nn.Layer):
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (_norm(width) for _ in range(3))
        self.attn = _SelfAttention(width, inner, head_dim)
        self.cross_attn = _CrossAttention(width, head_dim)
        self.mlp = mlp
        self.adaLN_modulation = nn.Sequential(nn.GELU(True), nn.Linear(dim, 6 * width))

    def forward(self, tokens, words, state):
        """[B, T, width]."""
        changes = self.adaLN_modulation(state).unsqueeze(1).chunk(6, -1)
        tokens = tokens + changes[2] * self.attn(_modulate(self.norm1(tokens), *changes[:2]))
        tokens = tokens + self.cross_attn(self.norm2(tokens), words)
        return tokens + changes[5] * self.mlp(_modulate(self.norm3(tokens), *changes[3:5]))


class _CaptionBlock(nn.Layer):
    def __init__(self, dim: int, head_dim: int, multiple_of: int):
        super().__init__()
        self.norm1, self.norm2 = _norm(dim), _norm(dim)
        self.attn = _SelfAttention(dim, dim, head_dim)
        self.mlp = _FeedForward(dim, int(dim * _MLP_RATIO), multiple_of)

    def forward(self, words):
        words = words + self.attn(self.norm1(words))
        return words + self.mlp(self.norm2(words))


class _SelfAttention(nn.Layer):
    def __init__(self, width: int, inner: int, head_dim: int):
        super().__init__()
        self.head_dim = head_dim
        self.qkv = nn.Linear(width, 3 * inner, bias_attr=False)
        self.proj = nn.Linear(inner, width, bias_attr=False)

    def forward(self, tokens):
        return self.proj(_attend(*self.qkv(tokens).chunk(3, -1), self.head_dim))


class _CrossAttention(nn.Layer):
    def __init__(self, width: int, head_dim: int):
        super().__init__()
        self.head_dim = head_dim
        self.q_linear = nn.Linear(width, width, bias_attr=False)
        self.kv_linear = nn.Linear(width, 2 * width, bias_attr=False)
        self.proj = nn.Linear(width, width, bias_attr=False)

    def forward(self, tokens, words):
        return self.proj(_attend(self.q_linear(tokens), *self.kv_linear(words).chunk(2, -1), self.head_dim))


class _FeedForward(nn.Layer):
    """Gated by SiLU, and of two thirds of the width, since it has three matrices."""

    def __init__(self, width: int, hidden: int, multiple_of: int):
        super().__init__()
        hidden = _round_up(int(2 * hidden / 3), multiple_of)
        self.w1, self.w2 = (nn.Linear(width, hidden, bias_attr=False) for _ in range(2))
        self.w3 = nn.Linear(hidden, width, bias_attr=False)

    def forward(self, tokens):
        return self.w3(F.silu(self.w1(tokens)) * self.w2(tokens))


class _Experts(nn.Layer):
    """Each expert takes the tokens of a sample to which it gives most of their gate, and at least one; what several
    experts take is the sum of what they make of it, and what none takes is 0. Samples do not compete."""

    def __init__(self, width: int, hidden: int, multiple_of: int, experts: int, capacity: float):
        super().__init__()
        hidden, self.capacity = _round_up(hidden, multiple_of), capacity / experts
        self.w1 = self.create_parameter([experts, width, hidden])
        self.w2 = self.create_parameter([experts, hidden, width])
        self.gate = nn.Linear(width, experts, bias_attr=False)

    def forward(self, tokens):
        count, width = tokens.shape[1:]
        shares = F.softmax(self.gate(tokens), -1).transpose([0, 2, 1])
        shares, numbers = shares.topk(max(1, int(self.capacity * count)), -1)  # [B, E, k]
        # As matrices, and not by index: sums of several experts are then in one order on every device.
        places = F.one_hot(numbers, count).astype(tokens.dtype).transpose([1, 0, 2, 3])  # [E, B, k, T]
        chosen = paddle.matmul(places, tokens.unsqueeze(0))  # [E, B, k, width]
        made = paddle.matmul(F.gelu(paddle.matmul(chosen.flatten(1, 2), self.w1)), self.w2)
        made = made.reshape(chosen.shape) * shares.transpose([1, 0, 2]).unsqueeze(-1)
        return paddle.matmul(places, made, transpose_x=True).sum(0)


class _Mlp(nn.Layer):
    def __init__(self, width: int, dim: int):
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(width, dim), _norm(dim), nn.Linear(dim, dim)

    def forward(self, x):
        return self.fc2(self.norm(F.gelu(self.fc1(x), True)))


class _FinalLayer(nn.Layer):
    def __init__(self, dim: int, numbers: int):
        super().__init__()
        self.norm_final, self.linear = _norm(dim), nn.Linear(dim, numbers)
        self.adaLN_modulation = nn.Sequential(nn.GELU(True), nn.Linear(dim, 2 * dim))

    def forward(self, tokens, state):
        shift, scale = self.adaLN_modulation(state).unsqueeze(1).chunk(2, -1)
        return self.linear(_modulate(self.norm_final(tokens), shift, scale))


def _norm(width: int) -> nn.LayerNorm:
    return nn.LayerNorm(width, epsilon=_EPSILON, bias_attr=False)


def _modulate(x, shift, scale):
    return x * (1 + scale) + shift


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step


def _attend(queries, keys, values, head_dim: int):
    """Attention [B, T, H head_dim] to keys and values [B, L, H head_dim]; queries and keys are normalised."""
    width = queries.shape[-1]
    q, k = (F.layer_norm(one, width, epsilon=_EPSILON).astype(values.dtype) for one in (queries, keys))
    return attend(q, k, values, width // head_dim)


@lru_cache(maxsize=64)
def positions(rows: int, columns: int, side: int, width: int) -> np.ndarray:
    """float32 [1, rows * columns, width]: sines and cosines of the column, then of the row, each over 0 .. side."""
    frequencies = 10000.0 ** -(np.arange(width // 4) / (width // 4))

    def waves(count: int) -> np.ndarray:
        angles = np.outer(np.arange(count) * (side / count), frequencies)
        return np.concatenate([np.sin(angles), np.cos(angles)], 1)

    across = np.broadcast_to(waves(columns)[None], (rows, columns, width // 2))
    down = np.broadcast_to(waves(rows)[:, None], (rows, columns, width // 2))
    return np.concatenate([across, down], 2).reshape(1, rows * columns, width).astype(np.float32)


@dataclass(frozen=True)
class Grid:
    """The patches of latents, N of them: so many rows and columns, of side x side latents each."""

    height: int
    width: int
    side: int

    @property
    def sides(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.height, self.width

    def join(self, tokens, kept):
        """Tokens [B, K, side * side * C] of the patches `kept` (None: all of them, in order) to [B, C, h, w]."""
        if kept is not None:
            count = self.height * self.width
            empty = paddle.zeros([kept.shape[0] * count, tokens.shape[2]], tokens.dtype)
            tokens = paddle.scatter(empty, _flat(kept, count), tokens.flatten(0, 1)).reshape([kept.shape[0], count, -1])
        apart = tokens.reshape([tokens.shape[0], self.height, self.width, self.side, self.side, -1])
        return apart.transpose([0, 5, 1, 3, 2, 4]).flatten(4, 5).flatten(2, 3)

    def split(self, latents):
        """[B, C, h, w] to [B, N, side * side * C]: what `join` joins."""
        apart = latents.reshape([*latents.shape[:2], self.height, self.side, self.width, self.side])
        return apart.transpose([0, 2, 4, 3, 5, 1]).flatten(3, 5).flatten(1, 2)


def grid_of(network: nn.Layer, latents) -> Grid:
    """The patches that a network makes of latents [B, C, h, w]."""
    side = network.config.patch_size
    return Grid(latents.shape[2] // side, latents.shape[3] // side, side)


def take_patches(tokens, kept):
    """Those of tokens [B, N, D] whose numbers are in `kept` [B, K] int64: [B, K, D]."""
    return tokens.flatten(0, 1).index_select(_flat(kept, tokens.shape[1])).reshape([*kept.shape, tokens.shape[2]])


def put_patches(whole, tokens, kept):
    """`whole` [B, N, D] with tokens [B, K, D] in place of those whose numbers are in `kept`."""
    flat = _flat(kept, whole.shape[1])
    return paddle.scatter(whole.flatten(0, 1), flat, tokens.flatten(0, 1)).reshape(whole.shape)


def _flat(kept, count: int):
    return (kept + count * paddle.arange(kept.shape[0]).unsqueeze(1)).flatten()

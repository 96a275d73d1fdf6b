"""Latents as patches, some of which are left out.

N patches: (h / p) (w / p) of p x p latents, row by row. K of them are kept.
"""

from dataclasses import dataclass

import paddle
from paddle import nn


@dataclass(frozen=True)
class Grid:
    """The patches of latents: so many rows and columns, of side x side latents each."""

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
            tokens = _put_patches(tokens, kept, self.height * self.width)
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


def _put_patches(tokens, kept, count: int):
    """Tokens [B, K, D] in their places among `count`, zeros in others: [B, count, D]."""
    empty = paddle.zeros([kept.shape[0] * count, tokens.shape[2]], tokens.dtype)
    return paddle.scatter(empty, _flat(kept, count), tokens.flatten(0, 1)).reshape([kept.shape[0], count, -1])


def _flat(kept, count: int):
    return (kept + count * paddle.arange(kept.shape[0]).unsqueeze(1)).flatten()

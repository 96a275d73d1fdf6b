"""The parts of Stable Cascade's network that ppdiffusers' Würstchen does not have.

Names of parameters are those of diffusers' StableCascadeUNet. Pictures are [B, C, h, w]; every norm is over the
channels of a place, and learns nothing.
"""

import paddle
from paddle import nn
from paddle.nn import functional as F
from ppdiffusers.pipelines.wuerstchen.modeling_wuerstchen_common import GlobalResponseNorm, WuerstchenLayerNorm


def channel_norm(channels: int) -> nn.Layer:
    """Of [B, C, h, w] over C."""
    return WuerstchenLayerNorm(channels, epsilon=1e-6, weight_attr=False, bias_attr=False)


def resize(picture, size):
    """[B, C, h, w] to `size` (h, w), bilinear with aligned corners, in its own type."""
    if list(picture.shape[2:]) == list(size):
        return picture
    resized = F.interpolate(picture.astype("float32"), size=list(size), mode="bilinear", align_corners=True)
    return resized.astype(picture.dtype)


class ResBlock(nn.Layer):
    """ConvNeXt-V2's block (arXiv:2301.00808): a depthwise convolution, then an MLP at each place, to which the output
    of the way down, of `skip` channels, is appended."""

    def __init__(self, channels: int, skip: int = 0, kernel_size: int = 3, dropout: float = 0.0):
        super().__init__()
        self.depthwise = nn.Conv2D(channels, channels, kernel_size, padding=kernel_size // 2, groups=channels)
        self.norm = channel_norm(channels)
        self.channelwise = nn.Sequential(
            nn.Linear(channels + skip, 4 * channels), nn.GELU(), GlobalResponseNorm(4 * channels),
            nn.Dropout(dropout), nn.Linear(4 * channels, channels),
        )  # fmt: skip

    def forward(self, x, skip=None):
        """x [B, C, h, w], skip [B, S, h, w] or None."""
        inner = self.norm(self.depthwise(x))
        if skip is not None:
            inner = paddle.concat([inner, skip.astype(inner.dtype)], axis=1)
        return x + self.channelwise(inner.transpose([0, 2, 3, 1])).transpose([0, 3, 1, 2])


class TimestepBlock(nn.Layer):
    """Scales and shifts channels by the noise level and by each of further `conditions`, embedded one after another."""

    def __init__(self, channels: int, embedding: int, conditions: tuple[str, ...]):
        super().__init__()
        self.mapper = nn.Linear(embedding, 2 * channels)
        self.further = [f"mapper_{name}" for name in conditions]
        for name in self.further:
            setattr(self, name, nn.Linear(embedding, 2 * channels))

    def forward(self, x, embedded):
        """x [B, C, h, w], embedded [B, (1 + conditions) · E]."""
        mappers = (self.mapper, *(getattr(self, name) for name in self.further))
        parts = embedded.chunk(len(mappers), axis=1)
        scale, shift = sum(map(lambda mapper, part: mapper(part), mappers, parts))[:, :, None, None].chunk(2, axis=1)
        return x * (1 + scale) + shift


class Resample(nn.Layer):
    """A 1x1 convolution and a resize by 2 or 1/2, where `enabled`: before the resize on the way down, after it up."""

    def __init__(self, channels: int, out_channels: int, scale: float, enabled: bool):
        super().__init__()
        mapping = nn.Conv2D(channels, out_channels, 1)
        self.blocks = nn.LayerList([mapping, nn.Identity()] if scale < 1 else [nn.Identity(), mapping])
        self.scale = scale if enabled else None

    def forward(self, x):
        """[B, C, h, w] to [B, D, h', w']."""
        for block in self.blocks:
            if isinstance(block, nn.Conv2D):
                x = block(x)
            elif self.scale:
                x = resize(x, [int(side * self.scale) for side in x.shape[2:]])
        return x


def mapper(channels: int, width: int) -> nn.Sequential:
    """What embeds a picture of a condition at each place."""
    return nn.Sequential(
        nn.Conv2D(channels, 4 * width, 1), nn.GELU(), nn.Conv2D(4 * width, width, 1), channel_norm(width)
    )

"""Stable Cascade's network of both stages (Würstchen, arXiv:2306.00637).

Settings, names and shapes of parameters are those of diffusers' StableCascadeUNet. Pictures are [B, C, h, w]; every
norm is over the channels of a place, and learns nothing.
"""

import math
from functools import partial
from itertools import count

import paddle
from paddle import nn
from paddle.distributed.fleet.utils import recompute
from paddle.nn import functional as F
from ppdiffusers.configuration_utils import ConfigMixin, register_to_config
from ppdiffusers.models.modeling_utils import ModelMixin
from ppdiffusers.pipelines.wuerstchen.modeling_wuerstchen_common import (
    AttnBlock,
    GlobalResponseNorm,
    WuerstchenLayerNorm,
)

_POSITIONS = 10000  # what the ratio of a noise level is scaled to, and the longest wavelength of its sinusoids


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
    """ConvNeXt-V2's (arXiv:2301.00808): depthwise, then an MLP at each place, with `skip` channels of the way down."""

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


class CascadeUNet(ModelMixin, ConfigMixin):
    """Levels of blocks down and up again; what each level gives on the way down is appended on the way up."""

    gradient_checkpointing = False

    @register_to_config
    def __init__(
        self,
        in_channels: int = 16,
        out_channels: int = 16,
        timestep_ratio_embedding_dim: int = 64,
        patch_size: int = 1,
        conditioning_dim: int = 2048,
        block_out_channels=(2048, 2048),
        num_attention_heads=(32, 32),
        down_num_layers_per_block=(8, 24),
        up_num_layers_per_block=(24, 8),
        down_blocks_repeat_mappers=(1, 1),
        up_blocks_repeat_mappers=(1, 1),
        block_types_per_layer=(
            ("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"),
            ("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"),
        ),
        clip_text_in_channels: int | None = None,
        clip_text_pooled_in_channels: int = 1280,
        clip_image_in_channels: int | None = None,
        clip_seq: int = 4,
        effnet_in_channels: int | None = None,
        pixel_mapper_in_channels: int | None = None,
        kernel_size: int = 3,
        dropout: float | tuple[float, ...] = (0.1, 0.1),
        self_attn: bool | tuple[bool, ...] = True,
        timestep_conditioning_type=("sca", "crp"),
        switch_level: tuple[bool, ...] | None = None,
    ):
        super().__init__()
        width = block_out_channels[0]
        self.effnet_mapper = mapper(effnet_in_channels, width) if effnet_in_channels else None
        self.pixels_mapper = mapper(pixel_mapper_in_channels, width) if pixel_mapper_in_channels else None
        tokens = conditioning_dim * clip_seq
        self.clip_txt_pooled_mapper = nn.Linear(clip_text_pooled_in_channels, tokens)
        self.clip_txt_mapper = nn.Linear(clip_text_in_channels, conditioning_dim) if clip_text_in_channels else None
        self.clip_img_mapper = nn.Linear(clip_image_in_channels, tokens) if clip_image_in_channels else None
        self.clip_norm = nn.LayerNorm(conditioning_dim, epsilon=1e-6, weight_attr=False, bias_attr=False)
        self.embedding = nn.Sequential(
            nn.PixelUnshuffle(patch_size), nn.Conv2D(in_channels * patch_size**2, width, 1), channel_norm(width)
        )
        levels = range(len(block_out_channels))
        self._add_way("down", levels, down_num_layers_per_block, down_blocks_repeat_mappers)
        self._add_way("up", levels[::-1], up_num_layers_per_block, up_blocks_repeat_mappers)
        self.clf = nn.Sequential(
            channel_norm(width), nn.Conv2D(width, out_channels * patch_size**2, 1), nn.PixelShuffle(patch_size)
        )

    def _add_way(self, way: str, levels, depths, repeats) -> None:
        """The levels of one way, in its order: their blocks, mappers, and what joins each to the level above."""
        widths = self.config.block_out_channels
        blocks, scalers, mappers = nn.LayerList(), nn.LayerList(), nn.LayerList()
        for level, depth, times in zip(levels, depths, repeats, strict=True):
            is_joined = way == "up" and level < len(widths) - 1
            blocks.append(self._level(level, depth, skip=widths[level] if is_joined else 0))
            mappers.append(nn.LayerList([nn.Conv2D(widths[level], widths[level], 1) for _ in range(times - 1)]))
            scalers.append(self._scaler(way, level) if level else nn.Identity())
        setattr(self, f"{way}_blocks", blocks)
        setattr(self, f"{way}_{way}scalers", scalers)
        setattr(self, f"{way}_repeat_mappers", mappers)

    def _level(self, level: int, depth: int, skip: int) -> nn.LayerList:
        """The blocks of a level; the first takes `skip` channels more."""
        config, width = self.config, self.config.block_out_channels[level]
        dropout, attends = (
            value[level] if isinstance(value, (list, tuple)) else value for value in (config.dropout, config.self_attn)
        )
        made = nn.LayerList()
        for name in tuple(config.block_types_per_layer[level]) * depth:
            if name == "SDCascadeResBlock":
                made.append(ResBlock(width, 0 if len(made) else skip, config.kernel_size, dropout))
            elif name == "SDCascadeTimestepBlock":
                embedding, conditions = config.timestep_ratio_embedding_dim, config.timestep_conditioning_type
                made.append(TimestepBlock(width, embedding, tuple(conditions)))
            else:
                heads = config.num_attention_heads[level]
                made.append(AttnBlock(width, config.conditioning_dim, heads, attends, dropout))
        return made

    def _scaler(self, way: str, level: int) -> nn.Sequential:
        """From level - 1 down to `level`, or back up."""
        above, here = self.config.block_out_channels[level - 1 : level + 1]
        channels, out_channels = (above, here) if way == "down" else (here, above)
        if self.config.switch_level:
            enabled = self.config.switch_level[level - 1]
            scale = Resample(channels, out_channels, 0.5 if way == "down" else 2, enabled)
        else:
            scale = (nn.Conv2D if way == "down" else nn.Conv2DTranspose)(channels, out_channels, 2, stride=2)
        return nn.Sequential(channel_norm(channels), scale)

    def enable_gradient_checkpointing(self) -> None:
        self.gradient_checkpointing = True

    def forward(
        self,
        sample,
        timestep_ratio,
        clip_text_pooled,
        clip_text=None,
        clip_img=None,
        effnet=None,
        pixels=None,
        sca=None,
        crp=None,
        control=None,
    ):
        """The prediction [B, D, h, w] for noisy latents `sample` [B, C, h, w]. timestep_ratio, sca, crp: float32 [B] in
        0 .. 1, by default zeros. clip_text_pooled: [B, 1, P]; clip_text [B, L, T], clip_img [B, n, I]: only together.
        effnet: [B, E, h', w'], pixels: [B, 3, h'', w'']; without, nothing, and zeros, are added. control: by the number
        of a residual block, in order, what is added before it, [B, C', h', w']."""
        further = {"sca": sca, "crp": crp}
        ratios = [timestep_ratio, *(further.get(name) for name in self.config.timestep_conditioning_type)]
        embedded = paddle.concat(
            [self._embed_ratio(paddle.zeros_like(timestep_ratio) if one is None else one) for one in ratios], axis=1
        )
        clip = self._embed_clip(clip_text_pooled, clip_text, clip_img)
        x = self.embedding(sample)
        if self.effnet_mapper is not None and effnet is not None:
            x = x + self.effnet_mapper(resize(effnet, x.shape[2:]))
        if self.pixels_mapper is not None:
            empty = [len(sample), self.config.pixel_mapper_in_channels, 8, 8]
            mapped = self.pixels_mapper(paddle.zeros(empty, sample.dtype) if pixels is None else pixels)
            x = x + resize(mapped, x.shape[2:])
        outputs, numbers = [], count()
        run = partial(self._run_level, embedded=embedded, clip=clip, control=control or {}, numbers=numbers)
        for blocks, downscaler, mappers in zip(
            self.down_blocks, self.down_downscalers, self.down_repeat_mappers, strict=True
        ):
            x = run(blocks, mappers, downscaler(x), None)
            outputs.append(x)
        for number, (blocks, upscaler, mappers) in enumerate(
            zip(self.up_blocks, self.up_upscalers, self.up_repeat_mappers, strict=True)
        ):
            skip = outputs.pop()
            x = upscaler(run(blocks, mappers, x, skip if number else None))
        return self.clf(x)

    def _run_level(self, blocks, mappers, x, skip, embedded, clip, control, numbers):
        """The blocks of a level once, and once more after each of its mappers."""
        for turn in range(len(mappers) + 1):
            for number, block in enumerate(blocks):
                if isinstance(block, ResBlock):
                    given = () if number or skip is None else (skip,)
                    x = resize(x, skip.shape[2:]) if given else x
                    if (added := control.get(next(numbers))) is not None:
                        x = x + resize(added, x.shape[2:])
                else:
                    given = (embedded if isinstance(block, TimestepBlock) else clip,)
                if self.gradient_checkpointing and paddle.is_grad_enabled():
                    x = recompute(block, x, *given, use_reentrant=False)
                else:
                    x = block(x, *given)
            if turn < len(mappers):
                x = mappers[turn](x)
        return x

    def _embed_ratio(self, ratio):
        """[B] to sinusoids [B, E], sines first (arXiv:1706.03762). In float32: half cannot tell angles apart."""
        width = self.config.timestep_ratio_embedding_dim
        with paddle.amp.auto_cast(enable=False):
            rates = paddle.exp(paddle.arange(width // 2, dtype="float32") * (-math.log(_POSITIONS) / (width // 2 - 1)))
            angles = (ratio.astype("float32") * _POSITIONS)[:, None] * rates
            padding = paddle.zeros([len(ratio), width % 2])
            return paddle.concat([angles.sin(), angles.cos(), padding], axis=1)

    def _embed_clip(self, pooled, text, image):
        """What is attended to, [B, N, conditioning_dim]: words, the pooled caption, a picture."""
        parts = [self._tokens(self.clip_txt_pooled_mapper, pooled)]
        if text is not None and image is not None:
            parts = [self.clip_txt_mapper(text), *parts, self._tokens(self.clip_img_mapper, image)]
        return self.clip_norm(paddle.concat(parts, axis=1))

    def _tokens(self, mapping, vectors):
        return mapping(vectors).reshape([len(vectors), -1, self.config.conditioning_dim])

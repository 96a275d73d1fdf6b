"""A frozen stage C that is led by a control image, as Stable Cascade's published trainer does it: a batch has, beside
what `stages` says, control [B, K, H, W] uint8.

A small network is trained beside stage C, and no copy of it: a backbone, and for each of some residual blocks of stage
C two 1x1 convolutions, the second of which starts at zero. What they give is added before those blocks.

EfficientNetV2-S (arXiv:2104.00298, table 4) is what Stable Cascade makes of a picture before its prior sees it: without
its classifier, and with a 1x1 convolution to 16 channels whose mean and variance are 0 and 1. Its layers are named as
torchvision's; batch norms have Paddle's names and always use their running statistics. Its activation is SiLU, by its
other name: below -88 the gradient of Paddle 3.3's `silu` is not a number.
"""

import paddle
from paddle import nn
from paddle.nn import functional as F
from ppdiffusers.configuration_utils import ConfigMixin, register_to_config
from ppdiffusers.models.modeling_utils import ModelMixin
from ppdiffusers.pipelines.wuerstchen.modeling_wuerstchen_common import WuerstchenLayerNorm

from ..build import init_like_pytorch, make_network
from ..configs import EFFNET_FACTOR, RGB
from ..model import Component, Loss
from .stages import CascadePriorModel

# Of each stage: whether its blocks are fused, how often they widen their input, and the stride of the first.
_STAGES = ((True, 1, 1), (True, 4, 2), (True, 4, 2), (False, 4, 2), (False, 6, 1), (False, 6, 2))
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's pixels in 0 .. 1
_SLOPE = 0.2  # of every leaky ReLU


def _norm(channels: int, epsilon: float) -> nn.BatchNorm2D:
    return nn.BatchNorm2D(channels, epsilon=epsilon, use_global_stats=True)


def _convolve(channels: int, out_channels: int, kernel: int, stride: int = 1, groups: int = 1, activate: bool = True,
              padding: int | None = None):  # fmt: skip
    padding = kernel // 2 if padding is None else padding
    convolution = nn.Conv2D(channels, out_channels, kernel, stride, padding, groups=groups, bias_attr=False)
    return nn.Sequential(convolution, _norm(out_channels, 1e-3), *([nn.Swish()] if activate else []))


class _Squeeze(nn.Layer):
    """Weighs channels by what they are on average."""

    def __init__(self, channels: int, squeezed: int):
        super().__init__()
        self.fc1, self.fc2 = nn.Conv2D(channels, squeezed, 1), nn.Conv2D(squeezed, channels, 1)

    def forward(self, x):
        return x * F.sigmoid(self.fc2(F.swish(self.fc1(x.mean([2, 3], keepdim=True)))))


class _Block(nn.Layer):
    """An inverted bottleneck, added to its input where it fits. Fused: one convolution widens and mixes places."""

    def __init__(self, channels: int, out_channels: int, fused: bool, expand: int, stride: int):
        super().__init__()
        wide = channels * expand
        if expand == 1:
            layers = [_convolve(channels, out_channels, 3, stride)]
        elif fused:
            layers = [_convolve(channels, wide, 3, stride), _convolve(wide, out_channels, 1, activate=False)]
        else:
            layers = [
                _convolve(channels, wide, 1), _convolve(wide, wide, 3, stride, groups=wide),
                _Squeeze(wide, max(1, channels // 4)), _convolve(wide, out_channels, 1, activate=False),
            ]  # fmt: skip
        self.block = nn.Sequential(*layers)
        self.is_residual = stride == 1 and channels == out_channels

    def forward(self, x):
        return x + self.block(x) if self.is_residual else self.block(x)


def make_backbone(stage_channels, stage_layers, channels: int = RGB) -> nn.Sequential:
    """[B, channels, H, W] to [B, stage_channels[-1], H / 32, W / 32], with blocks by `stage_layers`. As in the
    published trainer, the first convolution of another picture than one of red, green and blue pads nothing."""
    layers = [_convolve(channels, stage_channels[0], 3, 2, padding=1 if channels == RGB else 0)]
    widths = zip(stage_channels[:-2], stage_channels[1:-1], stage_layers, _STAGES, strict=True)
    for own, out_channels, depth, (fused, expand, stride) in widths:
        blocks = [_Block(own, out_channels, fused, expand, stride)]
        blocks += [_Block(out_channels, out_channels, fused, expand, 1) for _ in range(depth - 1)]
        layers.append(nn.Sequential(*blocks))
    return nn.Sequential(*layers, _convolve(stage_channels[-2], stage_channels[-1], 1))


class EffNetEncoder(ModelMixin, ConfigMixin):
    """The encoder. stage_channels, stage_layers: of `make_backbone`."""

    @register_to_config
    def __init__(
        self,
        stage_channels=(24, 24, 48, 64, 128, 160, 256, 1280),
        stage_layers=(2, 4, 4, 6, 9, 15),
        latent_channels: int = 16,
    ):
        super().__init__()
        self.backbone = make_backbone(stage_channels, stage_layers)
        last = nn.Conv2D(stage_channels[-1], latent_channels, 1, bias_attr=False)
        self.mapper = nn.Sequential(last, _norm(latent_channels, 1e-5))
        self.mapper[1].weight = self.mapper[1].bias = None

    def forward(self, pixels):
        """[B, 3, H, W] float32 in 0 .. 1 to latents [B, latent_channels, H / 32, W / 32], in float32, rounded up."""
        with paddle.amp.auto_cast(enable=False):
            mean, std = (paddle.to_tensor(one, "float32").reshape([3, 1, 1]) for one in (_MEAN, _STD))
            return self.mapper(self.backbone((pixels.astype("float32") - mean) / std))


class _ResBlock(nn.Layer):
    """Two 3x3 convolutions behind norms, added to their input."""

    def __init__(self, channels: int):
        super().__init__()
        self.blocks = nn.Sequential(
            WuerstchenLayerNorm(channels), nn.GELU(), nn.Conv2D(channels, channels, 3, padding=1),
            WuerstchenLayerNorm(channels), nn.GELU(), nn.Conv2D(channels, channels, 3, padding=1),
        )  # fmt: skip

    def forward(self, x):
        return x + self.blocks(x)


class CascadeControlNet(ModelMixin, ConfigMixin):
    """With the published names and shapes. bottleneck: the backbone, `effnet`: EfficientNetV2-S, of pixels; `simple`:
    two 3x3 convolutions; `large`: 1x1 convolutions to `large_channels` with `large_layers` residual blocks before the
    last. blocks: the numbers of residual blocks of stage C, of `projection_channels` channels."""

    @register_to_config
    def __init__(
        self,
        conditioning_channels: int = 3,
        projection_channels: int = 2048,
        blocks=(0, 4, 8, 12, 51, 55, 59, 63),
        bottleneck: str = "effnet",
        stage_channels=(24, 24, 48, 64, 128, 160, 256, 1280),
        stage_layers=(2, 4, 4, 6, 9, 15),
        large_channels: tuple[int, int, int] = (16384, 1024, 1280),
        large_layers: int = 8,
    ):
        super().__init__()
        if bottleneck == "effnet":
            width = stage_channels[-1]
            self.backbone = make_backbone(stage_channels, stage_layers, conditioning_channels)
        elif bottleneck == "simple":
            width, inner = conditioning_channels, 4 * conditioning_channels
            self.backbone = nn.Sequential(
                nn.Conv2D(width, inner, 3, padding=1), nn.LeakyReLU(_SLOPE), nn.Conv2D(inner, width, 3, padding=1)
            )
        else:
            first, inner, width = large_channels
            self.backbone = nn.Sequential(
                nn.Conv2D(conditioning_channels, first, 1), nn.LeakyReLU(_SLOPE), nn.Conv2D(first, inner, 1),
                *(_ResBlock(inner) for _ in range(large_layers)), nn.Conv2D(inner, width, 1),
            )  # fmt: skip
        self.projections = nn.LayerList(
            nn.Sequential(
                nn.Conv2D(width, width, 1, bias_attr=False), nn.LeakyReLU(_SLOPE),
                nn.Conv2D(width, projection_channels, 1, bias_attr=False),
            )
            for _ in blocks
        )  # fmt: skip

    def forward(self, seen) -> dict:
        """What is added before each of `blocks`, by its number, [B, projection_channels, h', w']."""
        seen = self.backbone(seen)
        projected = (projection(seen) for projection in self.projections)
        return dict(zip(self.config.blocks, projected, strict=True))


class ControlledPriorModel(CascadePriorModel):
    """All frozen but `controlnet`. As published, the prior drops nothing out though gradients pass through it."""

    def __init__(self, process, **parts):
        super().__init__(process, **parts)
        for layer in self.prior.sublayers():
            if isinstance(layer, nn.Dropout):
                layer.p = 0.0

    @property
    def networks(self) -> dict[str, Component]:
        base = super().networks
        prior = Component(self.prior, trained=False, recompute=base["prior"].recompute, adapted=True)
        return {**base, "prior": prior, "controlnet": Component(self.controlnet, True, "controlnet")}

    @property
    def unsaved(self) -> tuple[str, ...]:
        return tuple(name for name in self.networks if name != "controlnet")

    def seen(self, control):
        """What the network sees of control images [B, K, H, W] uint8: their pixels in 0 .. 1; `large`: what the
        EfficientNet makes of them, `simple`: the means of squares of 32 pixels a side, both [B, K', H / 32, W / 32]."""
        if self.controlnet.config.bottleneck == "large":
            return self.small_latents(control)
        pixels = control.astype("float32") / 255.0
        return F.avg_pool2d(pixels, EFFNET_FACTOR) if self.controlnet.config.bottleneck == "simple" else pixels

    def denoise(self, noisy, timesteps, control=None, control_scale: float = 1.0, **condition):
        """The prior's output, led by `control`. control_scale: how much of what the network adds."""
        added = {} if control is None else self.controlnet(self.seen(control).astype(self.controlnet.dtype))
        added = {number: control_scale * one for number, one in added.items()}
        return super().denoise(noisy, timesteps, **condition, control=added)

    def forward(self, control, **batch) -> Loss:
        return super().forward(**batch, control=control)


@paddle.no_grad()
def new_controlnet(effnet: nn.Layer, config: dict, seed: int) -> CascadeControlNet:
    """One that changes nothing yet; a backbone `effnet` starts as that of a trained EfficientNet, and zeros."""
    made = init_like_pytorch(make_network("cascade_controlnet", config), seed, salt=28)
    if config["bottleneck"] == "effnet":
        for name, value in effnet.backbone.state_dict().items():
            own = made.backbone.state_dict()[name]
            if own.shape != value.shape:
                shared = min(own.shape[1], value.shape[1])
                value = F.pad(value[:, :shared], [0, 0, 0, 0, 0, own.shape[1] - shared])
            own.set_value(value)
    for projection in made.projections:
        projection[-1].weight.zero_()
    return made

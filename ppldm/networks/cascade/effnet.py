"""What Stable Cascade makes of a picture before its prior sees it: EfficientNetV2-S (arXiv:2104.00298, table 4) without
its classifier, and a 1x1 convolution to 16 channels whose mean and variance are 0 and 1.

Layers are named as torchvision's; batch norms have Paddle's names and always use their running statistics. Its
activation is SiLU, by its other name: below -88 the gradient of Paddle 3.3's `silu` is not a number.
"""

import paddle
from paddle import nn
from paddle.nn import functional as F
from ppdiffusers.configuration_utils import ConfigMixin, register_to_config
from ppdiffusers.models.modeling_utils import ModelMixin

from ..configs import RGB

# Of each stage: whether its blocks are fused, how often they widen their input, and the stride of the first.
_STAGES = ((True, 1, 1), (True, 4, 2), (True, 4, 2), (False, 4, 2), (False, 6, 1), (False, 6, 2))
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's pixels in 0 .. 1


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

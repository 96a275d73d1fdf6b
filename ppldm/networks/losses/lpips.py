"""LPIPS: how different two pictures look, by features of VGG16 (Zhang et al. 2018, arXiv:1801.03924, equation 1).

    d(x, y) = sum over l of the mean over places of sum over channels c of w[l, c] (f[l, c](x) - f[l, c](y))^2

f[l] are VGG16's features behind the last convolution of each of its five blocks, divided by their length at each place,
and w the learned weights of version 0.1.
"""

import paddle
from paddle import nn

WIDTHS = (64, 128, 256, 512, 512)  # of VGG16's blocks (Simonyan and Zisserman 2014, arXiv:1409.1556, configuration D)
_DEPTHS = (2, 2, 3, 3, 3)
# What brings pixels in -1 .. 1 to ImageNet's mean and deviation, as LPIPS rounds them.
_SHIFT, _SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)
_TINY = 1e-10


class Lpips(nn.Layer):
    """Layers have torchvision's names: features.0 to features.28, and lins.0 to lins.4."""

    def __init__(self, widths=WIDTHS):
        super().__init__()
        self.config = {"widths": list(widths)}
        layers, channels = [], 3
        for block, (width, depth) in enumerate(zip(widths, _DEPTHS, strict=True)):
            layers += [nn.MaxPool2D(2, 2)] if block else []
            for _ in range(depth):
                layers += [nn.Conv2D(channels, width, 3, padding=1), nn.ReLU()]
                channels = width
        self.features = nn.Sequential(*layers)
        self.lins = nn.LayerList([nn.Conv2D(width, 1, 1, bias_attr=False) for width in widths])

    def forward(self, first, second):
        """Distances [B] of pictures [B, 3, H, W] float32 in -1 .. 1; sides of 16 pixels and more."""
        pairs = zip(self.lins, self._features(first), self._features(second), strict=True)
        return paddle.add_n([lin((one - other).square()).mean([1, 2, 3]) for lin, one, other in pairs])

    def _features(self, pictures) -> list:
        """Of each block [B, C, h, w], of length 1 at each place, or 0 where nothing answers."""
        shift, scale = (paddle.to_tensor(values).reshape([1, 3, 1, 1]) for values in (_SHIFT, _SCALE))
        hidden, found = (pictures - shift) / scale, []
        for layer in [*self.features, None]:
            if layer is None or isinstance(layer, nn.MaxPool2D):
                # The square of the smallest keeps the gradient of the root finite where all are 0.
                length = (hidden.square().sum(1, keepdim=True) + _TINY**2).sqrt()
                found.append(hidden / (length + _TINY))
            hidden = hidden if layer is None else layer(hidden)
        return found

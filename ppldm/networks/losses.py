"""What an autoencoder's loss is made with, beside the error of pixels.

The adversarial loss of CompVis' autoencoders (Esser et al. 2020, arXiv:2012.09841, section 3.1; Rombach et al. 2022,
arXiv:2112.10752, appendix G). LPIPS 0.1, how different two pictures look (Zhang et al. 2018, arXiv:1801.03924, equation
1): the sum over l of the mean over places of sum over channels c of w[l, c] (f[l, c](x) - f[l, c](y))^2, of VGG16's
features f[l] behind the last convolution of each of its five blocks, divided by their length at each place.

VA-VAE's alignment of latents z to features f of a frozen network (Yao et al. 2025, arXiv:2501.01423): the mean over
places of relu(1 - 0.5 - cos(W z, f)), where W is learned, and the mean over pairs of places of a picture of
relu(|cos(z_i, z_j) - cos(f_i, f_j)| - 0.25).
"""

import paddle
from paddle import nn
from paddle.nn import functional as F

_EPSILON, _MOST = 1e-4, 1e4  # of the balance, as CompVis has them
_GROUPS = 32
WIDTHS = (64, 128, 256, 512, 512)  # of VGG16's blocks (Simonyan and Zisserman 2014, arXiv:1409.1556, configuration D)
_DEPTHS = (2, 2, 3, 3, 3)
# What brings pixels in -1 .. 1 to ImageNet's mean and deviation, as LPIPS rounds them.
_SHIFT, _SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)
_TINY = 1e-10
_COSINE_MARGIN, _PAIR_MARGIN = 0.5, 0.25  # as VA-VAE has them


class PatchDiscriminator(nn.Layer):
    """The PatchGAN of pix2pix (Isola et al. 2017, arXiv:1611.07004): logits of patches, under CompVis' names. `layers`
    convolutions halve the sides, two more keep them; channels double up to 8 times the first. Norms take no statistics
    of a batch: `norm` "group" is GroupNorm, "batch" a BatchNorm with running statistics."""

    def __init__(self, channels: int = 64, layers: int = 3, norm: str = "group"):
        super().__init__()
        self.config = {"channels": channels, "layers": layers, "norm": norm}
        widths = [channels * min(2**number, 8) for number in range(layers + 1)]
        parts = [nn.Conv2D(3, channels, 4, 2, 1), nn.LeakyReLU(0.2)]
        for number, (before, width) in enumerate(zip(widths, widths[1:], strict=False), 1):
            stride = 2 if number < layers else 1
            parts += [nn.Conv2D(before, width, 4, stride, 1, bias_attr=False), _norm(norm, width), nn.LeakyReLU(0.2)]
        self.main = nn.Sequential(*parts, nn.Conv2D(widths[-1], 1, 4, 1, 1))

    def forward(self, pictures):
        """Logits [B, 1, h, w] of pictures [B, 3, H, W] float32 in -1 .. 1: high for real ones."""
        return self.main(pictures)

    def judge(self, pictures):
        """The same, through which gradients reach the pictures and none of its own parameters."""
        learning = [parameter for parameter in self.parameters() if not parameter.stop_gradient]
        for parameter in learning:
            parameter.stop_gradient = True
        try:
            return self(pictures)
        finally:
            for parameter in learning:
                parameter.stop_gradient = False


def _norm(kind: str, width: int) -> nn.Layer:
    if kind == "batch":
        return nn.BatchNorm2D(width, use_global_stats=True)
    return nn.GroupNorm(next(groups for groups in range(_GROUPS, 0, -1) if width % groups == 0), width)


def hinge_loss(real, made):
    """(mean max(0, 1 - D(real)) + mean max(0, 1 + D(made))) / 2, of logits."""
    return 0.5 * (F.relu(1.0 - real).mean() + F.relu(1.0 + made).mean())


class GradientBalance(nn.Layer):
    """The adaptive weight: |gradient of the reconstruction's loss| / (|gradient of the adversarial one| + 1e-4), with
    respect to the weight of the decoder's last convolution; saved as a weight is. Gradients are means over the update
    before, of all ranks, and the ratio is 0 before there is one: it does not depend on micro-batches."""

    def __init__(self):
        super().__init__()
        self.register_buffer("ratio", paddle.zeros([1]))

    def weight(self, values: int):
        """The ratio [1] for pictures of so many values: CompVis' errors are sums, bounded by 1e4; ours are means."""
        return self.ratio.clip(max=_MOST / values)

    def sums(self, error, adversarial, weight):
        """[2 n + 1] float32: gradients of two losses with respect to n weights, and a 1 for each micro-batch."""
        gradients = [paddle.grad(one, weight, retain_graph=True)[0].flatten() for one in (error, adversarial)]
        return paddle.concat([*gradients, paddle.ones([1])]).astype("float32")

    @paddle.no_grad()
    def update(self, sums) -> None:
        """Take the sums of all micro-batches of all ranks."""
        error, adversarial = (sums[:-1] / sums[-1]).reshape([2, -1]).square().sum(1).sqrt().split(2)
        self.ratio.set_value(error / (adversarial + _EPSILON))


class LatentAlignment(nn.Layer):
    """The alignment of latents. Its adaptive weight is |gradient of the reconstruction's loss| / |its own gradient|,
    over the update before, of all ranks, and 1 before there is one. VA-VAE compares gradients of the encoder's last
    convolution; here they are those of the latents, which need no further way back through the decoder."""

    def __init__(self, channels: int, features: int):
        super().__init__()
        self.config = {"channels": channels, "features": features}
        self.projection = nn.Conv2D(channels, features, 1, bias_attr=False)
        self.register_buffer("ratio", paddle.ones([1]))

    def forward(self, latents, features):
        """A scalar of latents [B, C, h, w], averaged down to the sides of features [B, F, h', w'], both float32."""
        latents = F.adaptive_avg_pool2d(latents, features.shape[2:])
        cosines = F.cosine_similarity(self.projection(latents), features, axis=1)
        own, theirs = (self._pairs(one) for one in (latents, features))
        return F.relu(1.0 - _COSINE_MARGIN - cosines).mean() + F.relu((own - theirs).abs() - _PAIR_MARGIN).mean()

    def _pairs(self, values):
        """Cosines [B, N, N] between the N places of each picture."""
        places = F.normalize(values.flatten(2), axis=1)
        return places.transpose([0, 2, 1]) @ places

    @paddle.no_grad()
    def update(self, squares) -> None:
        """Take the sums of squares of both gradients, float32 [2]."""
        error, own = squares.sqrt().split(2)
        self.ratio.set_value((error / (own + _TINY)).clip(max=_MOST))


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

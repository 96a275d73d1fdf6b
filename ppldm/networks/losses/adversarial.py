"""The adversarial loss of CompVis' autoencoders (Esser et al. 2020, arXiv:2012.09841, section 3.1; Rombach et al. 2022,
arXiv:2112.10752, appendix G): a discriminator of patches, hinge losses, and the balance of two gradients."""

import paddle
from paddle import nn
from paddle.nn import functional as F

_EPSILON, _MOST = 1e-4, 1e4  # of the balance, as CompVis has them
_GROUPS = 32


class PatchDiscriminator(nn.Layer):
    """The PatchGAN of pix2pix (Isola et al. 2017, arXiv:1611.07004): logits of patches, under CompVis' names.

    `layers` convolutions halve the sides, two more keep them; channels double up to 8 times the first. Norms must not
    depend on how a batch is cut into micro-batches, so none takes statistics of a batch: `norm` "group" is GroupNorm,
    "batch" a BatchNorm with the running statistics that it came with.
    """

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
    """The adaptive weight: |gradient of the reconstruction's loss| / (|gradient of the adversarial one| + 1e-4), both
    with respect to the weight of the decoder's last convolution; saved as a weight is.

    Gradients are means over the whole update, of all ranks, and the ratio is that of the update before: so it does not
    depend on how an update is cut into micro-batches. Before there is one it is 0.
    """

    def __init__(self):
        super().__init__()
        self.register_buffer("ratio", paddle.zeros([1]))

    def weight(self, values: int):
        """The ratio [1] for pictures of so many values, 3 H W each. CompVis' errors are sums over the values of a
        picture, and bounded by 1e4; ours are means."""
        return self.ratio.clip(max=_MOST / values)

    def sums(self, error, adversarial, weight):
        """[2 n + 1] float32: the gradients of two losses of a micro-batch with respect to a weight of n numbers, and a
        1 that counts the micro-batches."""
        gradients = [paddle.grad(one, weight, retain_graph=True)[0].flatten() for one in (error, adversarial)]
        return paddle.concat([*gradients, paddle.ones([1])]).astype("float32")

    @paddle.no_grad()
    def update(self, sums) -> None:
        """Take the sums of all micro-batches of all ranks."""
        error, adversarial = (sums[:-1] / sums[-1]).reshape([2, -1]).square().sum(1).sqrt().split(2)
        self.ratio.set_value(error / (adversarial + _EPSILON))

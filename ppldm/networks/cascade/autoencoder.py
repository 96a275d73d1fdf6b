"""The objective of stage A of Stable Cascade: Paella's autoencoder, whose latents are quantised while it learns.

A batch holds pixel_values [B, 3, H, W] uint8, and nothing random.
"""

import paddle

from ..autoencoder import AutoencoderObjective
from ..encoders import to_unit_range
from ..model import Loss

_MOMENTUM = 0.9  # of a batch norm's statistics, as PyTorch and Paddle have it


class QuantisedObjective(AutoencoderObjective):
    """As its base, with the loss of the code book in place of the KL divergence (van den Oord et al. 2017,
    arXiv:1711.00937, equation 3): codes learn from all of it, latents from a quarter, and the decoder's gradients pass
    through. The norm that ends the encoder has running statistics of the updates before, which move by a tenth each
    update."""

    network = "vqgan"
    scale = "scale_factor"

    def __init__(self, *parts):
        super().__init__(*parts)
        self._norm._use_global_stats = True
        self._own = 1 + 2 * self.vqgan.config.latent_channels  # numbers of `statistics` that are the norm's
        self._seen = None

    @property
    def _norm(self):
        """That of the latents, the only one."""
        return self.vqgan.down_blocks[-1][1]

    @property
    def last_layer(self):
        return self.vqgan.out_block[0]

    def scale_of(self, std: float) -> float:
        """Latents are divided by it."""
        return std

    @paddle.no_grad()
    def latents(self, pixel_values):
        """Latents of [B, 3, H, W] uint8 before they are quantised, [B, C, H / f, W / f] float32."""
        return self.vqgan.encode(pixel_values.astype("float32") / 255.0).latents

    @paddle.no_grad()
    def reconstruct(self, pixel_values):
        """[B, 3, H, W] uint8 to what is decoded of the codes, float32 in -1 .. 1."""
        return self.penalised(to_unit_range(pixel_values))[0].clip(-1.0, 1.0)

    def penalised(self, pixels, _noise=None):
        """(reconstruction, loss of the code book); keeps what comes into the norm for `statistics`."""
        hook = self._norm.register_forward_pre_hook(self._see)
        latents = self.vqgan.encode((pixels + 1.0) / 2.0).latents
        hook.remove()
        with paddle.amp.auto_cast(enable=False):
            codes, loss, _ = self.vqgan.vquantizer(latents.astype("float32"))
        return self.vqgan.decode(codes).sample.astype("float32") * 2.0 - 1.0, loss

    def _see(self, _layer, given) -> None:
        values = given[0].detach().astype("float32").transpose([1, 0, 2, 3]).flatten(1)
        count = paddle.full([1], values.shape[1], "float32")
        self._seen = paddle.concat([count, values.sum(1), values.square().sum(1)])

    def forward(self, pixel_values) -> Loss:
        loss = super().forward(pixel_values)
        if not self.training:
            return loss
        others = [] if loss.statistics is None else [loss.statistics]
        return loss._replace(statistics=paddle.concat([self._seen, *others]))

    @paddle.no_grad()
    def keep_statistics(self, sums) -> None:
        """Into the norm, and what is left into the balance."""
        count, total, squares = paddle.split(sums[: self._own], [1, *[self._own // 2] * 2])
        mean = total / count
        for kept, new in ((self._norm._mean, mean), (self._norm._variance, squares / count - mean.square())):
            kept.set_value(_MOMENTUM * kept + (1 - _MOMENTUM) * new)
        if len(sums) > self._own:
            super().keep_statistics(sums[self._own :])

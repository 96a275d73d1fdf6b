"""The objective of an autoencoder's training, and the measures of a trained one."""

import math
from contextlib import nullcontext

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional as F

from .encoders import to_unit_range
from .losses import GradientBalance, hinge_loss
from .model import Component, Loss, Model, freeze

RECONSTRUCTION_LOSSES = ("l1", "mse", "l1_mse")


class AutoencoderObjective(Model):
    """Reconstruction error plus weighted KL divergence of the posterior from the standard normal, and on top, where
    there is an `lpips`, the perceptual distance, and where there is a `discriminator`, the adversarial loss.

    All in the units of the published LDM autoencoders divided by the number of pixel values: the mean absolute error
    of pixels in -1 .. 1 (`l1`), the mean squared one (`mse`) or their sum (`l1_mse`), plus `perceptual_weight` times
    LPIPS, plus `kl_weight` times the KL in nats a picture over (3 H W). The discriminator D neither runs nor learns in
    the first `adversarial_start` updates, nor in evaluation mode. Afterwards two terms come on top:
    `adversarial_weight` times the balance (`losses`) times - mean D(reconstruction), which gives D no
    gradient, and the hinge loss of D, which gives the autoencoder none.
    `decoder_only`: the encoder, and with it what latents are, stays as it is.
    A batch holds pixel_values [B, 3, H, W] uint8 and posterior_noise [B, C, h, w] float32; nothing is drawn here.

    network: the name of the component that is trained; scale: the setting of its config that brings its latents to unit
    variance. A subclass with another network gives `latents`, `penalised`, `reconstruct`, `last_weight` and `scale_of`.
    """

    unsaved = ("lpips",)
    network = "vae"
    scale = "scaling_factor"

    def __init__(
        self,
        vae: nn.Layer,
        reconstruction_loss: str = "l1",
        kl_weight: float = 1e-6,
        *,
        lpips: nn.Layer | None = None,
        perceptual_weight: float = 1.0,
        discriminator: nn.Layer | None = None,
        adversarial_weight: float = 0.5,
        adversarial_start: int = 0,
        decoder_only: bool = False,
    ):
        super().__init__()
        if reconstruction_loss not in RECONSTRUCTION_LOSSES:
            raise ValueError(f"reconstruction_loss {reconstruction_loss!r} is not one of {RECONSTRUCTION_LOSSES}")
        setattr(self, self.network, vae)
        self.lpips, self.discriminator = lpips, discriminator
        self.reconstruction_loss = reconstruction_loss
        self.kl_weight, self.perceptual_weight = kl_weight, perceptual_weight
        self.adversarial_weight, self.adversarial_start = adversarial_weight, adversarial_start
        self.decoder_only = decoder_only
        self.balance = GradientBalance() if discriminator else None
        self.freeze()
        for encoding in (vae.encoder, vae.quant_conv) if decoder_only else ():
            freeze(encoding)

    @property
    def networks(self) -> dict[str, Component]:
        """The autoencoder; discriminator and LPIPS where they are."""
        found = {self.network: Component(getattr(self, self.network), trained=True)}
        if self.discriminator:
            found["discriminator"] = Component(
                self.discriminator, True, "discriminator", clipped_alone=True, starts=self.adversarial_start
            )
        if self.lpips:
            found["lpips"] = Component(self.lpips, trained=False, stays_float32=True)
        return found

    @property
    def last_weight(self):
        """Of the decoder's last layer, at which the balance compares gradients."""
        return self.vae.decoder.conv_out.weight

    def scale_of(self, std: float) -> float:
        """What `scale` is of latents of this standard deviation."""
        return 1.0 / std

    @paddle.no_grad()
    def latents(self, pixel_values, posterior_noise):
        """Unscaled samples of the posterior of [B, 3, H, W] uint8, float32 [B, C, h, w]."""
        posterior = self.vae.encode(to_unit_range(pixel_values)).latent_dist
        return posterior.mean + posterior.std * posterior_noise

    def reconstruct(self, pixel_values):
        """[B, 3, H, W] uint8 to its reconstruction, float32 in -1 .. 1."""
        return reconstruct(self.vae, pixel_values)

    def penalised(self, pixels, posterior_noise):
        """(reconstruction of [B, 3, H, W] in -1 .. 1, what the loss adds for latents), float32."""
        with paddle.no_grad() if self.decoder_only else nullcontext():
            posterior = self.vae.encode(pixels).latent_dist
            latents = posterior.mean + posterior.std * posterior_noise
        kl = 0.5 * (posterior.mean**2 + posterior.var - 1.0 - posterior.logvar).astype("float32").sum()
        return self.vae.decode(latents).sample.astype("float32"), self.kl_weight * kl / pixels.size

    def forward(self, pixel_values, posterior_noise=None) -> Loss:
        """The loss of pictures: of no noise level."""
        pixels = to_unit_range(pixel_values)
        decoded, penalty = self.penalised(pixels, posterior_noise)
        error, measures = 0.0, None
        if "l1" in self.reconstruction_loss:
            error = error + F.l1_loss(decoded, pixels)
        if "mse" in self.reconstruction_loss:
            error = error + F.mse_loss(decoded, pixels)
        if self.lpips:
            with paddle.amp.auto_cast(enable=False):
                distance = self.lpips(pixels, decoded).mean()
            error, measures = error + self.perceptual_weight * distance, {"lpips": distance.detach()}
        value = error + penalty
        if not (self.discriminator and self.training and self.num_updates >= self.adversarial_start):
            return Loss(value, measures=measures)
        adversarial, statistics = self._adversarial(error, pixels, decoded)
        return Loss(value + adversarial, measures=measures, statistics=statistics)

    def _adversarial(self, error, pixels, decoded):
        """(the weighted loss of the autoencoder plus that of the discriminator, what `statistics` adds up)."""
        with paddle.amp.auto_cast(enable=False):
            unlike = -self.discriminator.judge(decoded).mean()
            learned = hinge_loss(self.discriminator(pixels), self.discriminator(decoded.detach()))
            sums = self.balance.sums(error, unlike, self.last_weight)
        weight = self.adversarial_weight * self.balance.weight(pixels[0].size).squeeze()
        return weight * unlike + learned, sums

    def statistics(self, losses: list[Loss]):
        """The two gradients of the balance, once the discriminator runs."""
        sums = [loss.statistics for loss in losses if loss.statistics is not None]
        return paddle.add_n(sums) if sums else None

    def keep_statistics(self, sums) -> None:
        """Into the balance of the next update."""
        self.balance.update(sums)


@paddle.no_grad()
def reconstruct(vae: nn.Layer, pixel_values):
    """[B, 3, H, W] uint8 to its reconstruction from the posterior's mean, float32 in -1 .. 1."""
    return vae.decode(vae.encode(to_unit_range(pixel_values)).latent_dist.mean).sample.clip(-1.0, 1.0)


def psnr(pixel_values, decoded) -> float:
    """Peak signal-to-noise ratio in dB between uint8 pixels and pixels in -1 .. 1, over all given values."""
    return 10.0 * math.log10(4.0 / max(1e-12, float(F.mse_loss(decoded, to_unit_range(pixel_values)))))


def latent_statistics(batches) -> dict:
    """Mean and standard deviation of unscaled latents: over everything, and each channel's mean.

    `batches` gives latents [B, C, h, w], each of pictures of any size. The scaling factor that brings them to unit
    variance is 1 / std, as Rombach et al. 2022 (arXiv:2112.10752, appendix G) measure it.
    """
    latents = [one.numpy() for one in batches]
    values = np.concatenate([some.ravel() for some in latents]).astype(np.float64)
    by_channel = np.concatenate([np.moveaxis(some, 1, 0).reshape(some.shape[1], -1) for some in latents], axis=1)
    return {
        "latent_mean": float(values.mean()),
        "latent_std": float(values.std()),
        "latent_channel_means": [round(float(mean), 4) for mean in by_channel.mean(axis=1, dtype=np.float64)],
        "pictures": sum(len(some) for some in latents),
    }

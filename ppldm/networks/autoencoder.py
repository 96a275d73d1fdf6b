"""The objective of an autoencoder's training, and the measures of a trained one."""

import math

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional as F

from .model import Component, Loss, Model

RECONSTRUCTION_LOSSES = ("l1", "mse", "l1_mse")


class AutoencoderObjective(Model):
    """Reconstruction error plus weighted KL divergence of the posterior from the standard normal.

    Both in the units of the published LDM autoencoders divided by the number of pixel values: the mean absolute error
    of pixels in -1 .. 1 (`l1`), the mean squared one (`mse`) or their sum (`l1_mse`), plus `kl_weight` times the KL in
    nats a picture over (3 H W).
    A batch holds pixel_values [B, 3, H, W] uint8 and posterior_noise [B, C, h, w] float32; nothing is drawn here.
    """

    def __init__(self, vae: nn.Layer, reconstruction_loss: str = "l1", kl_weight: float = 1e-6):
        super().__init__()
        if reconstruction_loss not in RECONSTRUCTION_LOSSES:
            raise ValueError(f"reconstruction_loss {reconstruction_loss!r} is not one of {RECONSTRUCTION_LOSSES}")
        self.vae = vae
        self.reconstruction_loss = reconstruction_loss
        self.kl_weight = kl_weight

    @property
    def networks(self) -> dict[str, Component]:
        """One, which is trained."""
        return {"vae": Component(self.vae, trained=True)}

    def forward(self, pixel_values, posterior_noise) -> Loss:
        """The loss of pictures: of no noise level."""
        pixels = to_unit_range(pixel_values)
        posterior = self.vae.encode(pixels).latent_dist
        decoded = self.vae.decode(posterior.mean + posterior.std * posterior_noise).sample.astype("float32")
        error = 0.0
        if "l1" in self.reconstruction_loss:
            error = error + F.l1_loss(decoded, pixels)
        if "mse" in self.reconstruction_loss:
            error = error + F.mse_loss(decoded, pixels)
        kl = 0.5 * (posterior.mean**2 + posterior.var - 1.0 - posterior.logvar).astype("float32").sum()
        return Loss(error + self.kl_weight * kl / pixels.size)


@paddle.no_grad()
def encode_moments(vae: nn.Layer, pixel_values):
    """[B, 3, H, W] uint8 to mean and standard deviation of the posterior, float32 [B, 2, C, H / f, W / f], unscaled.

    Runs in float32 outside autocast: half precision overflows in common VAEs.
    """
    with paddle.amp.auto_cast(enable=False):
        posterior = vae.encode(to_unit_range(pixel_values)).latent_dist
        return paddle.stack([posterior.mean, posterior.std], axis=1)


@paddle.no_grad()
def reconstruct(vae: nn.Layer, pixel_values):
    """[B, 3, H, W] uint8 to its reconstruction from the posterior's mean, float32 in -1 .. 1."""
    return vae.decode(vae.encode(to_unit_range(pixel_values)).latent_dist.mean).sample.clip(-1.0, 1.0)


def psnr(pixel_values, decoded) -> float:
    """Peak signal-to-noise ratio in dB between uint8 pixels and pixels in -1 .. 1, over all given values."""
    return 10.0 * math.log10(4.0 / max(1e-12, float(F.mse_loss(decoded, to_unit_range(pixel_values)))))


@paddle.no_grad()
def latent_statistics(vae: nn.Layer, batches) -> dict:
    """Mean and standard deviation of unscaled posterior samples: over everything, and each channel's mean.

    `batches` gives (pixel_values, posterior_noise), each of pictures of any size. The scaling factor that brings
    latents to unit variance is 1 / std, as Rombach et al. 2022 (arXiv:2112.10752, appendix G) measure it.
    """
    latents = []
    for pixel_values, posterior_noise in batches:
        posterior = vae.encode(to_unit_range(pixel_values)).latent_dist
        latents.append((posterior.mean + posterior.std * posterior_noise).numpy())
    values = np.concatenate([some.ravel() for some in latents]).astype(np.float64)
    by_channel = np.concatenate([np.moveaxis(some, 1, 0).reshape(some.shape[1], -1) for some in latents], axis=1)
    return {
        "latent_mean": float(values.mean()),
        "latent_std": float(values.std()),
        "latent_channel_means": [round(float(mean), 4) for mean in by_channel.mean(axis=1, dtype=np.float64)],
        "pictures": sum(len(some) for some in latents),
    }


def to_unit_range(pixel_values):
    """uint8 0 .. 255 to float32 -1 .. 1."""
    return pixel_values.astype("float32") / 127.5 - 1.0

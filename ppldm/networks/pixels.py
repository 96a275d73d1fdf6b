"""A model of pixels has no autoencoder; this takes its place: `--vae_name_or_path pixels`.

It has no weights. Latents are RGB in -1 .. 1, times `scaling_factor` as of any VAE: as many as the picture has pixels.
"""

from types import SimpleNamespace

import paddle
from ppdiffusers.configuration_utils import ConfigMixin, register_to_config
from ppdiffusers.models.modeling_utils import ModelMixin


class PixelAutoencoder(ModelMixin, ConfigMixin):
    """With the calls and settings of an AutoencoderKL that other code uses; colour_space: only "rgb" is known."""

    @register_to_config
    def __init__(
        self,
        colour_space: str = "rgb",
        in_channels: int = 3,
        out_channels: int = 3,
        latent_channels: int = 3,
        sample_size: int = 32,
        scaling_factor: float = 1.0,
        shift_factor: float | None = None,
        latents_mean: tuple[float, ...] | None = None,
        latents_std: tuple[float, ...] | None = None,
    ):
        super().__init__()

    def encode(self, pixels):
        """[B, 3, H, W] float32 in -1 .. 1 to a posterior at these."""
        return SimpleNamespace(latent_dist=SimpleNamespace(mean=pixels, std=paddle.zeros_like(pixels)))

    def decode(self, latents):
        """The same back."""
        return SimpleNamespace(sample=latents)

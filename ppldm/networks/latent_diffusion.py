"""The latent diffusion model: built components in, loss out.

A batch (`families.ldm` says how it is made) carries everything that is random:

    pixel_values     [B, 3, H, W] uint8, RGB in 0 .. 255
    input_ids        [B, L] int64
    timesteps        [B] int64 in 0 .. num_levels - 1 of the process
    noise            [B, C, h, w] float32, standard normal (plus the noise offset, if any)
    input_noise      the same plus a perturbation: what x_t is made with, where the model asks for it
    posterior_noise  [B, C, h, w] float32, standard normal

Shapes: B samples, C latent channels, h = H / f and w = W / f for a VAE that scales down by f, L tokens.
"""

import paddle
from paddle import nn
from paddle.nn import functional as F

from ..diffusion.process import NoiseSchedule, Process, add_noise, training_target
from .autoencoder import to_unit_range
from .model import Component, Loss, Model, freeze


class LatentDiffusionModel(Model):
    """Frozen VAE, trained text encoder (or frozen) and trained UNet under one loss.

    The state dict has the prefixes `vae.`, `text_encoder.` and `unet.`. `text_encoder.to_logits` is kept for the
    published checkpoints' sake; nothing uses it, so it is not trained.
    """

    def __init__(
        self,
        vae: nn.Layer,
        text_encoder: nn.Layer,
        unet: nn.Layer,
        process: Process,
        freeze_text_encoder: bool = False,
        sampling: dict | None = None,
    ):
        """`sampling`: `diffusion.sampling_settings` that the model came with, for samplers and exports."""
        super().__init__()
        self.vae = vae
        self.text_encoder = text_encoder
        self.unet = unet
        self.process = process
        self.sampling = dict(sampling or {})
        self.freeze_text_encoder = freeze_text_encoder
        self.scaling_factor = float(vae.config.scaling_factor)
        self.register_buffer("alphas_cumprod", paddle.to_tensor(process.schedule.alphas_cumprod()), persistable=False)
        weights = process.loss_weights()
        self.register_buffer("loss_weights", None if weights is None else paddle.to_tensor(weights), persistable=False)
        self.freeze()
        if hasattr(text_encoder, "to_logits"):
            freeze(text_encoder.to_logits)

    @property
    def components(self) -> dict[str, Component]:
        """The VAE, which overflows in half precision; text encoder and UNet, each with a learning rate if wished."""
        trained = not self.freeze_text_encoder
        return {
            "vae": Component(self.vae, trained=False, stays_float32=True),
            "text_encoder": Component(self.text_encoder, trained, "text_encoder", recompute=self._recompute_text),
            "unet": Component(self.unet, True, "unet", recompute=self.unet.enable_gradient_checkpointing),
        }

    def _recompute_text(self) -> None:
        self.text_encoder.model.gradient_checkpointing = True

    @property
    def noise_schedule(self) -> NoiseSchedule:
        """That of the process."""
        return self.process.schedule

    @property
    def prediction_type(self) -> str:
        """That of the process."""
        return self.process.prediction_type

    def process_settings(self) -> dict:
        """With how the model that it came from is sampled."""
        return self.process.settings() | self.sampling

    @paddle.no_grad()
    def encode(self, pixel_values, posterior_noise):
        """[B, 3, H, W] uint8 to scaled latents [B, C, h, w] float32: a sample of the VAE's posterior.

        Runs in float32 outside autocast: half precision overflows in common VAEs.
        """
        with paddle.amp.auto_cast(enable=False):
            posterior = self.vae.encode(to_unit_range(pixel_values)).latent_dist
            return (posterior.mean + posterior.std * posterior_noise) * self.scaling_factor

    @paddle.no_grad()
    def decode(self, latents):
        """Scaled latents [B, C, h, w] to pixels [B, 3, H, W] float32 in -1 .. 1."""
        with paddle.amp.auto_cast(enable=False):
            return self.vae.decode(latents.astype("float32") / self.scaling_factor).sample.clip(-1.0, 1.0)

    def encode_text(self, input_ids):
        """[B, L] int64 to hidden states [B, L, D]. No attention mask: padding is attended to, as published."""
        if self.freeze_text_encoder:
            with paddle.no_grad():
                return self.text_encoder(input_ids)[0]
        return self.text_encoder(input_ids)[0]

    def predict(self, noisy, timesteps, input_ids):
        """The UNet's output [B, C, h, w] for x_t at these timesteps under these captions: all that is trained."""
        return self.unet(noisy, timesteps, encoder_hidden_states=self.encode_text(input_ids)).sample

    def forward(self, pixel_values, input_ids, timesteps, noise, posterior_noise, input_noise=None) -> Loss:
        """Mean squared error between prediction and target, weighted by timestep where asked for.

        With `input_noise`, x_t is made with it and the target with `noise`: input perturbation, Ning et al. 2023
        (arXiv:2301.11706).
        """
        latents = self.encode(pixel_values, posterior_noise)
        alpha_bar = self.alphas_cumprod[timesteps].reshape([-1, 1, 1, 1])
        noisy = add_noise(latents, noise if input_noise is None else input_noise, alpha_bar)
        predict = self.compiled_predict if self.training and self.compiled_predict else self.predict
        predicted = predict(noisy, timesteps, input_ids).astype("float32")
        target = training_target(latents, noise, alpha_bar, self.prediction_type)
        with paddle.no_grad():
            errors = (predicted.detach() - target).square().mean([1, 2, 3])
            levels = timesteps.astype("float32") / self.process.num_levels
        if self.loss_weights is None:
            return Loss(F.mse_loss(predicted, target), errors, levels)
        weighted = self.loss_weights[timesteps] * F.mse_loss(predicted, target, reduction="none").mean([1, 2, 3])
        return Loss(weighted.mean(), errors, levels)

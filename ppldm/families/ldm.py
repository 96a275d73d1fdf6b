"""The latent diffusion model: built parts in, loss out. It draws nothing and never reads the command line.

A batch (see `ppldm.data.dataset`) carries everything that is random:

    pixel_values     [B, 3, H, W] uint8, RGB in 0 .. 255
    input_ids        [B, L] int64
    timesteps        [B] int64 in 0 .. num_train_timesteps - 1
    noise            [B, C, h, w] float32, standard normal (plus the data set's noise offset, if any)
    input_noise      the same plus a perturbation: what x_t is made with, where the model asks for it
    posterior_noise  [B, C, h, w] float32, standard normal

Shapes: B samples, C latent channels, h = H / f and w = W / f for a VAE that scales down by f, L tokens.
"""

import paddle
from paddle import nn
from paddle.nn import functional as F

from ..diffusion.process import PREDICTION_TYPES, NoiseSchedule, add_noise, min_snr_weights, training_target
from .autoencoder import to_unit_range


class LatentDiffusionModel(nn.Layer):
    """Frozen VAE, trained text encoder (or frozen) and trained UNet under one loss.

    The state dict has the prefixes `vae.`, `text_encoder.` and `unet.`. `text_encoder.to_logits` is kept for the
    published checkpoints' sake; nothing uses it, so it is not trained.
    """

    def __init__(
        self,
        vae: nn.Layer,
        text_encoder: nn.Layer,
        unet: nn.Layer,
        noise_schedule: NoiseSchedule,
        prediction_type: str = "epsilon",
        freeze_text_encoder: bool = False,
        snr_gamma: float | None = None,
        perturbed_input: bool = False,
        sampling: dict | None = None,
    ):
        """`snr_gamma` weights the loss by `min_snr_weights`; `perturbed_input` asks batches for `input_noise`;
        `sampling`: `diffusion.sampling_settings` that the model came with, for samplers and exports."""
        super().__init__()
        if prediction_type not in PREDICTION_TYPES:
            raise ValueError(f"prediction_type {prediction_type!r} is not one of {PREDICTION_TYPES}")
        if noise_schedule.rescale_betas_zero_snr and prediction_type == "epsilon":
            raise ValueError("where nothing but noise is left, the noise tells nothing: zero SNR needs v_prediction")
        self.vae = vae
        self.text_encoder = text_encoder
        self.unet = unet
        self.noise_schedule = noise_schedule
        self.prediction_type = prediction_type
        self.sampling = dict(sampling or {})
        self.freeze_text_encoder = freeze_text_encoder
        self.scaling_factor = float(vae.config.scaling_factor)
        self.observer = None  # while training, told of timesteps [B] and the squared error [B] float32 of each sample
        self.compiled_predict = None  # while training, called in the place of `predict`: the same function, compiled
        self.input_names = ("pixel_values", "input_ids", "timesteps", "noise", "posterior_noise")
        if perturbed_input:
            self.input_names += ("input_noise",)
        alphas_cumprod = noise_schedule.alphas_cumprod()
        self.register_buffer("alphas_cumprod", paddle.to_tensor(alphas_cumprod), persistable=False)
        self.snr_gamma = snr_gamma
        if snr_gamma is not None:
            weights = min_snr_weights(alphas_cumprod, snr_gamma, prediction_type)
            self.register_buffer("loss_weights", paddle.to_tensor(weights), persistable=False)
        _freeze(vae)
        if freeze_text_encoder:
            _freeze(text_encoder)
        elif hasattr(text_encoder, "to_logits"):
            _freeze(text_encoder.to_logits)

    def train(self):
        """Training mode for the trained parts; the frozen ones stay in evaluation mode."""
        super().train()
        self.vae.eval()
        if self.freeze_text_encoder:
            self.text_encoder.eval()
        return self

    def trained_parameters(self) -> dict:
        """Name to parameter, in the order of the state dict, of everything the optimizer changes."""
        return {name: p for name, p in self.named_parameters() if not p.stop_gradient}

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

    def forward(self, pixel_values, input_ids, timesteps, noise, posterior_noise, input_noise=None):
        """Mean squared error between prediction and target, weighted by timestep where asked for, float32 scalar.

        With `input_noise`, x_t is made with it and the target with `noise`: input perturbation, Ning et al. 2023
        (arXiv:2301.11706).
        """
        latents = self.encode(pixel_values, posterior_noise)
        alpha_bar = self.alphas_cumprod[timesteps].reshape([-1, 1, 1, 1])
        noisy = add_noise(latents, noise if input_noise is None else input_noise, alpha_bar)
        predict = self.compiled_predict if self.training and self.compiled_predict else self.predict
        predicted = predict(noisy, timesteps, input_ids)
        target = training_target(latents, noise, alpha_bar, self.prediction_type)
        self._tell_observer(timesteps, predicted, target)
        if self.snr_gamma is None:
            return F.mse_loss(predicted.astype("float32"), target)
        errors = F.mse_loss(predicted.astype("float32"), target, reduction="none").mean([1, 2, 3])
        return (self.loss_weights[timesteps] * errors).mean()

    @paddle.no_grad()
    def _tell_observer(self, timesteps, predicted, target) -> None:
        if self.observer is not None and self.training:
            errors = (predicted.detach().astype("float32") - target).square().mean([1, 2, 3])
            self.observer(timesteps, errors)


def _freeze(layer: nn.Layer) -> None:
    layer.eval()
    for parameter in layer.parameters():
        parameter.stop_gradient = True

"""The latent diffusion model: built components in, loss out.

A batch carries everything that is random, for B samples, C latent channels, h = H / f and w = W / f of a VAE that
scales down by f, and L tokens:

    pixel_values     [B, 3, H, W] uint8, RGB in 0 .. 255; or
    moments          [B, 2, C, h, w] float32, mean and standard deviation of the VAE's posterior, computed ahead; of
                     rows without: pixel_values [M, 3, H, W], or [B, 3, H, W] where other rows are not looked at, and
    uncached         [M, 4] int64, their places in the batch, and by what they are known to `keep_moments`
    input_ids        [B, L] int64
    text_embeddings  [B, L, D] float32, where the text encoder is frozen: its hidden states, computed ahead
    timesteps        [B] int64 in 0 .. num_levels - 1 of the process
    noise            [B, C, h, w] float32, standard normal (plus the noise offset, if any)
    input_noise      the same plus a perturbation: what x_t is made with, where the model asks for it
    posterior_noise  [B, C, h, w] float32, standard normal, but of pixels in place of a VAE, which have no posterior
    sizes            [B, 6] int64, `data.inputs.Sizes`, where the UNet takes them
"""

from contextlib import nullcontext

import paddle
from paddle import nn

from ..diffusion.process import Process
from .configs import downscale_factor, pooled_width, takes_mask
from .denoising import DenoisingModel
from .model import Component, LatentMap, Loss, freeze, hidden_states, to_unit_range, token_mask

PICTURES = ("pixel_values", "moments", "uncached")  # inputs of which latents are made


class LatentDiffusionModel(DenoisingModel):
    """Frozen VAE, trained text encoder (or frozen) and trained UNet, or what a subclass has in its place, under one
    loss. `text_encoder.to_logits` is kept for published checkpoints, and not trained. mask_behind: the id of the token
    that ends a caption, where attention is to ignore what stands behind it (`--mask_pad_tokens`)."""

    autoencoder = "vae"
    denoiser_name = "unet"
    words = "encoder_hidden_states"
    mask_behind: int | None = None

    def __init__(self, process: Process, sampling: dict | None = None, frozen: bool = False, **parts: nn.Layer):
        """`sampling`: what the model came with, for samplers and exports. frozen: the text encoder. parts: by name."""
        super().__init__(process, **parts, freeze_text_encoder=frozen)
        self.sampling = dict(sampling or {})
        self.latent_map = LatentMap.of(self.vae.config)
        if hasattr(getattr(self, "text_encoder", None), "to_logits"):
            freeze(self.text_encoder.to_logits)

    def read_by(self, tokenizer, mask_pad_tokens: bool, empty_caption: str) -> None:
        """Take the tokens of this tokenizer; the others are settings of that name."""
        self.mask_behind = tokenizer.end_id if mask_pad_tokens else None
        self.empty_end = (tokenizer.start, tokenizer.end_id) if empty_caption == "zeros" else None

    @property
    def takes_mask(self) -> bool:
        """Whether the UNet is made for inpainting."""
        return self.denoiser_name == "unet" and takes_mask(self.denoiser.config, self.vae.config.latent_channels)

    @property
    def caption_encoder(self) -> str | None:
        """The text encoder, if it is frozen."""
        return "text_encoder" if self.freeze_text_encoder else None

    @property
    def networks(self) -> dict[str, Component]:
        """The VAE, which overflows in half precision; text encoder and UNet, each with a learning rate if wished."""
        trained = not self.freeze_text_encoder
        return {
            "vae": Component(self.vae, trained=False, stays_float32=True),
            "text_encoder": Component(self.text_encoder, trained, "text_encoder", recompute=self._recompute_text),
            self.denoiser_name: Component(
                self.denoiser, True, self.denoiser_name, recompute=self.denoiser.enable_gradient_checkpointing
            ),
        }

    def _recompute_text(self) -> None:
        if hasattr(self.text_encoder, "to_logits"):  # LDMBert
            self.text_encoder.model.gradient_checkpointing = True
        else:
            self.text_encoder.gradient_checkpointing_enable()

    def process_settings(self) -> dict:
        """With how the model that it came from is sampled."""
        return self.process.settings() | self.sampling

    @paddle.no_grad()
    def latents(self, posterior_noise=None, pixel_values=None, moments=None, uncached=None):
        """Samples [B, C, h, w] of the posterior, mapped, of pixels or moments; VAEs overflow in half precision."""
        if moments is None:
            with paddle.amp.auto_cast(enable=False):
                posterior = self.vae.encode(to_unit_range(pixel_values)).latent_dist
                noise = 0.0 if posterior_noise is None else posterior.std * posterior_noise
                return self.latent_map.to_model(posterior.mean + noise)
        mean, std = self.whole_moments(pixel_values, moments, uncached).unbind(1)
        return self.latent_map.to_model(mean + std * posterior_noise)

    @paddle.no_grad()
    def decode(self, latents):
        """Such latents [B, C, h, w] to pixels [B, 3, H, W] float32 in -1 .. 1."""
        with paddle.amp.auto_cast(enable=False):
            latents = self.latent_map.to_autoencoder(latents.astype("float32"))
            return self.vae.decode(latents).sample.clip(-1.0, 1.0)

    def encode_text(self, input_ids, text_embeddings=None):
        """[B, L] int64 to hidden states [B, L, D]: `text_embeddings` where they are there."""
        hidden = text_embeddings
        if hidden is None:
            with paddle.no_grad() if self.freeze_text_encoder else nullcontext():
                hidden = hidden_states(self.text_encoder, input_ids, self.mask_behind)
        if self.empty_end is None:
            return hidden
        place, end = self.empty_end
        return hidden * (input_ids[:, place] != end).astype(hidden.dtype).reshape([-1, 1, 1])

    def condition(self, input_ids, text_embeddings=None) -> dict:
        """What the UNet takes of captions [B, L], by the names of its arguments: hidden states, and a mask or None."""
        return {
            "encoder_hidden_states": self.encode_text(input_ids, text_embeddings),
            "encoder_attention_mask": token_mask(input_ids, self.mask_behind),
        }

    def size_condition(self, sizes) -> dict:
        """What the UNet takes of sizes [B, 6], by the names of its arguments; nothing of None."""
        if sizes is None:
            return {}
        # In the place of SDXL's pooled embedding of the caption stands one of no numbers.
        return {"added_cond_kwargs": {"text_embeds": paddle.zeros([sizes.shape[0], 0]), "time_ids": sizes}}

    def drawn_sizes(self, latents) -> dict:
        """`size_condition` of pictures drawn as `latents`: uncropped; nothing where the UNet takes none."""
        if pooled_width(self.denoiser.config) is None:
            return {}
        size = [side * downscale_factor(self.vae.config) for side in latents.shape[2:]]
        return self.size_condition(paddle.to_tensor([[*size, 0, 0, *size]] * latents.shape[0]))

    def predict(self, noisy, timesteps, input_ids, sizes=None, text_embeddings=None):
        """The UNet's output [B, C, h, w] for x_t at these timesteps under these captions: all that is trained."""
        return self.denoise(
            noisy, timesteps, **self.condition(input_ids, text_embeddings), **self.size_condition(sizes)
        )

    def denoise(self, noisy, timesteps, *, by=None, **condition):
        """The UNet's output [B, C, h, w] for x_t, under what `condition` and `size_condition` give. by: another one."""
        return (by or self.denoiser)(noisy, timesteps, **condition).sample

    def forward(self, input_ids, timesteps, noise, posterior_noise=None, input_noise=None, seen=None, **told) -> Loss:
        """The `denoising_loss` of latents under captions. told: what `latents` and `predict` take besides, by name."""
        pictures = {name: told.pop(name) for name in PICTURES if name in told}
        latents = self.latents(posterior_noise, **pictures)
        predict = self.compiled_predict if self.training and self.compiled_predict else self.predict

        def predicted(noisy, level):
            return predict(noisy, self.process.times(timesteps, level), input_ids, **told)

        all_told = {"input_ids": input_ids, **told}
        return self.denoising_loss(predicted, latents, timesteps, noise, input_noise, seen, all_told)

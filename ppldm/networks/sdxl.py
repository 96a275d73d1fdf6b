"""Stable Diffusion XL (arXiv:2307.01952, section 2.2), as diffusers' StableDiffusionXLPipeline conditions it. A batch
always has `sizes`, and tokens as of `several_texts`, beside what `latent_diffusion` says."""

from .latent_diffusion import LatentDiffusionModel
from .several_texts import SeveralTextEncoders


class SDXLDiffusionModel(SeveralTextEncoders, LatentDiffusionModel):
    """Its state has the prefixes `vae.`, `text_encoder.`, `text_encoder_2.` and `unet.`."""

    def condition(self, input_ids, text_embeddings=None) -> dict:
        """Of the tokens of both text encoders [B, N], or of what was kept of them: hidden states [B, L, D], and the
        state of the whole caption, pooled [B, P]."""
        told = self.told_of(input_ids, text_embeddings)
        return {"encoder_hidden_states": told["hidden"], "pooled": told["pooled"]}

    def size_condition(self, sizes) -> dict:
        """Sizes [B, 6], which every picture has."""
        return {"sizes": sizes}

    def denoise(self, noisy, timesteps, *, by=None, pooled, sizes, **condition):
        """The UNet's output [B, C, h, w]. In float32, whose type it gives sinusoids of sizes before it embeds them."""
        told = {"text_embeds": pooled.astype("float32"), "time_ids": sizes}
        return super().denoise(noisy, timesteps, by=by, added_cond_kwargs=told, **condition)

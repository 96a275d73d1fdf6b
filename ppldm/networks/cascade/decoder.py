"""Stage B of Stable Cascade: a network that draws the latents of stage A by a picture's small latents.

A batch (`families.cascade_decoder` says how it is made) carries everything that is random:

    pixel_values   [B, 3, H, W] uint8, RGB in 0 .. 255
    input_ids      [B, L] int64
    text_embeddings  [B, L + 1, D] float32, computed ahead, as of stage C
    timesteps      [B] int64 in 0 .. num_levels - 1 of the process
    noise          [B, C, H / 4, W / 4] float32, `data.inputs.Pyramid`
    effnet_resize  [B] float32, uniform in 0 .. 1: at which size the EfficientNet sees the picture
    effnet_drop    [B] float32, uniform in 0 .. 1: whether the network is told what that saw

As in its published trainer, the EfficientNet sees a picture at 0.5 to 1 times its sides, and for 10 % of the samples
its latents are zeros.
"""

from dataclasses import replace

import paddle
from paddle import nn

from ...diffusion.drawing import USUAL
from ...diffusion.process import Process
from ..configs import EFFNET_FACTOR
from ..model import Component, Loss
from .blocks import resize
from .stage import CascadeModel

_SMALLEST, _DROPPED = 0.5, 0.1


class CascadeDecoderModel(CascadeModel):
    """Stage B. The state dict has the prefixes `effnet.`, `text_encoder.`, `vqgan.` and `decoder.`."""

    led_by = "pixel_values"
    coarse_noise = True  # as it learns to take away
    usual = replace(USUAL, guidance_scale=1.0)  # as diffusers' pipeline

    def __init__(self, effnet: nn.Layer, text_encoder: nn.Layer, vqgan: nn.Layer, decoder: nn.Layer, process: Process):
        super().__init__(effnet, text_encoder, process)
        self.vqgan = vqgan
        self.decoder = decoder
        self.scale_factor = float(vqgan.config.scale_factor)
        self.freeze()

    @property
    def denoiser(self) -> nn.Layer:
        """Stage B."""
        return self.decoder

    @property
    def networks(self) -> dict[str, Component]:
        """The frozen ones, stage A in float32, and the network that is trained."""
        recompute = self.decoder.enable_gradient_checkpointing
        return {
            **self.frozen,
            "vqgan": Component(self.vqgan, trained=False, stays_float32=True),
            "decoder": Component(self.decoder, True, "decoder", recompute=recompute),
        }

    def condition(self, input_ids, text_embeddings=None) -> dict:
        """What the network is told of captions [B, L]: their pooled state."""
        return {"clip_text_pooled": self.embed_captions(input_ids, text_embeddings)[1]}

    def lead(self, pictures) -> dict:
        """With what [B, 3, H, W] uint8 lead what is drawn: their small latents."""
        return {"effnet": self.small_latents(pictures)}

    def without_lead(self, value):
        """Zeros, as of the samples that were not led."""
        return paddle.zeros_like(value)

    @paddle.no_grad()
    def latents(self, pixel_values):
        """What the network learns to draw of [B, 3, H, W] uint8: what stage A makes of it, not quantised, over its
        scale factor; [B, C, H / 4, W / 4] float32, outside autocast."""
        with paddle.amp.auto_cast(enable=False):
            return self.vqgan.encode(pixel_values.astype("float32") / 255.0).latents / self.scale_factor

    @paddle.no_grad()
    def decode(self, latents):
        """Latents [B, C, h, w] to pixels [B, 3, 4 h, 4 w] float32 in -1 .. 1."""
        with paddle.amp.auto_cast(enable=False):
            pixels = self.vqgan.decode(latents.astype("float32") * self.scale_factor).sample
            return pixels.clip(0.0, 1.0) * 2.0 - 1.0

    @paddle.no_grad()
    def drawn_small_latents(self, pixel_values, effnet_resize, effnet_drop, grid):
        """What the network is told of [B, 3, H, W] uint8: small latents at drawn sizes, or zeros, on its `grid` (h, w).

        A picture is resized to multiples of 32 pixels, of each the nearest before it. What embeds the latents looks at
        one place at a time, so that they may be brought to one grid before it.
        """
        shares, found = (_SMALLEST + (1.0 - _SMALLEST) * effnet_resize).tolist(), []
        for picture, share, dropped in zip(pixel_values, shares, (effnet_drop < _DROPPED).tolist(), strict=True):
            if dropped:
                found.append(paddle.zeros([1, self.effnet.config.latent_channels, *grid]))
            else:
                found.append(resize(self.small_latents(_shrink(picture.astype("float32"), share)[None]), grid))
        return paddle.concat(found)

    def forward(
        self,
        pixel_values,
        input_ids,
        timesteps,
        noise,
        effnet_resize,
        effnet_drop,
        text_embeddings=None,
        input_noise=None,
    ) -> Loss:
        """The `denoising_loss` of the pictures' latents of stage A."""
        grid = [side // self.decoder.config.patch_size for side in noise.shape[2:]]
        effnet = self.drawn_small_latents(pixel_values, effnet_resize, effnet_drop, grid)
        condition = {**self.condition(input_ids, text_embeddings), "effnet": effnet}
        return self.loss_under(condition, self.latents(pixel_values), timesteps, noise, input_noise)


def _shrink(picture, share: float):
    """[3, H, W] to `share` of its sides, rounded down to multiples of 32."""
    for axis in (1, 2):
        side = picture.shape[axis]
        new = max(1, int(side * share) // EFFNET_FACTOR) * EFFNET_FACTOR
        picture = picture.index_select(paddle.arange(new) * side // new, axis)
    return picture

"""Stages C and B of Stable Cascade as they are trained: C draws the small latents of a picture by its caption, B those
of stage A by these. A batch (`families.cascade`), on a grid h, w of H / 32 for stage C, of H / 4 for stage B:

    pixel_values     [B, 3, H, W] uint8; or for C `moments` and `uncached` as in `latent_diffusion`
    input_ids        [B, L] int64
    text_embeddings  [B, L + 1, D] float32, computed ahead: what the text encoder makes of these (`embed_captions`)
    timesteps        [B] int64 in 0 .. num_levels - 1 of the process
    noise            [B, C, h, w] float32; of B `data.inputs.Pyramid`
    clip_image       [B] float32, uniform in 0 .. 1, of C with an image encoder: whether it is told of the picture
    effnet_resize    [B] float32, uniform in 0 .. 1, of B: at which size the EfficientNet sees the picture
    effnet_drop      [B] float32, uniform in 0 .. 1, of B: whether the network is told what that saw

As in the published trainers, C is told of the picture for 10 % of the samples, and else zeros; the EfficientNet sees a
picture of B at 0.5 to 1 times its sides, and for 10 % of the samples its latents are zeros.
"""

from dataclasses import replace

import paddle
from paddle import nn
from paddle.nn import functional as F

from ...diffusion.drawing import USUAL
from ...diffusion.process import Process
from ...utils.pictures import bicubic_filter
from ..configs import EFFNET_FACTOR
from ..denoising import DenoisingModel
from ..latent_diffusion import PICTURES
from ..model import Component, Loss, projected_caption
from .unet import resize

_MEAN, _STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # of OpenAI's pixels in 0 .. 1
_TOLD = 0.1  # the share of the samples for which stage C is told of the picture
_SMALLEST, _DROPPED = 0.5, 0.1  # of stage B: the smallest share of the sides, and how often it is told nothing


class CascadeModel(DenoisingModel):
    """Both stages. frozen: what may be beside what is trained. end_id: of a caption's last token."""

    caption_encoder = "text_encoder"
    frozen: tuple[str, ...] = ("effnet", "text_encoder")
    end_id: int

    def __init__(self, process: Process, **parts: nn.Layer):
        super().__init__(process, **parts)
        self.register_buffer("ratios", paddle.to_tensor(process.schedule.ratios(), "float32"), persistable=False)

    @property
    def networks(self) -> dict[str, Component]:
        """What makes latents stays in float32."""
        recompute = self.denoiser.enable_gradient_checkpointing
        return {
            **{
                name: Component(getattr(self, name), False, stays_float32=name in ("effnet", "vqgan"))
                for name in self.frozen
                if hasattr(self, name)
            },
            self.denoiser_name: Component(self.denoiser, True, self.denoiser_name, recompute=recompute),
        }

    @paddle.no_grad()
    def small_latents(self, pixel_values):
        """[B, 3, H, W] uint8 to the EfficientNet's latents [B, 16, H / 32, W / 32] float32, outside autocast."""
        with paddle.amp.auto_cast(enable=False):
            return self.effnet(pixel_values.astype("float32") / 255.0)

    def embed_captions(self, input_ids, text_embeddings=None):
        """`projected_caption` of [B, L] int64, or of `text_embeddings` [B, L + 1, D], which is it, joined."""
        if text_embeddings is not None:
            return text_embeddings[:, :-1], text_embeddings[:, -1:, : self.text_encoder.config.projection_dim]
        return projected_caption(self.text_encoder, input_ids, self.end_id)

    def denoise(self, noisy, timesteps, **condition):
        """The network's output for x_t at timesteps [B] int64, or one for all, under what `condition` gives."""
        return self.denoiser(noisy, self.ratios[timesteps].expand([len(noisy)]), **condition)

    def loss_under(self, condition: dict, latents, timesteps, *noises) -> Loss:
        """The `denoising_loss` of latents, of the network's arguments `condition`."""
        return self.denoising_loss(
            lambda noisy, _: self.denoise(noisy, timesteps, **condition), latents, timesteps, *noises
        )


class CascadePriorModel(CascadeModel):
    """Stage C. Its state has the prefixes `effnet.`, `text_encoder.`, `prior.` and, with one, `image_encoder.`."""

    autoencoder = "effnet"
    denoiser_name = "prior"
    frozen = (*CascadeModel.frozen, "image_encoder")
    previewer: tuple = ()  # a `Previewer`, out of Paddle's sight: it is no part of the model

    def condition(self, input_ids, text_embeddings=None) -> dict:
        """What the network is told of captions [B, L], and of no picture."""
        words, pooled = self.embed_captions(input_ids, text_embeddings)
        width = self.prior.config.clip_image_in_channels
        return {
            "clip_text": words,
            "clip_text_pooled": pooled,
            "clip_img": paddle.zeros([len(words), 1, width], words.dtype),
        }

    @paddle.no_grad()
    def drawn_pictures(self, pixel_values, clip_image):
        """What the network is told of pictures: [B, 1, I] float32, zeros but where `clip_image` says so."""
        told = paddle.zeros([len(pixel_values), 1, self.prior.config.clip_image_in_channels])
        kept = (clip_image < _TOLD).nonzero().flatten()
        if len(kept):
            pixels = pixel_values.astype("float32").index_select(kept)
            told = paddle.scatter(told, kept, embed_pictures(self.image_encoder, pixels).astype("float32")[:, None])
        return told

    def latents(self, pixel_values=None, moments=None, uncached=None):
        """What the network learns to draw of a batch that has pixels or moments, or some of each."""
        if moments is None:
            return self.small_latents(pixel_values)
        return self.whole_moments(pixel_values, moments, uncached)[:, 0]

    @paddle.no_grad()
    def decode(self, latents):
        """Latents of variance 1 as something to look at, [B, 3, 32 h, 32 w] in -1 .. 1: what the previewer makes of
        them, or three channels as colours."""
        shown = (latents[:, :3].astype("float32") / 3.0).clip(-1.0, 1.0)
        for previewer in self.previewer:
            with paddle.amp.auto_cast(enable=False):
                shown = previewer(latents.astype("float32")).clip(0.0, 1.0) * 2.0 - 1.0
        return F.interpolate(shown, scale_factor=EFFNET_FACTOR * latents.shape[2] // shown.shape[2], mode="nearest")

    def forward(self, input_ids, timesteps, noise, text_embeddings=None, input_noise=None, clip_image=None, **lead):
        """The `denoising_loss` of the pictures' latents. lead: these, and what leads a subclass."""
        pictures = {name: lead.pop(name) for name in PICTURES if name in lead}
        latents = self.latents(**pictures)
        condition = self.condition(input_ids, text_embeddings) | lead
        if clip_image is not None:
            told = self.drawn_pictures(pictures["pixel_values"], clip_image)
            condition["clip_img"] = told.astype(condition["clip_img"].dtype)
        return self.loss_under(condition, latents, timesteps, noise, input_noise)


@paddle.no_grad()
def embed_pictures(image_encoder: nn.Layer, pixels):
    """[B, 3, H, W] in 0 .. 255 to projected embeddings [B, D]."""
    return image_encoder(clip_pixels(pixels, image_encoder.config.image_size)).image_embeds


def clip_pixels(pixels, side: int):
    """[B, 3, H, W] in 0 .. 255 to float32 [B, 3, side, side] as CLIP takes it: resized, its middle, normalised."""
    height, width = pixels.shape[2:]
    shorter = min(height, width)
    with paddle.amp.auto_cast(enable=False):
        filters = []
        for old in (height, width):  # the middle `side` of the numbers that a line is resized to
            first = round((side * old // shorter - side) / 2)
            filters.append(paddle.to_tensor(bicubic_filter(old, side * old // shorter)[first : first + side]))
        rows, columns = filters
        mean, std = (paddle.to_tensor(one, "float32").reshape([3, 1, 1]) for one in (_MEAN, _STD))
        return (rows @ (pixels.astype("float32") / 255.0) @ columns.T - mean) / std


class CascadeDecoderModel(CascadeModel):
    """Stage B. The state dict has the prefixes `effnet.`, `text_encoder.`, `vqgan.` and `decoder.`."""

    denoiser_name = "decoder"
    frozen = (*CascadeModel.frozen, "vqgan")
    led_by = "pixel_values"
    coarse_noise = True  # as it learns to take away
    usual = replace(USUAL, guidance_scale=1.0)  # as diffusers' pipeline

    @property
    def scale_factor(self) -> float:
        """By which latents of stage A are divided."""
        return float(self.vqgan.config.scale_factor)

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
        """What stage A makes of [B, 3, H, W] uint8, not quantised, over its scale factor; float32 outside autocast."""
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
        """What the network is told of [B, 3, H, W] uint8: small latents of pictures at drawn sizes, multiples of 32
        pixels, or zeros, brought to its `grid` (h, w): what embeds them looks at one place at a time."""
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

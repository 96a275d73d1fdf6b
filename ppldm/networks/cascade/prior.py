"""Stage C of Stable Cascade: a network that draws the small latents of a picture by its caption.

A batch (`families.cascade_prior` says how it is made) carries everything that is random:

    pixel_values  [B, 3, H, W] uint8, RGB in 0 .. 255; or, without an image encoder,
    moments       [B, 2, C, H / 32, W / 32] float32, the small latents of the picture and zeros, computed ahead; with
    uncached      as in `latent_diffusion`
    input_ids     [B, L] int64
    text_embeddings  [B, L + 1, D] float32, computed ahead: what the text encoder makes of these (`captions`)
    timesteps     [B] int64 in 0 .. num_levels - 1 of the process
    noise         [B, C, H / 32, W / 32] float32
    clip_image    [B] float32, uniform in 0 .. 1, with an image encoder: whether the network is told of the picture

As in its published trainer, it is told of the picture for 10 % of the samples, and else zeros; without an image encoder
always zeros.

CLIP's image encoder takes pictures of any size.
"""

import paddle
from paddle import nn
from paddle.nn import functional as F

from ...diffusion.process import Process
from ...utils.pictures import bicubic_filter
from ..configs import EFFNET_FACTOR
from ..model import Component, Loss
from .stage import CascadeModel

_MEAN, _STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # of OpenAI's pixels in 0 .. 1
_KEPT = 0.1


@paddle.no_grad()
def embed_pictures(image_encoder: nn.Layer, pixels):
    """[B, 3, H, W] in 0 .. 255 to projected embeddings [B, D]."""
    return image_encoder(clip_pixels(pixels, image_encoder.config.image_size)).image_embeds


def clip_pixels(pixels, side: int):
    """[B, 3, H, W] in 0 .. 255 to float32 [B, 3, side, side], as CLIP takes it: the shorter side resized by a bicubic
    filter that does not alias, the middle of that, normalised."""
    height, width = pixels.shape[2:]
    shorter = min(height, width)
    with paddle.amp.auto_cast(enable=False):
        rows, columns = (_middle(old, side * old // shorter, side) for old in (height, width))
        mean, std = (paddle.to_tensor(one, "float32").reshape([3, 1, 1]) for one in (_MEAN, _STD))
        return (rows @ (pixels.astype("float32") / 255.0) @ columns.T - mean) / std


def _middle(old: int, new: int, side: int):
    """float32 [side, old]: the middle `side` of the `new` numbers that a line of `old` is resized to."""
    first = round((new - side) / 2)
    return paddle.to_tensor(bicubic_filter(old, new)[first : first + side])


class CascadePriorModel(CascadeModel):
    """Stage C. The state dict has the prefixes `effnet.`, `text_encoder.`, `prior.` and, where there is one,
    `image_encoder.`."""

    autoencoder = "effnet"

    def __init__(
        self,
        effnet: nn.Layer,
        text_encoder: nn.Layer,
        prior: nn.Layer,
        process: Process,
        image_encoder: nn.Layer | None = None,
        **further: nn.Layer,
    ):
        """further: components of a subclass, by name."""
        super().__init__(effnet, text_encoder, process)
        self.prior = prior
        self.image_encoder = image_encoder
        for name, layer in further.items():
            setattr(self, name, layer)
        self.freeze()

    @property
    def denoiser(self) -> nn.Layer:
        """Stage C."""
        return self.prior

    @property
    def networks(self) -> dict[str, Component]:
        """The frozen ones, and the network that is trained."""
        recompute = self.prior.enable_gradient_checkpointing
        own = {} if self.image_encoder is None else {"image_encoder": Component(self.image_encoder, trained=False)}
        return {**self.frozen, **own, "prior": Component(self.prior, True, "prior", recompute=recompute)}

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
        """What the network is told of pictures [B, 3, H, W] uint8: [B, 1, I] float32, zeros but where `clip_image` says
        so."""
        told = paddle.zeros([len(pixel_values), 1, self.prior.config.clip_image_in_channels])
        kept = (clip_image < _KEPT).nonzero().flatten()
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
        """Latents [B, C, h, w], whose variance is about 1, as something to look at, [B, 3, 32 h, 32 w] in -1 .. 1:
        their first three channels as red, green and blue."""
        shown = (latents[:, :3].astype("float32") / 3.0).clip(-1.0, 1.0)
        return F.interpolate(shown, scale_factor=EFFNET_FACTOR, mode="nearest")

    def forward(
        self,
        input_ids,
        timesteps,
        noise,
        text_embeddings=None,
        pixel_values=None,
        moments=None,
        uncached=None,
        input_noise=None,
        clip_image=None,
        **lead,
    ) -> Loss:
        """The `denoising_loss` of the pictures' latents. lead: of a subclass that is led by pictures."""
        pictures = {"pixel_values": pixel_values, "moments": moments, "uncached": uncached}
        latents = self.latents(**{name: one for name, one in pictures.items() if one is not None})
        condition = self.condition(input_ids, text_embeddings) | lead
        if clip_image is not None:
            condition["clip_img"] = self.drawn_pictures(pixel_values, clip_image).astype(condition["clip_img"].dtype)
        return self.loss_under(condition, latents, timesteps, noise, input_noise)

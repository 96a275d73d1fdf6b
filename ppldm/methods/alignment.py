"""Alignment of hidden states to features of the clean picture, as the autoencoder has them.

    loss + weight * mean over places of (1 - cos(projector(hidden), features))

REPA (Yu et al. 2024, arXiv:2410.06940) aligns to a network from outside (DINOv2; published: 17.5 times
faster than SiT, FID 1.42). Here the features are those of the frozen autoencoder that is there anyway, what the middle
of its decoder makes of the clean latents (arXiv:2601.17830; published: as fast as such methods at 4 % more operations).
As in iREPA (arXiv:2512.10794), the projector is a convolution, and features lose most of their mean over the picture.
Hidden states are those of the middle of the UNet, and features are averaged down to their sides.
"""

from dataclasses import dataclass

from .base import Method

_MEAN_LOST = 0.6  # of the mean over the picture; ours: the authors' code takes any share, 1 by default
_TAP = "alignment"


@dataclass(frozen=True)
class Alignment(Method):
    """weight: of the term; REPA's is 0.5."""

    weight: float = 0.5
    denoisers = ("unet",)
    unsupported = ("to_static",)  # where nobody sees hidden states

    def problem(self, config):
        return None if self.weight > 0 else f"weight {self.weight:g} must be above 0"

    def attach(self, model, seed):
        from .parts import keep_output, make_projector

        keep_output(model.unet.mid_block, model.taps, _TAP)
        width, features = model.unet.config.block_out_channels[-1], model.vae.config.block_out_channels[-1]
        return {"alignment_projector": make_projector(width, features, seed)}

    def term(self, model, step):
        from paddle.nn import functional as F

        hidden = model.alignment_projector(model.taps.pop(_TAP).astype("float32"))
        features = F.adaptive_avg_pool2d(self._features(model, step.latents), hidden.shape[2:])
        return self.weight * (1.0 - F.cosine_similarity(hidden, features, axis=1).mean())

    def _features(self, model, latents):
        """[B, F, h, w] float32 of clean latents [B, C, h, w], normalised over each picture."""
        import paddle

        with paddle.no_grad(), paddle.amp.auto_cast(enable=False):
            vae = model.vae
            hidden = vae.decoder.conv_in(vae.post_quant_conv(model.latent_map.to_autoencoder(latents)))
            hidden = vae.decoder.mid_block(hidden)
            hidden = hidden - _MEAN_LOST * hidden.mean([2, 3], keepdim=True)
            return hidden / (hidden.std([2, 3], keepdim=True) + 1e-6)


METHOD = Alignment

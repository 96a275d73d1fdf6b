"""Alignment of hidden states to features of the clean picture, as a frozen network has them.

    loss + weight * mean over places of (1 - cos(projector(hidden), features))

REPA (Yu et al. 2024, arXiv:2410.06940) aligns a transformer to DINOv2; published: 17.5 times faster than SiT, FID 1.42.
`features=FOLDER` does so. Without it the features are those of the frozen autoencoder that is there anyway, what the
middle of its decoder makes of the clean latents (arXiv:2601.17830; published: as fast as such methods at 4 % more
operations). As in iREPA (arXiv:2512.10794), the projector is a convolution, and features lose most of their mean over
the picture. Hidden states are those of the middle of a UNet or a transformer, or behind one of its blocks, and features
are averaged down to their sides.
"""

from dataclasses import dataclass
from pathlib import Path

from ..utils.errors import ConfigError
from .base import Method

_MEAN_LOST = 0.6  # of the mean over the picture; ours: the authors' code takes any share, 1 by default
_TAP, _NETWORK, _PIXELS = "alignment", "alignment_network", "alignment_pixels"
_OWN = "autoencoder"


@dataclass(frozen=True)
class Alignment(Method):
    """weight: of the term; REPA's is 0.5. features: of the autoencoder, or of the DINOv2 in a file or folder. block: of
    a transformer, behind which hidden states are taken, counted from 1; 0: in the middle."""

    weight: float = 0.5
    features: str = _OWN
    block: int = 0
    denoisers = ("unet", "transformer")

    def problem(self, config):
        if self.weight <= 0:
            return f"weight {self.weight:g} must be above 0"
        if self.features != _OWN and not Path(self.features).expanduser().exists():
            return f"features {self.features} is not there; give a file or folder with the weights of DINOv2"
        if getattr(config, "patch_masking", 0):
            return "--patch_masking leaves patches out; omit either"
        if any(word.partition(":")[0] == "tread" for word in config.methods):
            return "tread leads patches around the blocks in the middle; omit either"
        if self.block < 0 or (self.block and config.denoiser == "unet"):
            return f"block {self.block} is not one of a {config.denoiser}; omit it"
        return None

    def unsupported(self, config):
        """Where nobody sees hidden states, or where a block's are computed without their gradients."""
        return ("to_static",) if config.denoiser == "unet" else ("to_static", "recompute")

    def inputs(self, model):
        from ..data.inputs import Control

        if self.features == _OWN:
            return {}
        if any(isinstance(one, Control) for one in model.inputs.values()):
            raise ConfigError("--methods alignment:features=… cannot be where control images are read; omit features")
        return {_PIXELS: Control(Crop())}

    def attach(self, model, seed):
        from ..networks.configs import is_pixels
        from ..networks.model import Component, freeze
        from .parts import blocks_of, keep_output, make_projector, width_of

        if model.denoiser_name == "unet":
            layer, width = model.unet.mid_block, model.unet.config.block_out_channels[-1]
        else:
            blocks = blocks_of(model.transformer)
            if self.block > len(blocks):
                raise ConfigError(
                    f"--methods alignment:block={self.block}: the transformer has {len(blocks)}; lower it"
                )
            layer, width = blocks[(self.block or (len(blocks) + 1) // 2) - 1], width_of(model.transformer)
        keep_output(layer, model.taps, _TAP)
        if self.features != _OWN:
            from ..weights.losses import load_dinov2

            model.taps[_NETWORK] = network = load_dinov2(self.features)
            freeze(network)
            features = network.config["width"]
        elif is_pixels(model.vae.config):
            raise ConfigError("--methods alignment: pixels have no VAE with features; give features=FOLDER of DINOv2")
        else:
            features = model.vae.config.block_out_channels[-1]
        return {"alignment_projector": Component(make_projector(width, features, seed), trained=True)}

    def term(self, model, step):
        from paddle.nn import functional as F

        hidden = model.alignment_projector(self._hidden(model, step.latents.shape).astype("float32"))
        features = F.adaptive_avg_pool2d(self._features(model, step.latents), hidden.shape[2:])
        return self.weight * (1.0 - F.cosine_similarity(hidden, features, axis=1).mean())

    def _hidden(self, model, shape):
        """[B, width, h, w]; of a transformer's tokens, those of patches."""
        found = model.taps.pop(_TAP)
        if model.denoiser_name == "unet":
            return found
        sides = [side // model.transformer.config.patch_size for side in shape[2:]]
        return found[:, -sides[0] * sides[1] :].transpose([0, 2, 1]).reshape([shape[0], -1, *sides])

    def _features(self, model, latents):
        """[B, F, h, w] float32 of clean latents [B, C, h, w], normalised over each picture."""
        import paddle

        with paddle.no_grad(), paddle.amp.auto_cast(enable=False):
            if self.features == _OWN:
                hidden, decoder = model.latent_map.to_autoencoder(latents), model.vae.decoder
                if convolution := model.vae.post_quant_conv:
                    hidden = convolution(hidden)
                hidden = decoder.mid_block(decoder.conv_in(hidden))
            else:
                hidden = model.taps[_NETWORK].features(model.taps[_PIXELS])
            hidden = hidden - _MEAN_LOST * hidden.mean([2, 3], keepdim=True)
            return hidden / (hidden.std([2, 3], keepdim=True) + 1e-6)


class Crop:
    """A `data.inputs.ControlFilter` that is the crop itself, which is so read beside cached latents too."""

    num_channels = 3

    def __call__(self, picture, generator):
        return picture


METHOD = Alignment

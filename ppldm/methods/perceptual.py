"""Perceptual losses of the picture that a prediction says of x_t, at levels of little noise.

    loss + lpips_weight * LPIPS(x_0', x_0) + dino_weight * mean over patches of (1 - cos(f(x_0'), f(x_0)))

x_0 and x_0' are pixels; those of latents come out of the frozen autoencoder's decoder, through which gradients pass:
dear, and meant for models of pixels. LPIPS sees textures, f, DINOv2's features, what things are. Samples of noisier
levels count 0 in the mean. PixelGen (Ma et al. 2026, arXiv:2602.02493); published: FID 5.11 on ImageNet 256 without
guidance after 80 epochs (abstract). PRX has the same with LPIPS (`prx/algorithm/lpips.py`).
"""

from dataclasses import dataclass
from pathlib import Path

from ..utils.errors import ConfigError
from .base import Method

_LPIPS, _DINO = "perceptual_lpips", "perceptual_dinov2"


@dataclass(frozen=True)
class Perceptual(Method):
    """lpips, dinov2: files or folders with their weights; at least one. lpips_weight, dino_weight: of the terms. until:
    the share of the levels, from no noise on, at which they count."""

    lpips: str = ""
    dinov2: str = ""
    lpips_weight: float = 0.1
    dino_weight: float = 0.01
    until: float = 0.7

    def problem(self, config):
        for name in ("lpips", "dinov2"):
            path = getattr(self, name)
            if path and not Path(path).expanduser().exists():
                return f"{name} {path} is not there; give a file or folder with its weights"
        if not (self.lpips or self.dinov2):
            return "it needs lpips=FILE or dinov2=FILE, the weights of what sees pictures; give one of them"
        if getattr(config, "patch_masking", 0):
            return "--patch_masking leaves patches out; omit either"
        if self.lpips_weight <= 0 or self.dino_weight <= 0:
            return f"weights {self.lpips_weight:g} and {self.dino_weight:g} must be above 0"
        return None if 0 < self.until <= 1 else f"until {self.until:g} must be above 0 and at most 1"

    def attach(self, model, seed):
        from ..networks.model import freeze
        from ..weights.losses import load_dinov2, load_lpips

        if not hasattr(model, "latent_map"):
            raise ConfigError("--methods perceptual needs a model that draws by an autoencoder; omit it")
        for name, path, load in ((_LPIPS, self.lpips, load_lpips), (_DINO, self.dinov2, load_dinov2)):
            if path:
                model.taps[name] = load(path)
                freeze(model.taps[name])
        return {}

    def term(self, model, step):
        import paddle

        from ..diffusion.process import add_noise

        noisy = add_noise(step.latents, step.noise, step.scales)
        counts = (step.timesteps < self.until * model.process.num_levels).astype("float32")
        with paddle.amp.auto_cast(enable=False):
            made = self._pixels(model, model.process.picture(step.predicted, noisy, step.scales))
            with paddle.no_grad():
                true = self._pixels(model, step.latents)
            found = 0.0
            if self.lpips:
                found = self.lpips_weight * model.taps[_LPIPS](made, true)
            if self.dinov2:
                found = found + self.dino_weight * self._apart(model.taps[_DINO], made, true)
            return (counts * found).mean()

    @staticmethod
    def _pixels(model, latents):
        """[B, 3, H, W] float32 in about -1 .. 1."""
        return model.vae.decode(model.latent_map.to_autoencoder(latents)).sample.astype("float32")

    @staticmethod
    def _apart(network, made, true):
        """How far features are apart, [B]."""
        from paddle.nn import functional as F

        one, other = (network.patches((pictures + 1.0) / 2.0) for pictures in (made, true))
        return (1.0 - F.cosine_similarity(one, other, axis=1)).mean([1, 2])


METHOD = Perceptual

"""The objective of an autoencoder's training, and the measures of a trained one."""

import math
from contextlib import nullcontext

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional as F

from .cpu_operators.layers import leave_to_paddle
from .losses import GradientBalance, hinge_loss
from .model import Component, Loss, Model, freeze, to_unit_range

_MOMENTUM = 0.9  # of a batch norm's statistics, as PyTorch and Paddle have it


class AutoencoderObjective(Model):
    """Reconstruction error of pixels in -1 .. 1, plus `kl_weight` times the KL divergence of the posterior from the
    standard normal, in nats a picture over (3 H W), plus with an `lpips` `perceptual_weight` times its distance: the
    published LDM autoencoders' loss over the number of pixel values. With a `discriminator`, from update
    `adversarial_start`, in training mode, come `adversarial_weight` times the balance (`losses`) times - mean
    D(reconstruction), without a gradient for D, and the hinge loss of D, without one for the autoencoder. With a
    `dinov2`, in training mode, comes `alignment_weight` times a balance times the `alignment` of latents to it.
    settings: a `ReconstructionSettings`, which has these. `decoder_only`: the encoder stays as it is. network: the name
    of what is trained; scale: the setting that brings its latents to unit variance; replaced: those that did so
    before."""

    unsaved = ("lpips", "dinov2")
    network = "vae"
    scale = "scaling_factor"
    replaced: tuple[str, ...] = ("shift_factor", "latents_mean", "latents_std")

    def __init__(
        self,
        network: nn.Layer,
        settings,
        lpips: nn.Layer | None = None,
        discriminator: nn.Layer | None = None,
        dinov2: nn.Layer | None = None,
        alignment: nn.Layer | None = None,
    ):
        super().__init__()
        setattr(self, self.network, network)
        self.settings, self.lpips, self.dinov2, self.alignment = settings, lpips, dinov2, alignment
        self.discriminator = discriminator  # behind what learns earlier: in this order Paddle takes moments from a file
        self._squares = {"decoded": 0.0, "aligned": 0.0}  # of gradients of latents, by what was made of them
        self.decoder_only = getattr(settings, "train_decoder_only", False)
        self.balance = GradientBalance() if discriminator else None
        leave_to_paddle(self.last_layer)
        self.freeze()
        for encoding in filter(None, (network.encoder, network.quant_conv)) if self.decoder_only else ():
            freeze(encoding)

    @property
    def networks(self) -> dict[str, Component]:
        """The autoencoder; discriminator and LPIPS where they are."""
        found = {self.network: Component(getattr(self, self.network), trained=True)}
        if self.discriminator:
            starts = {"clipped_alone": True, "starts": self.settings.adversarial_start}
            found["discriminator"] = Component(self.discriminator, True, "discriminator", **starts)
        if self.lpips:
            found["lpips"] = Component(self.lpips, trained=False, stays_float32=True)
        if self.dinov2:
            found["dinov2"] = Component(self.dinov2, trained=False, stays_float32=True)
            found["alignment"] = Component(self.alignment, trained=True, stays_float32=True)
        return found

    @property
    def last_layer(self):
        """Of the decoder: at its weight the balance compares gradients."""
        return self.vae.decoder.conv_out

    def scale_of(self, std: float) -> float:
        """What `scale` is of latents of this standard deviation."""
        return 1.0 / std

    @paddle.no_grad()
    def latents(self, pixel_values, posterior_noise):
        """Unscaled samples of the posterior of [B, 3, H, W] uint8, float32 [B, C, h, w]."""
        posterior = self.vae.encode(to_unit_range(pixel_values)).latent_dist
        return posterior.mean + posterior.std * posterior_noise

    def reconstruct(self, pixel_values):
        """[B, 3, H, W] uint8 to its reconstruction, float32 in -1 .. 1."""
        return reconstruct(self.vae, pixel_values)

    def penalised(self, pixels, posterior_noise):
        """(reconstruction of [B, 3, H, W] in -1 .. 1, what the loss adds for latents, latents), float32."""
        with paddle.no_grad() if self.decoder_only else nullcontext():
            posterior = self.vae.encode(pixels).latent_dist
            latents = posterior.mean + posterior.std * posterior_noise
        kl = 0.5 * (posterior.mean**2 + posterior.var - 1.0 - posterior.logvar).astype("float32").sum()
        decoded = self.vae.decode(self._watched(latents, "decoded")).sample.astype("float32")
        return decoded, self.settings.kl_weight * kl / pixels.size, latents

    def _watched(self, latents, made: str):
        """The same, whose gradient is looked at where there is an alignment."""
        if not (self.dinov2 and self.training):
            return latents

        def note(gradient):
            self._squares[made] += gradient.detach().astype("float32").square().sum()

        latents = latents.clone()
        latents.register_hook(note)
        return latents

    def forward(self, pixel_values, posterior_noise=None) -> Loss:
        """The loss of pictures: of no noise level."""
        pixels = to_unit_range(pixel_values)
        decoded, penalty, latents = self.penalised(pixels, posterior_noise)
        error, measures, settings = 0.0, None, self.settings
        if "l1" in settings.reconstruction_loss:
            error = error + F.l1_loss(decoded, pixels)
        if "mse" in settings.reconstruction_loss:
            error = error + F.mse_loss(decoded, pixels)
        if self.lpips:
            with paddle.amp.auto_cast(enable=False):
                distance = self.lpips(pixels, decoded).mean()
            error, measures = error + settings.perceptual_weight * distance, {"lpips": distance.detach()}
        value = error + penalty
        if self.dinov2 and self.training:
            with paddle.amp.auto_cast(enable=False):
                aligned = self._watched(latents.astype("float32"), "aligned")
                apart = self.alignment(aligned, self.dinov2.features(pixel_values))
            value = value + settings.alignment_weight * self.alignment.ratio.squeeze() * apart
        if not (self.discriminator and self.training and self.num_updates >= settings.adversarial_start):
            return Loss(value, measures=measures)
        with paddle.amp.auto_cast(enable=False):
            unlike = -self.discriminator.judge(decoded).mean()
            learned = hinge_loss(self.discriminator(pixels), self.discriminator(decoded.detach()))
            sums = self.balance.sums(error, unlike, self.last_layer.weight)
        weight = settings.adversarial_weight * self.balance.weight(pixels[0].size).squeeze()
        return Loss(value + (weight * unlike + learned), measures=measures, statistics=sums)

    def statistics(self, losses: list[Loss]):
        """Squares of the gradients of latents, where these are aligned; the two gradients of the balance, once the
        discriminator runs."""
        sums = [loss.statistics for loss in losses if loss.statistics is not None]
        told = [paddle.add_n(sums)] if sums else []
        if self.dinov2:
            counted = self.settings.alignment_weight * self.alignment.ratio
            decoded, aligned = (paddle.to_tensor(one).reshape([1]) for one in self._squares.values())
            told.insert(0, paddle.concat([decoded, aligned / counted**2]))
            self._squares = dict.fromkeys(self._squares, 0.0)
        return paddle.concat(told) if told else None

    def keep_statistics(self, sums) -> None:
        if self.dinov2:
            self.alignment.update(sums[:2])
            sums = sums[2:]
        if len(sums):
            self.balance.update(sums)


class QuantisedObjective(AutoencoderObjective):
    """Stage A of Stable Cascade, Paella's autoencoder, whose latents are quantised while it learns; a batch has nothing
    random. As its base, with the loss of the code book in place of the KL divergence (van den Oord et al. 2017,
    arXiv:1711.00937, equation 3): codes learn from all of it, latents from a quarter, and the decoder's gradients pass
    through. The norm that ends the encoder has running statistics, which move by a tenth each update."""

    network = "vqgan"
    scale = "scale_factor"
    replaced = ()

    def __init__(self, *parts):
        super().__init__(*parts)
        self._norm._use_global_stats = True
        self._own = 1 + 2 * self.vqgan.config.latent_channels  # numbers of `statistics` that are the norm's
        self._seen = None

    @property
    def _norm(self):
        """That of the latents, the only one."""
        return self.vqgan.down_blocks[-1][1]

    @property
    def last_layer(self):
        return self.vqgan.out_block[0]

    def scale_of(self, std: float) -> float:
        """Latents are divided by it."""
        return std

    @paddle.no_grad()
    def latents(self, pixel_values):
        """Latents of [B, 3, H, W] uint8 before they are quantised, [B, C, H / f, W / f] float32."""
        return self.vqgan.encode(pixel_values.astype("float32") / 255.0).latents

    @paddle.no_grad()
    def reconstruct(self, pixel_values):
        """[B, 3, H, W] uint8 to what is decoded of the codes, float32 in -1 .. 1."""
        return self.penalised(to_unit_range(pixel_values))[0].clip(-1.0, 1.0)

    def penalised(self, pixels, _noise=None):
        """(reconstruction, loss of the code book, latents); keeps what comes into the norm for `statistics`."""
        hook = self._norm.register_forward_pre_hook(self._see)
        latents = self.vqgan.encode((pixels + 1.0) / 2.0).latents
        hook.remove()
        with paddle.amp.auto_cast(enable=False):
            codes, loss, _ = self.vqgan.vquantizer(latents.astype("float32"))
        return self.vqgan.decode(codes).sample.astype("float32") * 2.0 - 1.0, loss, latents

    def _see(self, _layer, given) -> None:
        values = given[0].detach().astype("float32").transpose([1, 0, 2, 3]).flatten(1)
        count = paddle.full([1], values.shape[1], "float32")
        self._seen = paddle.concat([count, values.sum(1), values.square().sum(1)])

    def forward(self, pixel_values) -> Loss:
        loss = super().forward(pixel_values)
        if not self.training:
            return loss
        others = [] if loss.statistics is None else [loss.statistics]
        return loss._replace(statistics=paddle.concat([self._seen, *others]))

    @paddle.no_grad()
    def keep_statistics(self, sums) -> None:
        """Into the norm, and what is left into the balance."""
        count, total, squares = paddle.split(sums[: self._own], [1, *[self._own // 2] * 2])
        mean = total / count
        for kept, new in ((self._norm._mean, mean), (self._norm._variance, squares / count - mean.square())):
            kept.set_value(_MOMENTUM * kept + (1 - _MOMENTUM) * new)
        if len(sums) > self._own:
            super().keep_statistics(sums[self._own :])


@paddle.no_grad()
def reconstruct(vae: nn.Layer, pixel_values):
    """[B, 3, H, W] uint8 to its reconstruction from the posterior's mean, float32 in -1 .. 1."""
    return vae.decode(vae.encode(to_unit_range(pixel_values)).latent_dist.mean).sample.clip(-1.0, 1.0)


def psnr(pixel_values, decoded) -> float:
    """Peak signal-to-noise ratio in dB between uint8 pixels and pixels in -1 .. 1, over all given values."""
    return 10.0 * math.log10(4.0 / max(1e-12, float(F.mse_loss(decoded, to_unit_range(pixel_values)))))


def latent_statistics(batches) -> dict:
    """Mean and standard deviation of unscaled latents [B, C, h, w], over all and of channels. The scaling factor is 1 /
    std (Rombach et al. 2022, arXiv:2112.10752, appendix G)."""
    latents = [one.numpy() for one in batches]
    values = np.concatenate([some.ravel() for some in latents]).astype(np.float64)
    by_channel = np.concatenate([np.moveaxis(some, 1, 0).reshape(some.shape[1], -1) for some in latents], axis=1)
    return {
        "latent_mean": float(values.mean()),
        "latent_std": float(values.std()),
        "latent_channel_means": [round(float(mean), 4) for mean in by_channel.mean(axis=1, dtype=np.float64)],
        "pictures": sum(len(some) for some in latents),
    }

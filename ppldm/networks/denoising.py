"""What all models have in common that learn to take noise away: the loss, and its weights.

A batch says of each sample its noise level (`timesteps` [B] int64) and its noise [B, C, h, w] float32.
"""

from collections.abc import Mapping
from types import MappingProxyType

import paddle
from paddle import nn
from paddle.nn import functional as F

from ..diffusion.drawing import USUAL, Drawing
from ..diffusion.process import Process, add_noise
from .model import Loss, Model, Step, encode_moments


class DenoisingModel(Model):
    """A subclass calls `denoising_loss` in its forward. denoiser_name: of the component that predicts. sampling: what
    samplers are told beside the process. led_by: the input by which pictures lead. words: the name in `condition` of
    the states of a caption's words, where it is told no other of it; joins_words: of any number. takes_mask: it
    inpaints. coarse_noise: of `utils.rng.pyramid`. usual: how it is drawn. watched: takes (x_t as it is shown to the
    network, the x_0 that it says) [B, C, h, w] of each loss, where somebody looks."""

    denoiser_name: str
    sampling: Mapping = MappingProxyType({})
    led_by: str = "control"
    words: str | None = None
    takes_mask = False
    joins_words = True
    coarse_noise: bool = False
    usual: Drawing = USUAL
    watched: list | None = None

    def __init__(self, process: Process, **parts):
        """Levels and weights of `process`; where these are learned, they are a part of the model's state. parts: the
        networks, and what else `networks` needs to know."""
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.process = process
        self.register_buffer("levels", paddle.to_tensor(process.levels()), persistable=False)
        weights = process.loss_weights()
        self.register_buffer("loss_weights", None if weights is None else paddle.to_tensor(weights), persistable=False)
        learned = getattr(process.weighting, "learned", None)
        self.level_errors = learned(process) if learned else None
        self.freeze()

    @property
    def denoiser(self) -> nn.Layer:
        """What removes the noise."""
        return getattr(self, self.denoiser_name)

    def drawn_sizes(self, latents) -> dict:
        """What the network takes of the sizes of pictures that are drawn as `latents`: nothing."""
        return {}

    def lead(self, pictures) -> dict:
        """The network's arguments of pictures [B, K, H, W] uint8 that lead what is drawn: control images."""
        return {"control": pictures}

    def without_lead(self, value):
        """What the branch of guidance without a caption takes in place of a value of `lead`: the same."""
        return value

    @paddle.no_grad()
    def whole_moments(self, pixel_values, moments, uncached):
        """[B, 2, C, h, w]: `moments`, with what is made, and kept, of pixels of samples whose places are `uncached`."""
        if pixel_values is None:
            return moments
        places, encoded = uncached[:, 0], encode_moments(self.components[self.autoencoder].layer, pixel_values)
        if len(encoded) > len(places):
            encoded = encoded[places]
        if self.keep_moments is not None:
            encoded = paddle.to_tensor(self.keep_moments(uncached[:, 1:].numpy(), encoded.numpy()))
        return paddle.scatter(moments, places, encoded)

    def denoising_loss(self, predict, latents, timesteps, noise, input_noise=None, seen=None, told=None) -> Loss:
        """Mean squared error between prediction and target, weighted by timestep where asked for. predict: of x_t [B,
        C, h, w] and the levels [B]. seen: of both, what counts, where that is not all. With `input_noise`, x_t is made
        with it and the target with `noise`: input perturbation, Ning et al. 2023 (arXiv:2301.11706). told: `Step`'s."""
        level = self.levels[timesteps]
        for method in self.methods if self.training else ():
            noise = method.changed_noise(self, predict, latents, noise, level)
        scales = self.process.scales(level.reshape([-1, 1, 1, 1]))
        noisy = add_noise(latents, noise, scales)
        shown = noisy if input_noise is None else add_noise(latents, input_noise, scales)
        predicted = self.process.prediction(predict(shown, level).astype("float32"), noisy, scales[1])
        if self.watched is not None:
            self.watched.append((shown, self.process.picture(predicted, noisy, scales)))
        target = self.process.target(latents, noise, scales)
        if seen:
            predicted, target = seen(predicted), seen(target)
        with paddle.no_grad():
            errors = (predicted.detach() - target).square().mean([1, 2, 3])
            levels = timesteps.astype("float32") / self.process.num_levels
        weights = self.weights_of(timesteps)
        if weights is None:
            value = F.mse_loss(predicted, target)
        else:
            value = (weights * F.mse_loss(predicted, target, reduction="none").mean([1, 2, 3])).mean()
        if not (self.methods and self.training):
            return Loss(value, errors, levels)
        step = Step(latents, noise, scales, predicted, target, seen or (lambda whole: whole), timesteps, told or {})
        terms = [] if any(method.is_whole_loss for method in self.methods) else [value]
        terms += [term for method in self.methods if (term := method.term(self, step)) is not None]
        told = [method.sums(self, step) for method in self.methods if method.num_sums(self)]
        return Loss(paddle.add_n(terms), errors, levels, paddle.concat(told) if told else None)

    def weights_of(self, timesteps):
        """The weight [B] of each sample's error, None where all are 1. Learned ones are only of the training."""
        if self.level_errors is not None:
            return self.level_errors.weights(timesteps) if self.training else None
        return None if self.loss_weights is None else self.loss_weights[timesteps]

    def statistics(self, losses: list[Loss]):
        """Errors by noise level, where the weights of the loss are learned; and what methods add up."""
        told = [] if self.level_errors is None else [self.level_errors.sums(losses)]
        if of_methods := [loss.statistics for loss in losses if loss.statistics is not None]:
            told.append(paddle.add_n(of_methods))
        return paddle.concat(told) if told else None

    def keep_statistics(self, sums) -> None:
        counts = [method.num_sums(self) for method in self.methods]
        first = len(sums) - sum(counts)
        if self.level_errors is not None:
            self.level_errors.update(sums[:first])
        for method, count in zip(self.methods, counts, strict=True):
            if count:
                method.keep(self, sums[first : first + count])
            first += count

"""What every family's model is to a training run: its components, what a batch must hold, and a loss by sample; and
what frozen networks make of pictures and of the tokens of captions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional as F

from .cpu_operators.layers import layer_norm_by_paddle


class Loss(NamedTuple):
    """What `Model.forward` gives. value: what is learned from, float32 scalar. Where there is a noise level, without
    gradients, [B] float32: per_sample, the errors before any weight; noise_level, the share of the levels below.
    statistics: what a model wants added up, float32 [n]. measures: further means, logged of held-out rows."""

    value: paddle.Tensor
    per_sample: paddle.Tensor | None = None
    noise_level: paddle.Tensor | None = None
    statistics: paddle.Tensor | None = None
    measures: Mapping[str, paddle.Tensor] | None = None


class Step(NamedTuple):
    """What a method may look at: latents, noise [B, C, h, w], scales (a, s) [B, 1, 1, 1] of x_t = a x_0 + s noise,
    and what was predicted, float32 like its target, of the places that count, which `seen` takes of [B, C, h, w].
    timesteps [B] int64. told: what `predict` is told besides, by name."""

    latents: paddle.Tensor
    noise: paddle.Tensor
    scales: tuple
    predicted: paddle.Tensor
    target: paddle.Tensor
    seen: Callable
    timesteps: paddle.Tensor
    told: dict


@dataclass(frozen=True)
class Component:
    """One network of a model. rate_group: it learns by `--<rate_group>_learning_rate`. stays_float32: never in half
    precision. recompute: makes it compute activations again. adapted: it is frozen, and gradients pass through it to
    adapters. clipped_alone: its gradients have a norm of their own. starts: after how many updates it is trained."""

    layer: nn.Layer
    trained: bool
    rate_group: str | None = None
    stays_float32: bool = False
    recompute: Callable[[], None] | None = None
    adapted: bool = False
    clipped_alone: bool = False
    starts: int = 0

    @property
    def differentiated(self) -> bool:
        """Whether gradients pass through it."""
        return self.trained or self.adapted


class Model(nn.Layer):
    """Base of all models. It draws nothing: a batch has an array for each of `inputs`. process: the
    `diffusion.process.Process` of a model that has noise levels. inputs: by the names of `forward`'s arguments, how the
    data layer makes each. tokenizer: of its captions, or None. autoencoder, caption_encoder: the names of the frozen
    components whose moments, and hidden states, may be computed ahead. empty_end: (place, id) of the token that
    ends an empty caption, where its hidden states are zeros. keep_moments: keeps what is computed of pixels: (places
    int64 [M, 3], moments [M, 2, C, h, w]) to moments as they will be read again. adapters: what is trained in place of
    its networks. num_updates: how many updates are done. compiled_predict: what training calls in place of `predict`,
    if set. methods: of `ppldm.methods`, the networks that they have besides (method_parts), and what they look at in a
    step (taps): outputs of layers, and their own inputs (method_inputs)."""

    process = None
    inputs: dict[str, Any] = {}
    tokenizer = None
    autoencoder: str | None = None
    caption_encoder: str | None = None
    empty_end: tuple[int, int] | None = None
    compiled_predict: Callable | None = None
    keep_moments: Callable | None = None
    num_updates: int = 0
    adapters: Mapping[str, nn.Layer] = MappingProxyType({})
    methods: tuple = ()
    method_parts: Mapping[str, Component] = MappingProxyType({})
    method_inputs: tuple[str, ...] = ()
    taps: dict[str, Any] = {}

    @property
    def networks(self) -> dict[str, Component]:
        """By name, which is the prefix of its parameters, as they are trained without adapters."""
        raise NotImplementedError

    @property
    def components(self) -> dict[str, Component]:
        """The networks, and those of methods; with adapters these too, in float32, and nothing else is trained."""
        networks = {**self.networks, **self.method_parts}
        if not self.adapters:
            return networks
        adapted = {name: replace(one, trained=False, adapted=one.trained) for name, one in networks.items()}
        return adapted | {
            name: Component(layer, trained=True, rate_group=networks[layer.network].rate_group, stays_float32=True)
            for name, layer in self.adapters.items()
        }

    @property
    def unsaved(self) -> tuple[str, ...]:
        """The components that a checkpoint does not hold: the base of adapters, and what methods keep as it was."""
        kept = tuple(name for name, one in self.method_parts.items() if not one.trained)
        return (*self.networks, *kept) if self.adapters else kept

    def freeze(self) -> None:
        """To be called once all components are there: those that are not trained get no gradients."""
        for component in self.components.values():
            if not component.trained:
                freeze(component.layer)

    def train(self):
        """Training mode for the components that gradients pass through; the others stay in evaluation mode."""
        super().train()
        for component in self.components.values():
            if not component.differentiated:
                component.layer.eval()
        return self

    def trained_parameters(self) -> dict:
        """Name to parameter, in the order of the state dict, of everything the optimizer changes."""
        return {name: p for name, p in self.named_parameters() if not p.stop_gradient}

    def process_settings(self) -> dict | None:
        """What model.json says of the process, and of how to sample; None without one."""
        return self.process and self.process.settings()

    def statistics(self, losses: list[Loss]) -> paddle.Tensor | None:
        """Sums over this rank's losses, float32 [n], to which those of other ranks are added; None: nothing."""
        return None

    def keep_statistics(self, sums: paddle.Tensor) -> None:
        """Told, after each update that is applied, the `statistics` of all ranks; the same on all."""

    def loss(self, batch: dict) -> Loss:
        """The loss of a batch, which may hold more than the inputs."""
        return self(**self.inputs_of(batch))

    def inputs_of(self, batch: dict) -> dict:
        """What `forward` takes of a batch: where there are moments, it may lack pixels, and the other way about. What
        methods look at is put aside for them."""
        if self.method_inputs:
            self.taps.update({name: batch[name] for name in self.method_inputs})
        return {name: batch[name] for name in self.inputs if name in batch and name not in self.method_inputs}


def freeze(layer: nn.Layer) -> None:
    """No gradients of its own, evaluation mode; batch norms keep their statistics in either mode, since a wrapper may
    set that of all layers. The gradients of its inputs stay right."""
    layer.eval()
    for parameter in layer.parameters():
        parameter.stop_gradient = True
    for one in layer.sublayers(include_self=True):
        if isinstance(one, nn.LayerNorm) and one.weight is not None and "forward" not in vars(one):
            one.forward = partial(layer_norm_by_paddle, one)
        elif isinstance(one, nn.BatchNorm2D):
            one._use_global_stats = True


def token_mask(input_ids, end_id: int | None):
    """[B, L] int64, 1 up to the first `end_id` of a caption and 0 behind it; None where that is None."""
    if end_id is None:
        return None
    ends = (input_ids == end_id).astype("int64")
    return (ends.cumsum(axis=1) == ends).astype("int64")


def hidden_states(text_encoder: nn.Layer, input_ids, end_id: int | None):
    """[B, L] int64 to the last hidden states [B, L, D]. CLIP's encoder is causal, and takes no mask. A T5 computes in
    the type of its weights: under autocast ppdiffusers' mixes types. Of ids, Paddle could make no graph of it."""
    if hasattr(text_encoder, "text_model"):
        return text_encoder(input_ids)[0]
    mask = token_mask(input_ids, end_id)
    if hasattr(text_encoder, "to_logits"):
        return text_encoder(input_ids, attention_mask=mask)[0]
    with paddle.amp.auto_cast(enable=False):
        return text_encoder(inputs_embeds=text_encoder.shared(input_ids), attention_mask=mask)[0]


def projected_caption(text_encoder: nn.Layer, input_ids, end_id: int, before: int = 1, masked: bool = True):
    """Of captions [B, L] int64, by CLIP's text encoder with a projection: the hidden states [B, L, D] of its last layer
    before the norm, or of the one `before` that, and the projected state [B, 1, P] of the first `end_id` behind it,
    None of a CLIP without a projection. masked: padding is not attended to."""
    mask = token_mask(input_ids, end_id)
    told = {"attention_mask": mask} if masked else {}
    states = text_encoder.text_model(input_ids, output_hidden_states=True, return_dict=True, **told)
    if not hasattr(text_encoder, "text_projection"):
        return states.hidden_states[-before], None
    ends = paddle.stack([paddle.arange(input_ids.shape[0]), mask.sum(axis=1) - 1], axis=1)
    pooled = text_encoder.text_projection(states.last_hidden_state.gather_nd(ends))
    return states.hidden_states[-before], pooled.unsqueeze(1)


def join_caption(states, pooled):
    """The two of `projected_caption` as one [B, L + 1, D], as it is kept: the projected state last, with zeros."""
    return paddle.concat([states, F.pad(pooled, [0, 0, 0, 0, 0, states.shape[2] - pooled.shape[2]])], axis=1)


@paddle.no_grad()
def encode_moments(vae: nn.Layer, pixel_values):
    """[B, 3, H, W] uint8 to the posterior's mean and deviation, float32 [B, 2, C, H / f, W / f], unscaled; without a
    posterior the deviation is 0. In float32 outside autocast: half precision overflows in common VAEs."""
    with paddle.amp.auto_cast(enable=False):
        if not hasattr(vae, "encode"):  # an EfficientNet encoder
            mean = vae(pixel_values.astype("float32") / 255.0)
            return paddle.stack([mean, paddle.zeros_like(mean)], axis=1)
        posterior = vae.encode(to_unit_range(pixel_values)).latent_dist
        return paddle.stack([posterior.mean, posterior.std], axis=1)


@dataclass(frozen=True)
class LatentMap:
    """Between latents [B, C, h, w] of an autoencoder, z, and those that a model diffuses, by the VAE's config, with the
    order of operations of diffusers' pipelines: z scale (Stable Diffusion; Rombach et al. 2022, arXiv:2112.10752,
    appendix G); (z - shift) scale (Stable Diffusion 3, Flux); by channel (z - mean) scale / std (Stable Diffusion XL).
    Takes tensors and arrays."""

    scale: float
    shift: float | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    @classmethod
    def of(cls, vae) -> "LatentMap":
        """By a completed config, which `networks.configs` has checked."""
        mean, std = (vae[name] and tuple(vae[name]) for name in ("latents_mean", "latents_std"))
        return cls(float(vae["scaling_factor"]), vae["shift_factor"], mean, std)

    def to_model(self, latents):
        """Of the autoencoder's latents."""
        if self.std:
            return (latents - _column(self.mean)) * self.scale / _column(self.std)
        return (latents - self.shift if self.shift else latents) * self.scale

    def to_autoencoder(self, latents):
        """The inverse."""
        if self.std:
            return latents * _column(self.std) / self.scale + _column(self.mean)
        return latents / self.scale + self.shift if self.shift else latents / self.scale


def _column(values) -> np.ndarray:
    """By channel of [B, C, h, w]."""
    return np.array(values, np.float32).reshape(-1, 1, 1)


def to_unit_range(pixel_values):
    """uint8 0 .. 255 to float32 -1 .. 1."""
    return pixel_values.astype("float32") / 127.5 - 1.0

"""What every family's model is to a training run: its components, what a batch must hold, and a loss by sample."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import paddle
from paddle import nn


class Loss(NamedTuple):
    """What `Model.forward` gives.

    value: what is learned from, float32 scalar. Where the model has a noise level: per_sample, the error of each
    sample before any weight, [B] float32 without a gradient; noise_level, the share of the levels below that of the
    sample, [B] float32 in [0, 1). statistics: what a model wants added up (`Model.statistics`), float32 [n]. measures:
    further means over the samples, by name, which are logged of held-out rows; float32 scalars without a gradient.
    """

    value: paddle.Tensor
    per_sample: paddle.Tensor | None = None
    noise_level: paddle.Tensor | None = None
    statistics: paddle.Tensor | None = None
    measures: Mapping[str, paddle.Tensor] | None = None


@dataclass(frozen=True)
class Component:
    """One network of a model.

    rate_group: the name in `--<rate_group>_learning_rate` of what it shares a learning rate with. stays_float32: never
    cast to half precision. recompute: makes it compute activations a second time while it goes back. adapted: it is
    frozen, and gradients pass through it to adapters. clipped_alone: the norm by which its gradients are clipped is
    their own. starts: how many updates are done before it is trained.
    """

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
    """Base of all models. It draws nothing: a batch has an array for each of `inputs`, random ones too.

    process: the `diffusion.process.Process` of a model that has noise levels, None of others. inputs: by the names of
    `forward`'s arguments, how the data layer makes each (`ppldm.data.inputs`). tokenizer: of its captions, or None.
    autoencoder: the name of the frozen component whose moments may be computed ahead, None without such.
    caption_encoder: the name of the frozen component whose hidden states of captions may be; None without such.
    empty_end: the id of the token that ends a caption where those of an empty one are zeros (`--empty_caption zeros`).
    keep_moments: what is computed of pixels may be kept by it: (places int64 [M, 3], moments [M, 2, C, h, w]) to the
    moments as they will be read again (`data.cached.run.CachedMoments.keep`).
    adapters: what is trained in place of its networks, by name (`networks.adapters`).
    num_updates: how many updates are done; told before each of a training.
    A model whose `predict` may be compiled calls `compiled_predict` in its place while that is set and it trains.
    """

    process = None
    inputs: dict[str, Any] = {}
    tokenizer = None
    autoencoder: str | None = None
    caption_encoder: str | None = None
    empty_end: int | None = None
    compiled_predict: Callable | None = None
    keep_moments: Callable | None = None
    num_updates: int = 0
    adapters: Mapping[str, nn.Layer] = MappingProxyType({})

    @property
    def networks(self) -> dict[str, Component]:
        """By name, which is the prefix of its parameters, as they are trained without adapters."""
        raise NotImplementedError

    @property
    def components(self) -> dict[str, Component]:
        """The networks; with adapters these too, which are then all that is trained, in float32."""
        networks = self.networks
        if not self.adapters:
            return networks
        adapted = {name: replace(one, trained=False, adapted=one.trained) for name, one in networks.items()}
        return adapted | {
            name: Component(layer, trained=True, rate_group=networks[layer.network].rate_group, stays_float32=True)
            for name, layer in self.adapters.items()
        }

    @property
    def unsaved(self) -> tuple[str, ...]:
        """The components that a checkpoint does not hold: the base of adapters."""
        return tuple(self.networks) if self.adapters else ()

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
        """What the model wants to know of an update, of this rank's losses: sums, float32 [n], to which those of the
        other ranks are added. None: nothing."""
        return None

    def keep_statistics(self, sums: paddle.Tensor) -> None:
        """Told, after each update that is applied, the `statistics` of all ranks; the same on all."""

    def loss(self, batch: dict) -> Loss:
        """The loss of a batch, which may hold more than the inputs."""
        return self(**self.inputs_of(batch))

    def inputs_of(self, batch: dict) -> dict:
        """The inputs that a batch has: where there are moments, it may lack pixels, and the other way about."""
        return {name: batch[name] for name in self.inputs if name in batch}


def freeze(layer: nn.Layer) -> None:
    """No gradients of its own, evaluation mode; batch norms keep their statistics in either mode, since a wrapper may
    set that of all layers. The gradients of its inputs stay right."""
    layer.eval()
    for parameter in layer.parameters():
        parameter.stop_gradient = True
    for one in layer.sublayers(include_self=True):
        if isinstance(one, nn.LayerNorm) and one.weight is not None:
            one.forward = partial(_normalise_frozen, one)
        elif isinstance(one, nn.BatchNorm2D):
            one._use_global_stats = True


def _normalise_frozen(layer: nn.LayerNorm, inputs):
    """What a frozen LayerNorm gives, to the bit. Paddle 3.3's kernel for CPUs makes a wrong gradient of the inputs
    where none of the weight is asked for; so one is, and nobody takes it."""
    weight = layer.weight.detach()
    weight.stop_gradient = inputs.stop_gradient
    return nn.functional.layer_norm(inputs, layer._normalized_shape, weight, layer.bias, layer._epsilon)

"""A built model in which only adapters are trained: low-rank adapters of layers that stay as they are (LoRA: Hu et al.
2021, arXiv:2106.09685).

An adapted layer gives W x + b + alpha / r * up(down(x)). down is drawn from N(0, 1 / r²), as peft's "gaussian" and
diffusers' scripts do, and up is zero: before the first update nothing is changed, to the bit.

The adapter is a layer of its own beside the network, whose forward it changes by hooks. So the network keeps the names
and the values of its parameters, and whoever calls it (recompute, graphs, samplers) need not know.
"""

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional as F

from ...utils.errors import ConfigError
from ...utils.log import get_logger
from ...utils.rng import Stream, make_rng
from ..model import Model, freeze
from .tokens import TokensAdapter, find_table, plan_tokens

_SALT = 10  # of Stream.INIT: networks have smaller ones
_SHOWN = 4
_ZERO = nn.initializer.Constant(0.0)


TEXT_ENCODER = "text_encoder"


class LoraLayer(nn.Layer):
    """up(down(x)) of a Linear: down [in, r], up [r, out]; of a Conv2D: down [r, in, kh, kw], up [out, r, 1, 1]."""

    def __init__(self, layer: nn.Layer, rank: int):
        super().__init__()
        shape = layer.weight.shape
        if isinstance(layer, nn.Linear):
            self.geometry = None
            shapes = [shape[0], rank], [rank, shape[1]]
        else:
            self.geometry = {"stride": layer._stride, "padding": layer._padding, "dilation": layer._dilation}
            shapes = [rank, *shape[1:]], [shape[0], rank, 1, 1]
        self.down, self.up = (self.create_parameter(shape, default_initializer=_ZERO) for shape in shapes)

    def forward(self, x):
        """Of the layer's input, what its output changes by but for the scale."""
        if self.geometry is None:
            return F.linear(F.linear(x, self.down), self.up)
        return F.conv2d(F.conv2d(x, self.down, **self.geometry), self.up)


class LoraAdapter(nn.Layer):
    """Those of some layers of one network, at work from when they are made.

    network: its name in the model. alpha: their output is scaled by alpha / rank. layers: by name in the network.
    `modules`: what chose them, for model.json.
    """

    kind = "lora"

    def __init__(self, network: str, layers: dict[str, nn.Layer], rank: int, alpha: float, modules: list[str]):
        super().__init__()
        self.network, self.rank, self.alpha = network, rank, alpha
        self.config = {"rank": rank, "alpha": alpha, "modules": modules}
        self.layers = {name: LoraLayer(layer, rank) for name, layer in layers.items()}
        for name, layer in layers.items():
            self.add_sublayer(name, self.layers[name])
            layer.register_forward_post_hook(self._hook(self.layers[name]))

    def _hook(self, own: LoraLayer):
        return lambda _, inputs, output: output + self.alpha / self.rank * own(inputs[0])

    @paddle.no_grad()
    def draw(self, seed: int, salt: int) -> None:
        """The first values, the same on every rank. `salt` tells the adapters of a model apart."""
        for row, layer in enumerate(self.layers.values()):
            rng = make_rng(seed, Stream.INIT, epoch=_SALT + salt, row=row)
            layer.down.set_value(rng.standard_normal(layer.down.shape, np.float32) / np.float32(self.rank))


def find_layers(name: str, network: nn.Layer, modules: list[str]) -> dict[str, nn.Layer]:
    """The Linear and Conv2D layers of a network whose weights would be trained without an adapter, and whose name holds
    one of `modules`. Raises ConfigError where there are none."""
    able = {
        key: layer
        for key, layer in network.named_sublayers()
        if isinstance(layer, nn.Linear | nn.Conv2D)
        and not layer.weight.stop_gradient
        and getattr(layer, "_groups", 1) == 1
    }
    found = {key: layer for key, layer in able.items() if any(part in key for part in modules)}
    if not found:
        some = [*able][:: max(1, len(able) // _SHOWN)][:_SHOWN]
        raise ConfigError(
            f"--lora_modules {' '.join(modules)}: no linear or convolution layer of {name} has a name with "
            f"{'any of these' if len(modules) > 1 else 'it'}; names are such as {', '.join(some)}"
        )
    return found


def adapt(model: Model, config, seed: int) -> None:
    """Give a model with its tokenizer the adapters that `config` (`families.settings.adapters`) asks for, and freeze
    all else. To be called last when a model is built. Raises ConfigError."""
    networks, adapters = model.networks, {}
    with paddle.utils.unique_name.guard("adapter_"):
        for salt, name in enumerate(config.lora_components if config.lora_rank else ()):
            if name not in networks:
                raise ConfigError(f"--lora_components {name}: the model has {', '.join(networks)}; choose of these")
            layers = find_layers(name, networks[name].layer, config.lora_modules)
            alpha = config.lora_alpha or float(config.lora_rank)
            adapters[f"{name}_lora"] = LoraAdapter(name, layers, config.lora_rank, alpha, config.lora_modules)
            adapters[f"{name}_lora"].draw(seed, salt)
        if config.train_tokens:
            adapters[f"{TEXT_ENCODER}_tokens"] = _new_tokens(model, config.wanted_tokens())
    attach(model, adapters)
    get_logger().info("trained are only %s", "; ".join(map(_describe, adapters.values())))


def attach(model: Model, adapters: dict) -> None:
    """Make adapters known to their model, by name, and all else frozen."""
    for component in model.networks.values():
        freeze(component.layer)
    for name, adapter in adapters.items():
        model.add_sublayer(name, adapter)
    model.adapters = {**model.adapters, **adapters}


def _new_tokens(model: Model, wanted) -> TokensAdapter:
    plan = plan_tokens(wanted, model.tokenizer.vocab)
    model.tokenizer = model.tokenizer.with_tokens([token for token, ids in plan.items() if ids])
    numbers = {word: number for number, word in enumerate(model.tokenizer.vocab)}
    table = find_table(TEXT_ENCODER, model.networks[TEXT_ENCODER].layer)
    words = table.weight.numpy().astype(np.float32)
    first = np.stack([words[ids].mean(axis=0) if ids else words[numbers[token]] for token, ids in plan.items()])
    return TokensAdapter(TEXT_ENCODER, table, [*plan], [numbers[token] for token in plan], first)


def _describe(adapter) -> str:
    if isinstance(adapter, LoraAdapter):
        return f"{len(adapter.layers)} layers of {adapter.network} at rank {adapter.rank}"
    return f"{len(adapter.tokens)} tokens ({', '.join(adapter.tokens[:8])}{', …' * (len(adapter.tokens) > 8)})"

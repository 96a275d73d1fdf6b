"""A built model in which only adapters are trained: low-rank adapters of layers (LoRA: Hu et al. 2021,
arXiv:2106.09685), and rows of a text encoder's table of words (textual inversion: Gal et al. 2022, arXiv:2208.01618).

An adapted layer gives W x + b + alpha / r * up(down(x)), down drawn from N(0, 1 / r²), up zero. A row is its first
value plus a change that starts at zero, to which weight decay draws it back. New tokens have ids behind those of the
table. An adapter is a layer beside the network, whose forward it changes by hooks: names and values of its parameters
stay.
"""

import re

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional as F

from ..utils.errors import ConfigError
from ..utils.log import get_logger
from ..utils.rng import Stream, make_rng
from .model import Model, freeze

_SALT = 10  # of Stream.INIT: networks have smaller ones
_SHOWN = 4
_ZERO = nn.initializer.Constant(0.0)
TEXT_ENCODER = "text_encoder"
_TABLES = ("embed_tokens", "token_embedding")  # LDMBert's, CLIP's


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
    """Those of some layers of one network, at work once they are made. network: its name. alpha: their output is scaled
    by alpha / rank. layers: by name. `modules`: what chose them, for model.json."""

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

    @paddle.no_grad()
    def start(self, pairs: dict, file) -> None:
        """Take the values of a file's `LoraPair`s by layer. Raises ConfigError where they are not of these layers."""
        own = {name.replace(".", "_"): layer for name, layer in self.layers.items()}  # kohya's names, too
        for name, pair in pairs.items():
            where = f"--lora_from {file}: {self.network} {name}"
            if not (layer := own.get(name.replace(".", "_"))):
                raise ConfigError(f"{where} is not of --lora_modules {' '.join(self.config['modules'])}; add its name")
            if (pair.rank, pair.alpha) != (self.rank, self.alpha):
                said = f"--lora_rank {pair.rank} --lora_alpha {pair.alpha:g}"
                raise ConfigError(f"{where} has another rank or alpha than {self.rank}, {self.alpha:g}; give {said}")
            for parameter, array in ((layer.down, pair.down), (layer.up, pair.up)):
                array = array.reshape(len(array), -1).T if parameter.ndim == 2 else array
                if array.size != parameter.size or (parameter.ndim == 2 and [*array.shape] != parameter.shape):
                    raise ConfigError(f"{where} is of another shape than this model's; give a LoRA for it")
                parameter.set_value(np.asarray(array, np.float32, order="C").reshape(parameter.shape))


class TokensAdapter(nn.Layer):
    """The rows of `tokens` in place of those of an embedding, at work from when it is made. network: the text encoder's
    name in the model. ids: of the tokens. first: [T, D] float32, where they start."""

    kind = "tokens"

    def __init__(self, network: str, table: nn.Embedding, tokens: list[str], ids: list[int], first: np.ndarray):
        super().__init__()
        self.network, self.tokens, self.ids = network, tokens, ids
        self.config = {"tokens": tokens, "ids": ids}
        num_words = len(table.weight)
        slots = np.full(max(num_words, *(number + 1 for number in ids)), len(ids), np.int64)
        slots[ids] = np.arange(len(ids))
        self.num_words, self._words = num_words, table.forward
        self.register_buffer("slots", paddle.to_tensor(slots), persistable=False)
        self.register_buffer("first", paddle.to_tensor(first), persistable=False)
        self.change = self.create_parameter(list(first.shape), default_initializer=_ZERO)
        table.forward = self.forward

    def forward(self, input_ids):
        """Ids of any shape to rows, with D behind it."""
        words = self._words(paddle.where(input_ids < self.num_words, input_ids, paddle.zeros_like(input_ids)))
        slots = self.slots[input_ids]
        rows = paddle.concat([self.rows(), paddle.zeros_like(self.first[:1])])
        return paddle.where((slots < len(self.ids)).unsqueeze(-1), rows[slots].astype(words.dtype), words)

    def rows(self):
        """[T, D] float32, as they are now."""
        return self.first + self.change


def find_table(name: str, network: nn.Layer) -> nn.Embedding:
    """A text encoder's table of words. Raises ConfigError for a network that has none."""
    for key, layer in network.named_sublayers():
        if isinstance(layer, nn.Embedding) and key.rpartition(".")[2] in _TABLES:
            return layer
    raise ConfigError(f"--train_tokens: {name} has no table of words; omit it")


def plan_tokens(wanted: list[tuple[str, str | None]], vocab: list[str]) -> dict[str, list[int] | None]:
    """Tokens to train, in order, to the ids whose mean is their first row; None for those of the vocabulary. wanted:
    (token, expression) of new ones, (expression, None) of others. Raises ConfigError for an expression that nothing
    matches, and for a new token that is there."""
    found: dict[str, list[int] | None] = {}
    for token, pattern in wanted:
        new, sought = pattern is not None, token if pattern is None else pattern
        ids = [number for number, word in enumerate(vocab) if re.search(sought, word)]
        if new and token in vocab:
            raise ConfigError(f"--train_tokens {token} is in the vocabulary; train it as ^{re.escape(token)}$")
        if not ids:
            raise ConfigError(f"--train_tokens: nothing in the vocabulary matches {sought}; correct it")
        found |= {token: ids} if new else dict.fromkeys(vocab[number] for number in ids)
    return found


def find_layers(name: str, network: nn.Layer, modules: list[str]) -> dict[str, nn.Layer]:
    """The trainable Linear and Conv2D layers whose name holds one of `modules`. Raises ConfigError where none does."""
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


def adapt(model: Model, config, seed: int, begun: dict | None = None) -> None:
    """Give a built model the adapters of `families.settings`, and freeze all else. begun: of a file, `LoraPair`s by
    network and layer, from which they start. Raises ConfigError."""
    networks, adapters, begun = model.networks, {}, begun or {}
    alphas = [pair.alpha for pairs in begun.values() for pair in pairs.values()]
    if odd := sorted(begun.keys() - {*config.lora_components}):
        raise ConfigError(f"--lora_from {config.lora_from} changes the {odd[0]}; add it to --lora_components")
    with paddle.utils.unique_name.guard("adapter_"):
        for salt, name in enumerate(config.lora_components if config.lora_rank else ()):
            if name not in networks:
                raise ConfigError(f"--lora_components {name}: the model has {', '.join(networks)}; choose of these")
            layers = find_layers(name, networks[name].layer, config.lora_modules)
            alpha = config.lora_alpha or (alphas or [float(config.lora_rank)])[0]
            adapters[f"{name}_lora"] = LoraAdapter(name, layers, config.lora_rank, alpha, config.lora_modules)
            adapters[f"{name}_lora"].draw(seed, salt)
            adapters[f"{name}_lora"].start(begun.get(name, {}), config.lora_from)
        if config.train_tokens:
            plan = plan_tokens(config.wanted_tokens(), model.tokenizer.vocab)
            model.tokenizer = model.tokenizer.with_tokens([token for token, ids in plan.items() if ids])
            numbers = {word: number for number, word in enumerate(model.tokenizer.vocab)}
            table = find_table(TEXT_ENCODER, networks[TEXT_ENCODER].layer)
            words = table.weight.numpy().astype(np.float32)
            rows = [words[ids].mean(axis=0) if ids else words[numbers[token]] for token, ids in plan.items()]
            own = [numbers[token] for token in plan]
            adapters[f"{TEXT_ENCODER}_tokens"] = TokensAdapter(TEXT_ENCODER, table, [*plan], own, np.stack(rows))
    for component in networks.values():
        freeze(component.layer)
    for name, adapter in adapters.items():
        model.add_sublayer(name, adapter)
    model.adapters = {**model.adapters, **adapters}
    get_logger().info("trained are only %s", "; ".join(map(_describe, adapters.values())))


def _describe(adapter) -> str:
    if isinstance(adapter, LoraAdapter):
        return f"{len(adapter.layers)} layers of {adapter.network} at rank {adapter.rank}"
    return f"{len(adapter.tokens)} tokens ({', '.join(adapter.tokens[:8])}{', …' * (len(adapter.tokens) > 8)})"

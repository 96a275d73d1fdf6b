"""A built model of which adapters alone are trained."""

import numpy as np
import paddle

from ...utils.errors import ConfigError
from ...utils.log import get_logger
from ..model import Model, freeze
from .lora import LoraAdapter, find_layers
from .tokens import TokensAdapter, find_table, plan_tokens

TEXT_ENCODER = "text_encoder"


def adapt(model: Model, config, seed: int) -> None:
    """Give a model with its tokenizer the adapters that `config` (`families.settings.adapters`) asks for, and freeze
    all else; nothing where it asks for none. To be called last when a model is built. Raises ConfigError."""
    if not config.trains_adapters:
        return
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

"""LoRA laid over the weights of a model: W + weight * alpha / r * up @ down, in float32. Several add up. And what the
adapters of a model have learned: as files of their own, and merged into the weights of their base.

Merged with the negative weight, the model is what it was before, to the rounding of float32.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np

from ...utils.checksums import file_sha256
from ...utils.errors import ModelError
from ...utils.files import atomic_dir, write_json
from ..components import ComponentWeights, Weights, is_linear_weight
from ..model_file import TOKENIZER_FOLDER
from .adapter_config import ADAPTER_CONFIG
from .files import LORA_FILE, Lora, LoraPair, find_lora, read_lora, write_lora
from .flag import split_word
from .tokens import TOKEN_FILES, add_tokens, has_tokens, with_rows, write_tokens


def add_loras(weights: Weights, words: Sequence[str]) -> Weights:
    """The model with the LoRAs that words such as "FILE:0.8" name. Raises ConfigError, and ModelError for a file that
    is damaged or does not fit."""
    unet = weights.components.get("unet")
    for word in words:
        file, weight = split_word(word)
        if tokens := has_tokens(file):  # of the folder of a run
            weights = add_tokens(weights, file)
        if not tokens or Path(file, LORA_FILE).is_file():
            weights = merge_lora(weights, read_lora(file, unet and unet.config), weight)
    return replace(weights, metadata={**weights.metadata, "lora": [*words]}) if words else weights


def identify_loras(words: Sequence[str]) -> list[dict]:
    """Of each word such as "FILE:0.8" the SHA-256 of its file, or files, and the weight. Raises ConfigError."""
    found = []
    for file, weight in map(split_word, words):
        tokens, pairs = [*file.glob(TOKEN_FILES)] if file.is_dir() else [], find_lora(file)
        files = sorted(one for one in (*tokens, pairs, pairs.parent / ADAPTER_CONFIG) if one.is_file())
        found.append({"sha256": [file_sha256(one) for one in files], "weight": weight})
    return found


def merge_lora(weights: Weights, lora: Lora, weight: float = 1.0) -> Weights:
    """The model with the pairs of `lora` added, each times `weight`; the arrays of `weights` stay as they are. Raises
    ModelError that names the first layer that does not fit."""
    components = dict(weights.components)
    for name, layers in lora.components.items():
        if name not in components:
            raise ModelError(f"{lora.source} changes the {name}, and the model has none; give a LoRA for this model")
        components[name] = _merge(components[name], name, layers, lora.source, weight)
    return replace(weights, components=components)


def _merge(component: ComponentWeights, name: str, layers: dict, source: str, weight: float) -> ComponentWeights:
    arrays = dict(component.arrays)
    # By underscores, for a file of kohya's: in one network no two layers have the same.
    place = component.source or "the model"
    own = {key.removesuffix(".weight").replace(".", "_"): key for key in arrays if key.endswith(".weight")}
    for layer, pair in layers.items():
        key = own.get(layer.replace(".", "_"))
        if key is None:
            raise ModelError(f"{source} changes {name} {layer}, and {place} has no such layer")
        array = arrays[key]
        shape = array.shape[::-1] if is_linear_weight(key, array) else array.shape
        if _flat(pair.shape) != _flat(shape):
            raise ModelError(
                f"{source} changes {name} {layer} as a weight of {list(pair.shape)}, and it is {list(shape)} in {place}"
            )
        change = (np.float32(weight) * pair.change).reshape(shape)
        arrays[key] = array.astype(np.float32) + (change.T if is_linear_weight(key, array) else change)
    return replace(component, arrays=arrays)


def _flat(shape: Sequence[int]) -> tuple[int, ...]:
    """A shape in which a convolution of 1 x 1 is a linear layer, as it is in some files."""
    return tuple(shape[:2]) if set(shape[2:]) <= {1} else tuple(shape)


def write_adapters(model, folder: Path, average, metadata: dict) -> None:
    """Write to `folder` what other programs read (`files`, `tokens`), of averaged values where there are
    some; and ppldm.json, with `metadata`."""
    with atomic_dir(folder) as target, average.applied() if average else nullcontext():
        lora = lora_of(model)
        if lora.components:
            write_lora(lora, target)
        ids, rows = tokens_of(model)
        write_tokens(dict(zip(ids, rows, strict=True)), target)
        if model.tokenizer:
            model.tokenizer.save(target / TOKENIZER_FOLDER)
        write_json(target / "ppldm.json", {**metadata, "tokens": ids, "ema": average is not None})


def lora_of(model) -> Lora:
    """The low-rank pairs of a model, copied."""
    found = {
        one.network: {name: _pair(layer, one.alpha) for name, layer in one.layers.items()}
        for one in model.adapters.values()
        if one.kind == "lora"
    }
    return Lora(found, source="this run")


def tokens_of(model) -> tuple[dict[str, int], np.ndarray]:
    """(ids of the tokens that a model has trained, by token; their rows [T, D] float32)."""
    for one in model.adapters.values():
        if one.kind == "tokens":
            return dict(zip(one.tokens, one.ids, strict=True)), one.rows().detach().numpy()
    return {}, np.zeros((0, 0), np.float32)


def merged(weights: Weights, model) -> Weights:
    """The weights of the networks of `model` with those of its adapters in them."""
    weights = merge_lora(weights, lora_of(model))
    ids, rows = tokens_of(model)
    if ids:
        text_encoder = with_rows(weights.components["text_encoder"], [*ids.values()], rows)
        weights.components = {**weights.components, "text_encoder": text_encoder}
    return weights


def _pair(layer, alpha: float) -> LoraPair:
    down, up = layer.down.numpy(), layer.up.numpy()
    return LoraPair(down, up, alpha) if down.ndim > 2 else LoraPair(down.T, up.T, alpha)

"""What the adapters of a model have learned: as files of their own, and merged into the weights of their base."""

from contextlib import nullcontext
from pathlib import Path

import numpy as np

from ..utils.files import atomic_dir, write_json
from .components import Weights
from .lora.files import write_lora
from .lora.merge import merge_lora
from .lora.pairs import Lora, LoraPair
from .lora.tokens import with_rows, write_tokens
from .model_file import TOKENIZER_FOLDER


def write_adapters(model, folder: Path, average, metadata: dict) -> None:
    """Write to `folder` what other programs read (`lora.files`, `lora.tokens`), of averaged values where there are
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

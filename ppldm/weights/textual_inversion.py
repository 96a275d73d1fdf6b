"""Textual inversions of others (Gal et al. 2022, arXiv:2208.01618): vectors that stand for one word of a prompt.

diffusers     learned_embeds.safetensors or .bin: {token: [D] or [n, D]}, or a folder with such files
A1111         NAME.pt: {"string_to_param": {"*": [n, D]}}; NAME.safetensors: {"emb_params": [n, D]}; NAME is the token

n vectors are n tokens behind the tokenizer's, TOKEN, TOKEN_1 …, which a TOKEN of a prompt becomes, as in diffusers.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..utils.errors import ConfigError, ModelError
from .components import Weights
from .lora.flag import split_inversion
from .lora.merge import find_table, read_tokens, with_rows

_TEXT_ENCODER = "text_encoder"


def add_inversions(weights: Weights, tokenizer, words: Sequence[str]):
    """(the model, its tokenizer) with the vectors that words such as "FILE" and "FILE:TOKEN" name. Raises ConfigError,
    ModelError for a file that holds anything else, or vectors of another width."""
    found: dict[str, np.ndarray] = {}
    for word in words:
        file, token = split_inversion(word)
        own = read_tokens(file)
        if len(own) != 1 and (token or not own):
            raise ConfigError(f"--textual-inversion {word}: {file} has {len(own)} tokens; name a file of one")
        own = dict(zip([token], own.values(), strict=True)) if token else own
        if twice := found.keys() & own.keys():
            raise ConfigError(f"--textual-inversion: two files are for {min(twice)}; name one FILE:TOKEN")
        found |= own
    if not found:
        return weights, tokenizer
    text_encoder = weights.components[_TEXT_ENCODER]
    width = text_encoder.arrays[find_table(text_encoder.arrays)].shape[1]
    for token, rows in found.items():
        if rows.shape[1] != width:
            raise ModelError(
                f"the textual inversion {token} has vectors of {rows.shape[1]} numbers, and the model's text encoder "
                f"has {width}; give one that was made for this model"
            )
    tokens = {token: [token, *(f"{token}_{number}" for number in range(1, len(rows)))] for token, rows in found.items()}
    first = tokenizer.vocab_size
    try:
        tokenizer = tokenizer.with_tokens([one for own in tokens.values() for one in own])
    except ConfigError as error:
        raise ConfigError(f"{error}: --textual-inversion FILE:TOKEN") from error
    tokenizer.runs = {token: " ".join(own) for token, own in tokens.items()}
    rows = np.concatenate([*found.values()])
    component = with_rows(text_encoder, [*range(first, first + len(rows))], rows)
    return replace(weights, components={**weights.components, _TEXT_ENCODER: component}), tokenizer

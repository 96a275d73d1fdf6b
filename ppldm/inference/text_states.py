"""What a model's network is told of texts: each is encoded once, by itself, whatever it is drawn with."""

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import paddle

from ..utils.errors import ConfigError
from .prompt_weights import parse_weights, tokens_of

_KEPT = 64  # texts: those of Stable Diffusion 1 take 0.24 MB each

# Their mean says nothing of hidden states where it is less than this share of their root mean square: those of a text
# encoder that ends in a norm without a bias have the mean zero but for rounding.
_NO_MEAN = 0.01


class TextStates:
    """Of a model in evaluation mode and its tokenizer."""

    def __init__(self, model, tokenizer):
        self._model, self._tokenizer = model, tokenizer
        self._plain, self._weighted = (lru_cache(_KEPT)(one) for one in (self._encode, self._encode_weighted))

    def encoder(self, weighted: bool = False, num_chunks: int = 1) -> Callable[[list[str]], dict]:
        """What makes of B texts what `model.condition` does [B, …]; where they are `weighted`, each of `num_chunks`,
        where chunks that a text lacks are empty ones, as webui pads the shorter of prompt and negative prompt.
        Raises ConfigError where the model cannot draw by such texts."""
        if weighted:
            check_weighted(self._model, num_chunks)
            return lambda texts: _stack([self._weighted(one, num_chunks) for one in texts])
        return lambda texts: _stack([self._plain(one) for one in texts])

    @paddle.no_grad()
    def _encode(self, text: str) -> dict:
        return self._model.condition(paddle.to_tensor(self._tokenizer.encode([text])))

    @paddle.no_grad()
    def _encode_weighted(self, text: str, num_chunks: int) -> dict:
        chunks = parse_weights(text)
        chunks += [[("", 1.0)]] * (num_chunks - len(chunks))
        parts, words = [], self._model.words
        for ids, weights in (tokens_of(one, self._tokenizer) for one in chunks):
            part = self._model.condition(paddle.to_tensor(ids[None]))
            parts.append(part | {words: emphasise(part[words], weights)})
        return {name: None if one is None else paddle.concat([part[name] for part in parts], axis=1)
                for name, one in parts[0].items()}  # fmt: skip


def check_weighted(model, num_chunks: int = 1) -> None:
    """Raises ConfigError where a model is not drawn only by hidden states of words, or only by those of one chunk."""
    if model.words is None:
        raise ConfigError(
            "--prompt-syntax weighted is for models that look at the state of each word, and this one is also told "
            "one of the whole prompt; omit it"
        )
    if num_chunks > 1 and not model.joins_words:
        raise ConfigError(
            f"BREAK makes {num_chunks} chunks of a prompt, and this model has places for the words of one; omit BREAK"
        )


def emphasise(hidden, weights: np.ndarray):
    """Hidden states [1, L, D] of a chunk, where each token counts by its weight [L]; the same where all are 1."""
    if (weights == 1).all():
        return hidden
    weighted = hidden * paddle.to_tensor(weights).astype(hidden.dtype).reshape([1, -1, 1])
    before, after = (float(one.astype("float32").mean()) for one in (hidden, weighted))
    least = _NO_MEAN * float(hidden.astype("float32").square().mean()) ** 0.5
    return weighted * (before / after) if abs(before) > least and abs(after) > least else weighted


def _stack(conditions: list[dict]) -> dict:
    return {name: None if one is None else paddle.concat([condition[name] for condition in conditions])
            for name, one in conditions[0].items()}  # fmt: skip

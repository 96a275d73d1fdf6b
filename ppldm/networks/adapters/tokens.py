"""Rows of a text encoder's table of words, trained while all others stay as they are (textual inversion: Gal et al.
2022, arXiv:2208.01618).

A row is its first value plus a change that is trained and starts at zero: weight decay draws it back to where it began.
New tokens have ids behind those of the vocabulary, for which the table itself has no rows.
"""

import re

import numpy as np
import paddle
from paddle import nn

from ...utils.errors import ConfigError

_TABLES = ("embed_tokens", "token_embedding")  # LDMBert's, CLIP's


class TokensAdapter(nn.Layer):
    """The rows of `tokens` in place of those of an embedding, at work from when it is made.

    network: the text encoder's name in the model. ids: of the tokens. first: [T, D] float32, where they start.
    """

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
        self.change = self.create_parameter(list(first.shape), default_initializer=nn.initializer.Constant(0.0))
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
    """Tokens to train, in order, to the ids of which the mean is their first row; None for those of the vocabulary.

    wanted: as `families.settings.adapters` reads them, (token, expression) of new ones, (expression, None) of others.
    Raises ConfigError for an expression that nothing matches, and for a new token that is there.
    """
    found: dict[str, list[int] | None] = {}
    for token, pattern in wanted:
        new = pattern is not None
        ids = [number for number, word in enumerate(vocab) if re.search(pattern if new else token, word)]
        if new and token in vocab:
            raise ConfigError(f"--train_tokens {token} is in the vocabulary; train it as ^{re.escape(token)}$")
        if not ids:
            sought = pattern if new else token
            raise ConfigError(f"--train_tokens: nothing in the vocabulary matches {sought}; correct it")
        found |= {token: ids} if new else dict.fromkeys(vocab[number] for number in ids)
    return found

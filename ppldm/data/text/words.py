"""Captions to token ids by their words, each of which the Rust library sees once.

Nothing that a tokenizer of ours does reaches across a space: text is normalised character by character, and cut at
spaces before any token is looked for. So a caption's ids are those of its parts between spaces, one after the other,
and the parts of captions repeat. A caption in a script without spaces is one part, which is seldom kept.
"""

from itertools import chain

import numpy as np
from tokenizers import Tokenizer

# What is kept of parts, some 250 bytes each. Those with more characters are addresses, or texts without spaces.
_MAX_PARTS, _MAX_CHARACTERS = 1 << 16, 32


class WordTokenizer:
    """The ids that a Rust tokenizer gives, in a fraction of its time.

    tokenizer: pads and cuts every caption to one length, at least 3, with one special token before and one behind it.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._empty = np.array(tokenizer.encode("").ids, dtype=np.int64)  # first token, last token, padding
        self._tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._known: dict[str, list[int]] = {}

    def encode(self, captions: list[str]) -> np.ndarray:
        """Token ids, int64 [len(captions), length]."""
        rows = np.tile(self._empty, (len(captions), 1))
        parts = [caption.split(" ") for caption in captions]
        ids = self._ids_of(dict.fromkeys(chain.from_iterable(parts)))
        for row, caption in zip(rows, parts, strict=True):
            found = list(chain.from_iterable([ids[part] for part in caption]))[: len(row) - 2]
            row[1 : len(found) + 1] = found
            row[len(found) + 1] = self._empty[1]
        return rows

    def _ids_of(self, parts: dict[str, None]) -> dict[str, list[int]]:
        ids = {part: self._known.get(part) for part in parts}
        new = [part for part, known in ids.items() if known is None]
        if new:
            encoded = self._tokenizer.encode_batch(new, add_special_tokens=False)
            found = {part: encoding.ids for part, encoding in zip(new, encoded, strict=True)}
            if len(self._known) + len(found) > _MAX_PARTS:
                self._known = {}
            self._known.update((part, ids) for part, ids in found.items() if len(part) <= _MAX_CHARACTERS)
            ids |= found
        return ids

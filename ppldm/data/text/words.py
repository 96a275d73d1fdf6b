"""Captions to token ids by their words, each of which the Rust library sees once.

Nothing that a tokenizer of ours does reaches across a space: text is normalised character by character, and cut at
spaces before any token is looked for. So a caption's ids are those of its parts between spaces, one after the other,
and the parts of captions repeat. A caption in a script without spaces is one part, which is seldom kept.
"""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer

from ...utils.errors import ConfigError
from ...utils.files import is_table, read_json_object, write_json

# What is kept of parts, some 250 bytes each. Those with more characters are addresses, or texts without spaces.
_MAX_PARTS, _MAX_CHARACTERS = 1 << 16, 32


_MOST_ADDED = 10_000  # what the Rust library takes of them grows by their square
ADDED_FILE = "added_tokens.json"  # token to id, as transformers and PaddleNLP have it


def add_tokens(tokenizer: Tokenizer, vocab_size: int, added: Sequence[str]) -> None:
    """Let `added` have the ids behind the vocabulary, whole wherever they stand in a text, and as they are written.
    Raises ConfigError for one that cannot be told from other text."""
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in added])
    for number, token in enumerate(added, vocab_size):
        if tokenizer.token_to_id(token) != number or any(character.isspace() for character in token):
            raise ConfigError(f"the token {token!r} cannot be added: it is there, or has spaces; choose another")


def read_added(folder: Path, vocab_size: int) -> list[str]:
    """The tokens that a tokenizer's folder adds behind its vocabulary, by their ids. Raises ConfigError."""
    path = folder / ADDED_FILE
    ids = read_json_object(path, ConfigError, inside=True) if path.is_file() else {}
    if not is_table(ids, int):
        raise ConfigError(f"{path} does not give a whole number to each token; copy the tokenizer again")
    if len(ids) > _MOST_ADDED:
        raise ConfigError(f"{path} adds {len(ids):,} tokens; at most {_MOST_ADDED:,} are taken behind a vocabulary")
    added = sorted((number, token) for token, number in ids.items() if number >= vocab_size)
    if [number for number, _ in added] != [*range(vocab_size, vocab_size + len(added))]:
        raise ConfigError(f"the ids in {path} do not follow those of its vocabulary; copy the tokenizer again")
    return [token for _, token in added]


def write_added(folder: Path, vocab_size: int, added: Sequence[str]) -> None:
    """Write what `read_added` reads; nothing where nothing is added."""
    if added:
        write_json(folder / ADDED_FILE, {token: number for number, token in enumerate(added, vocab_size)})


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

    def measure(self, caption: str, room: int) -> tuple[int, str]:
        """(its tokens, without the first and the last; the text behind as many as there is room for)."""
        encoding = self._tokenizer.encode(caption, add_special_tokens=False)
        return len(encoding.ids), caption[encoding.offsets[room][0] :] if len(encoding.ids) > room else ""

    def _ids_of(self, parts: dict[str, None]) -> dict[str, list[int]]:
        ids = {part: self._known[part] for part in parts if part in self._known}
        new = [part for part in parts if part not in ids]
        if new:
            encoded = self._tokenizer.encode_batch(new, add_special_tokens=False)
            found = {part: encoding.ids for part, encoding in zip(new, encoded, strict=True)}
            if len(self._known) + len(found) > _MAX_PARTS:
                self._known = {}
            self._known.update((part, ids) for part, ids in found.items() if len(part) <= _MAX_CHARACTERS)
            ids |= found
        return ids

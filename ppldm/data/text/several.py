"""Several tokenizers as one, for a model with several text encoders."""

from pathlib import Path

import numpy as np

from ...config.network_files import beside
from ...utils.checksums import digest_of


class SeveralTokenizers:
    """The tokens of all of them side by side. of: by the name of the text encoder that reads them, in the order in
    which they stand; the first says all else of captions. clip_length: of the tokens of a CLIP, whether or not it is
    there. Each is saved beside the first: in tokenizer_2/ that of `text_encoder_2`."""

    def __init__(self, of: dict, clip_length: int):
        self.of, self.clip_length, self.first = of, clip_length, next(iter(of.values()))
        ends = np.cumsum([one.max_length for one in of.values()]).tolist()
        self.spans = {name: range(end - of[name].max_length, end) for name, end in zip(of, ends, strict=True)}
        self.num_tokens = ends[-1]

    def __getattr__(self, name: str):
        if name == "first":  # not made yet
            raise AttributeError(name)
        return getattr(self.first, name)

    @property
    def seen(self):
        """As of the first."""
        return self.first.seen

    @seen.setter
    def seen(self, words) -> None:
        self.first.seen = words

    @property
    def vocab_sizes(self) -> dict[str, int]:
        """Of each."""
        return {name: one.vocab_size for name, one in self.of.items()}

    @property
    def digest(self) -> str:
        """Of all, and of how many tokens each has."""
        return digest_of([[name, one.digest, one.max_length] for name, one in self.of.items()])

    def encode(self, captions: list[str]) -> np.ndarray:
        """Token ids, int64 [len(captions), num_tokens]."""
        return np.concatenate([one.encode(captions) for one in self.of.values()], axis=1)

    def decode(self, ids: np.ndarray) -> list[str]:
        """The texts of token ids [N, num_tokens]."""
        return self.first.decode(ids[:, : self.first.max_length])

    def save(self, folder) -> None:
        """In `folder` the first, and all in those beside it that they have."""
        self.first.save(folder)
        for name, one in self.of.items():
            one.save(beside(Path(folder), name))

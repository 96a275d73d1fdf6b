"""The embeddings of the captions of a run's rows, from the files of their parts.

Such a file is that of `cached.file`; its header has the `width` of the hidden states and how many `variants` a row has
at most. The variants of a row are the texts that may be drawn of it, in the order of `CaptionRule.texts`, as many as
its code says; a row behind the last of the part is the empty caption, once. It holds neither texts nor sizes: a run has
both from its parts, or from their latents.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...utils.errors import ConfigError, PartError, RowError
from ...utils.processes.workers import map_in_threads
from ..filelist import Source
from ..inputs import TextEmbeddings
from ..open_parts import LastUsed
from ..text.captions import CaptionRule
from .file import CachedFile
from .find import find_cached
from .key import EmbeddingsKey

if TYPE_CHECKING:
    from ..formats.mds.shard import MdsShard


@dataclass(frozen=True)
class EmbeddingsRule:
    """What embeddings a model can train on. key: of its frozen text encoder, without captions or part. empty_is_zeros:
    whether it takes zeros for the empty caption; nothing that is kept depends on it."""

    key: EmbeddingsKey
    empty_is_zeros: bool = False


class CachedEmbeddings:
    """Those of all parts of a run, by the numbers of parts.

    embeddings: the input of the model. parts: (path, how to read it). contents: (bytes, CRC-32) of each. count: how
    many to keep open. Raises ConfigError where captions cannot be enumerated, PartError where embeddings are missing or
    of something else.
    """

    def __init__(
        self,
        rule: EmbeddingsRule,
        embeddings: TextEmbeddings,
        captions: CaptionRule,
        parts: list[tuple[Path, Source]],
        contents: list[tuple[int, int]],
        count: int,
    ):
        self._rule, self._embeddings, self._captions = rule, embeddings, captions
        self._parts, self._contents, self._run_key = parts, contents, rule.key.with_captions(captions)
        map_in_threads(self._find, range(len(parts)), "looking for text embeddings")
        self._open = LastUsed(self._open_part, count)

    def read(self, number: int, row: int, place: int | None) -> np.ndarray:
        """float32 [L, D] of the text at `place` among those of row `row` of part `number`; None: of the empty caption.
        Raises RowError, PartError."""
        file = self._open(number)
        found = file.read(len(file) - 1, 0) if place is None else file.read(row, place)
        if found is None:
            raise PartError(f"{file.path} lacks embeddings of row {row}; complete it with `{file.key.command}`")
        if found.shape != self._embeddings.shape(0, 0):
            raise PartError(f"{file.path} has embeddings of shape {found.shape}, not {self._embeddings.shape(0, 0)}")
        return found

    def _find(self, number: int) -> Path:
        path, source = self._parts[number]
        if shard := self._open_shard(number):
            shard.check(self._rule, self._captions)
            return path
        return find_cached(path, self._key(number), source.latents_dir)

    def _key(self, number: int) -> EmbeddingsKey:
        return self._run_key.of_part(self._parts[number][1], self._contents[number])

    def _open_part(self, number: int):
        return self._open_shard(number) or CachedFile(self._find(number), self._key(number))

    def _open_shard(self, number: int) -> "_MdsEmbeddings | None":
        """A part that has embeddings itself."""
        path, source = self._parts[number]
        if source.format != "mds":
            return None
        from ..formats.mds.shard import MdsShard

        shard = MdsShard(path)
        return _MdsEmbeddings(shard, self._embeddings) if shard.has_caption_latents else None


class _MdsEmbeddings:
    """Those in a shard of MDS, of each row's caption, as a `CachedFile` gives them. It does not say which text encoder
    made them, and has none of the empty caption, for which it gives zeros."""

    def __init__(self, shard: "MdsShard", embeddings: TextEmbeddings):
        self.path, self._shard, self._shape = shard.path, shard, embeddings.shape(0, 0)

    def check(self, rule: EmbeddingsRule, captions: CaptionRule) -> None:
        """Raises ConfigError, PartError where these embeddings cannot be those of the run."""
        if captions.weights or captions.clean:
            raise ConfigError(f"{self.path} holds embeddings of one caption; omit --captions and --clean_captions")
        if captions.drop_probability and not rule.empty_is_zeros:
            raise ConfigError(
                f"{self.path} holds no embedding of an empty caption; train with --empty_caption zeros, as "
                "micro_diffusion does, or with --caption_drop 0"
            )
        try:
            self._shard.read_caption_latents(0, self._shape)
        except RowError as error:
            if error.reason == "latents":
                raise PartError(f"{error}; set --model_max_length and the text encoder that made them") from error

    def __len__(self) -> int:
        return len(self._shard) + 1

    def read(self, row: int, place: int) -> np.ndarray:
        """As `CachedFile.read`; the last row is the empty caption."""
        if row == len(self._shard):
            return np.zeros(self._shape, np.float32)
        return self._shard.read_caption_latents(row, self._shape).astype(np.float32)

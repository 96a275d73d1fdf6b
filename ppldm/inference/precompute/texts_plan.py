"""The embeddings of captions that `ppldm precompute` is asked for: which files, how large. No paddle."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...data.cached.embeddings import EmbeddingsRule
from ...data.cached.file import count_file_bytes
from ...data.cached.key import EmbeddingsKey, cached_path
from ...data.filelist import Source
from ...data.select.selection import Selection
from ...data.text.captions import CaptionRule
from .latents_plan import list_rows


@dataclass(frozen=True)
class TextSettings:
    """What decides the embeddings of any row besides its texts. rule: of the text encoder, whose hidden states have
    `width`. captions: which of a row's texts. folder: where the files go; None: beside the parts."""

    rule: EmbeddingsRule
    width: int
    captions: CaptionRule
    folder: Path | None = None

    @property
    def digest(self) -> str:
        """Of what encodes."""
        return self.rule.digest


@dataclass(frozen=True)
class TextTask:
    """The embeddings of a part. content: bytes and CRC-32 of its file. rows: the numbers of the rows wanted, int64."""

    settings: TextSettings
    path: Path
    source: Source
    content: tuple[int, int]
    rows: np.ndarray

    @property
    def keys(self) -> list[EmbeddingsKey]:
        """Of its one file."""
        return [self.settings.rule.key(self.settings.captions, self.source, self.content)]

    @property
    def paths(self) -> list[Path]:
        """Its file."""
        return [cached_path(self.path, key, self.settings.folder) for key in self.keys]

    @property
    def num_cells(self) -> int:
        """How many rows are wanted, the empty caption among them."""
        return len(self.rows) + 1

    @property
    def labels(self) -> list[str]:
        """What is in its file, for people."""
        return ["captions"]

    def estimate(self, texts_a_row: float) -> list[tuple[int, int]]:
        """(captions, bytes) of its file; of rows that are not wanted there is nothing. texts_a_row: about."""
        count = round(len(self.rows) * texts_a_row) + 1
        (key,) = self.keys
        cells = key.cells({"width": self.settings.width, "variants": 1})
        return [(count, count_file_bytes(cells, key.dtype, np.ones(count, np.uint8), 0))]


def list_text_tasks(settings: TextSettings, sources: list[Source], selections: list[Selection]) -> list[TextTask]:
    """Of all parts of which rows are selected, by any of `selections`."""
    parts = [(path, source.without_parts()) for source in sources for path in source.parts]
    tasks = []
    for (path, source), content, *found in zip(parts, selections[0].contents, *map(list_rows, selections), strict=True):
        rows = np.unique(np.concatenate([rows for rows, _ in found]))
        if len(rows):
            tasks.append(TextTask(settings, path, source, content, rows))
    return tasks

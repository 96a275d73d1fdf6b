"""The rows of a part that is not on this machine, from its cached latents: texts and sizes, and no picture."""

import zlib
from pathlib import Path

import numpy as np

from ...utils.errors import PartError
from ..filelist import Source
from ..formats.index.entries import IndexSummary, find_smallest_side
from ..formats.row import Row
from .file import read_key
from .find import list_cached
from .latents import Latents


class CachedRows:
    """As `formats.rows.Rows`, of the part at `path` that `source` names. Raises PartError without latents of it."""

    has_images = False

    def __init__(self, path, source: Source):
        self.path = Path(path)
        self._latents = Latents(_find_any(self.path, source))
        key = self._latents.key
        self.widths, self.heights = np.asarray(self._latents.widths), np.asarray(self._latents.heights)
        prompts = () if key.idx_to_prompt is None else (zlib.crc32(key.idx_to_prompt.encode()),)
        self.identity = (*key.part, *prompts)

    def __len__(self) -> int:
        return len(self._latents)

    def read(self, row: int) -> Row:
        """Row `row` of [0, len), without a picture. Raises RowError, naming file and row, where it could not be read
        when the latents were made."""
        if not 0 <= row < len(self):
            raise IndexError(f"{self.path} has rows 0 to {len(self) - 1}, no row {row}")
        return self._latents.texts(row)

    def read_fields(self, row: int) -> tuple[str, dict]:
        """(caption, metadata) of row `row`. Raises RowError."""
        read = self.read(row)
        return read.caption, read.meta

    def read_preview(self, row: int) -> np.ndarray | None:
        """The latents of a row's first crop, float32 [C, h, w]; None where they are missing. Raises RowError,
        PartError."""
        moments = self._latents.read(row, 0)
        return None if moments is None else moments[0]

    def count_blank_lines(self, start: int, stop: int) -> int:
        """0: they are not kept."""
        return 0

    def close(self) -> None:
        """Give the file back."""
        self._latents.close()


def summarize_cached(path: Path, source: Source) -> IndexSummary:
    """What the index of a part would tell that is not here. Raises PartError."""
    rows = CachedRows(path, source)
    try:
        return IndexSummary(len(rows), find_smallest_side(rows.widths, rows.heights), rows.identity[:2])
    finally:
        rows.close()


def _find_any(path: Path, source: Source) -> Path:
    """The latents of a part that is not here: of any key, since texts and sizes are the same in all."""
    folder = source.latents_dir or path.parent
    found = list_cached(folder).get(path.name, [])
    if not found:
        raise PartError(f"{path} is not here, and {folder} has no cached latents of it; correct the line, or copy them")
    if len({read_key(one).part for one in found}) > 1:
        raise PartError(
            f"{folder} holds latents of several parts named {path.name}, and the part itself is not here to say which; "
            "keep them in folders of their own"
        )
    return found[0]

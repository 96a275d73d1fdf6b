"""The file of a part's cached latents: what an autoencoder makes of each row and each of its enumerated crops.

In use:

    key = LatentsKey.of(encoder_digest, shapes, crops, "float16").of_part(source, part_content)     # `cached.key`
    path = find_cached(part_path, key, folder)               PartError names the field that differs, and the command
    latents = Latents(path, key)                             writable=True to fill in what is missing
    latents.read(row, crops.variant(crop))                   float32 [2, C, h, w], mean and standard deviation, without
                                                             the scaling factor
    latents.captions(row), latents.meta(row)                 the row's texts, so that the part need not be there
    latents.codes, .widths, .heights                         number of a row's shape; its picture's size as in the index
    create_latents(path, key, header, part)                  with all rows of a part missing

The file is that of `cached.file`. Its header has `channels` and `factor`, pixels a side to one latent, and `engine`
where that was not eager; the code of a row is the number of its shape among those of the key, or `shapes.NO_SHAPE`.
"""

import json
import zlib
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import numpy as np

from ...utils.errors import PartError, RowError
from ..filelist import Source
from ..formats.index.entries import IndexSummary, find_smallest_side
from ..formats.row import Row
from ..formats.rows import Rows
from ..shapes import NO_SHAPE
from .file import CachedFile, create_file, list_cached, read_key
from .key import LatentsKey


def create_latents(path: Path, key: LatentsKey, header: dict, part: Rows) -> None:
    """`cached.file.create_file` for the rows of a part. Raises OSError."""
    sizes = np.stack([part.widths, part.heights])
    create_file(path, key, header, key.find_codes(*sizes), sizes, read_texts(part))


def encode_texts(captions: Iterable[str], meta: dict) -> bytes:
    """The texts of a row as the file has them."""
    parts = (json.dumps(value, ensure_ascii=False, separators=(",", ":")) for value in ([*captions], meta))
    return "\n".join(parts).encode("utf-8", "surrogatepass")


def read_texts(part: Rows, rows: Iterable[int] | None = None) -> list[bytes]:
    """The texts of rows of a part, None for all; nothing for those that cannot be read."""
    texts = []
    for number in range(len(part)) if rows is None else rows:
        try:
            row = part.read(number)
        except RowError:
            texts.append(b"")
        else:
            texts.append(encode_texts((row.caption, *row.other_captions), row.meta))
    return texts


class Latents(CachedFile):
    """An open file of latents."""

    def shape(self, row: int) -> tuple[int, int] | None:
        """(height, width) of a row's crops in pixels; None where it has none, and no latents."""
        code = self.codes[row]
        return None if code == NO_SHAPE else self.key.shapes[code]

    def captions(self, row: int) -> list[str]:
        """All captions of a row. Raises RowError."""
        row = self.texts(row)
        return [row.caption, *row.other_captions]

    def meta(self, row: int) -> dict:
        """The metadata of a row. Raises RowError."""
        return self.texts(row).meta

    def texts(self, row: int) -> Row:
        """A row, without its picture. Raises RowError."""
        text = self.text(row).decode("utf-8", "surrogatepass")
        if not text:
            error = RowError("unreadable", f"{self.path} row {row} could not be read when the file was made")
            raise self.row_error(row) or error
        captions, _, meta = text.partition("\n")
        caption, *others = json.loads(captions)
        return Row(caption, b"", json.loads(meta), tuple(others))


class CachedRows:
    """The rows of a part that is not on this machine, from its latents: texts and sizes, and no picture. path: where it
    would lie. source: how to read it. Raises PartError without latents of it."""

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
    with closing(CachedRows(path, source)) as rows:
        return IndexSummary(len(rows), find_smallest_side(rows.widths, rows.heights), rows.identity[:2])


def _find_any(path: Path, source: Source) -> Path:
    """The latents of a part that is not here: of any key, since texts and sizes are the same in all."""
    folder = source.latents_dir or path.parent
    found = list_cached(folder, path.name)
    if not found:
        raise PartError(f"{path} is not here, and {folder} has no cached latents of it; correct the line, or copy them")
    if len({read_key(one).part for one in found}) > 1:
        raise PartError(
            f"{folder} holds latents of several parts named {path.name}, and the part itself is not here to say which; "
            "keep them in folders of their own"
        )
    return found[0]

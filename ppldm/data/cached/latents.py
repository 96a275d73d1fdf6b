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
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from ...utils.errors import RowError
from ..formats.row import Row
from ..formats.rows import Rows
from ..shapes import NO_SHAPE
from .file import CachedFile, create_file
from .key import LatentsKey


def create_latents(path: Path, key: LatentsKey, header: dict, part: Rows, texts: list[bytes] | None = None) -> None:
    """`cached.file.create_file` for the rows of a part, whose texts are read unless they are given. Raises OSError."""
    sizes = np.stack([part.widths, part.heights])
    create_file(path, key, header, key.find_codes(*sizes), sizes, read_texts(part) if texts is None else texts)


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

    def has_shape(self, row: int, size: tuple[int, int]) -> bool:
        """Whether a row's crops are of this height and width."""
        return self.shape(row) == tuple(size)

    def captions(self, row: int) -> list[str]:
        """All captions of a row. Raises RowError."""
        return json.loads(self._text_of(row).partition("\n")[0])

    def meta(self, row: int) -> dict:
        """The metadata of a row. Raises RowError."""
        return json.loads(self._text_of(row).partition("\n")[2])

    def texts(self, row: int) -> Row:
        """A row, without its picture. Raises RowError."""
        captions, _, meta = self._text_of(row).partition("\n")
        caption, *others = json.loads(captions)
        return Row(caption, b"", json.loads(meta), tuple(others))

    def _text_of(self, row: int) -> str:
        text = self.text(row)
        if not text:
            raise self.row_error(row) or RowError(
                "unreadable", f"{self.path} row {row} could not be read when the file was made"
            )
        return text.decode("utf-8", "surrogatepass")

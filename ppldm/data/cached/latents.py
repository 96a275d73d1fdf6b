"""The file of a part's cached latents: what an autoencoder makes of each row and each of its enumerated crops.

In use:

    key = LatentsKey.of(encoder_digest, shapes, crops, "float16", source, part_content)     # `cached.key`
    path = find_cached(part_path, key, folder, read_key)     PartError names the field that differs, and the command
    latents = Latents(path, key)                             writable=True to fill in what is missing
    latents.read(row, crops.variant(crop))                   float32 [2, C, h, w], mean and standard deviation, without
                                                             the scaling factor
    latents.captions(row), latents.meta(row)                 the row's texts, so that the part need not be there
    latents.codes, .widths, .heights                         number of a row's shape; its picture's size as in the index
    create_latents(path, key, C, f, codes, sizes, texts)     with all rows missing; texts from `encode_texts`

The file is that of `cached.file`. Its header has `channels` and `factor`, pixels a side to one latent, and `engine`
where that was not eager; the code of a row is the number of its shape among those of the key, or `shapes.NO_SHAPE`.
"""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from ...config.data import EAGER
from ...utils.errors import ConfigError, RowError
from ..formats.row import Row
from ..formats.rows import Rows
from ..shapes import NO_SHAPE
from .file import CachedFile, create_file
from .key import LatentsKey


def create_latents(
    path: Path,
    key: LatentsKey,
    channels: int,
    factor: int,
    codes: np.ndarray,
    sizes: np.ndarray,
    texts: list[bytes],
    engine: str = EAGER,
) -> None:
    """`cached.file.create_file` for latents of `channels`, one for `factor` pixels a side, that `engine` computes."""
    header = {"channels": channels, "factor": factor, **({"engine": engine} if engine != EAGER else {})}
    create_file(path, key, header, codes, sizes, texts)


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

    @property
    def engine(self) -> str:
        """What computed them (`--engine`). It decides no more than last bits, so it is no part of the key; but the rows
        of a file have all one."""
        return self.header.get("engine", EAGER)

    def check_engine(self, engine: str) -> None:
        """Raises ConfigError where `engine` may not compute what is missing."""
        if engine != self.engine:
            raise ConfigError(
                f"{self.path} lacks rows, and those it has were computed with --engine {self.engine}; complete it with "
                f"`{self.key.command} --engine {self.engine}`, or delete it"
            )

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

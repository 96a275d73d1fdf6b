"""What reads rows needs no more than this, whatever format they have."""

from pathlib import Path
from typing import Protocol

import numpy as np

from .row import Row


class Rows(Protocol):
    """`widths`, `heights`: uint16 [rows], pixels as shown, 0 where unknown. `identity`: another one for other rows; it
    begins with bytes and CRC-32 of the file with the rows. `has_images`: where not, rows have latents in their place.
    The file is closed by `close()` or with the last reference.
    """

    path: Path
    widths: np.ndarray
    heights: np.ndarray
    identity: tuple[int, ...]
    has_images: bool

    def __len__(self) -> int: ...

    def read(self, row: int) -> Row:
        """Row `row` of [0, len). Raises RowError, naming file and row, where it is damaged."""

    def read_fields(self, row: int) -> tuple[str, dict]:
        """(caption, metadata) of row `row`, without its image where the format allows. Raises RowError."""

    def count_blank_lines(self, start: int, stop: int) -> int:
        """Lines before the rows [start, stop), and after the last row where `stop` is len, that hold only white space:
        they are not rows and have no numbers. Raises RowError where they cannot be read."""

    def close(self) -> None: ...

"""Every format that a filelist can name, behind one interface: the rows of a file, numbered from 0.

What reads rows needs no more than `Rows`; order, resume, counts and filters know no format.
"""

from contextlib import closing
from pathlib import Path
from typing import Protocol

import numpy as np

from .csv_table import CsvTable
from .filelist import Source
from .image_folder import ImageFolder
from .indexed import IndexedRows
from .parquet_table import ParquetTable
from .part import Part
from .part import count_rows as count_part_rows
from .row import Row
from .tar_shard import TarShard

_FORMATS: dict[str, type[IndexedRows]] = {
    "webdataset": TarShard,
    "parquet": ParquetTable,
    "folder": ImageFolder,
    "csv": CsvTable,
}


class Rows(Protocol):
    """`widths`, `heights`: uint16 [rows], pixels as shown, 0 where unknown. The file is closed by `close()` or with the
    last reference."""

    path: Path
    widths: np.ndarray
    heights: np.ndarray

    def __len__(self) -> int: ...

    def read(self, row: int) -> Row:
        """Row `row` of [0, len). Raises RowError, naming file and row, where it is damaged."""

    def close(self) -> None: ...


def open_part(path, source: Source) -> Rows:
    """What a line of the filelist `source` names, in the format it says; indexed first where that was not done.

    Raises PartError, ConfigError, OutputError.
    """
    if source.format == "part":
        return Part(path)
    if source.format == "webdataset":
        return TarShard(path, source.idx_to_prompt)
    return _FORMATS[source.format](path)


def count_rows(path, source: Source) -> int:
    """The number of rows; from the header of the index alone where that fits. Raises as `open_part`."""
    if source.format == "part":
        return count_part_rows(path)
    count = _FORMATS[source.format].count(path)
    if count is not None:
        return count
    with closing(open_part(path, source)) as part:
        return len(part)

"""Every format that a filelist can name, behind one interface: the rows of a file, numbered from 0.

What reads rows needs no more than `Rows`; order, resume, counts and filters know no format.
"""

import os
import random
from collections.abc import Iterable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np

from ..utils.log import get_logger, progress
from ..utils.workers import map_in_threads, map_unordered
from .csv_table import CsvTable
from .filelist import Source
from .image_folder import ImageFolder
from .indexed import IndexedRows
from .parquet_table import ParquetTable
from .part import Part
from .row import Row
from .tar_shard import TarShard

_FORMATS: dict[str, type[IndexedRows]] = {
    "webdataset": TarShard,
    "parquet": ParquetTable,
    "folder": ImageFolder,
    "csv": CsvTable,
}


class Rows(Protocol):
    """`widths`, `heights`: uint16 [rows], pixels as shown, 0 where unknown. `identity`: another one for other rows. The
    file is closed by `close()` or with the last reference."""

    path: Path
    widths: np.ndarray
    heights: np.ndarray
    identity: tuple[int, ...]

    def __len__(self) -> int: ...

    def read(self, row: int) -> Row:
        """Row `row` of [0, len). Raises RowError, naming file and row, where it is damaged."""

    def read_fields(self, row: int) -> tuple[str, dict]:
        """(caption, metadata) of row `row`, without its image where the format allows. Raises RowError."""

    def close(self) -> None: ...


def open_part(path, source: Source) -> Rows:
    """What a line of the filelist `source` names, in the format it says; indexed first where that was not done.

    Raises PartError, ConfigError, OutputError.
    """
    if source.format == "part":
        return Part(path, source.layout)
    if source.format == "webdataset":
        return TarShard(path, source.idx_to_prompt)
    return _FORMATS[source.format](path)


def count_rows(path, source: Source) -> int:
    """The number of rows; from the header of the index alone where that fits. Raises as `open_part`."""
    count = _count(Path(path), source)
    if count is not None:
        return count
    with closing(open_part(path, source)) as part:
        return len(part)


def build_indexes(paths: Iterable, source: Source, num_workers: int = 1) -> list[int]:
    """The number of rows of each file, after indexing those that have no index yet, in several processes.

    `source` says how to read them. Raises as `open_part`.
    """
    paths, source = [Path(path) for path in paths], source.without_parts()
    found = map_in_threads(partial(_count, source=source), paths, "counting rows")
    counts = {path: count for path, count in zip(paths, found, strict=True) if count is not None}
    missing = [path for path in dict.fromkeys(paths) if path not in counts]
    if len(missing) > 1:
        get_logger().info("indexing %d of %d parts, once", len(missing), len(paths))
    # Ranks that index the same parts at the same time meet at different ones.
    random.SystemRandom().shuffle(missing)
    total = sum(os.path.getsize(path) for path in missing)
    with progress(total=total, desc="index", unit="B", unit_scale=True, delay=3, disable=len(missing) < 2) as bar:
        for path, rows in map_unordered(partial(count_rows, source=source), missing, num_workers):
            counts[path] = rows
            bar.update(os.path.getsize(path))
    return [counts[path] for path in paths]


def _count(path: Path, source: Source) -> int | None:
    """The number of rows of a file that has an index."""
    if source.format == "part":
        return Part.count(path, source.layout)
    return _FORMATS[source.format].count(path)

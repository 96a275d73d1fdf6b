"""Parts that are kept open: as many as the order of rows reads from at a time, within the limit on open files.

The order (`ppldm.data.order.rows`) draws from one window of runs of consecutive rows at a time, with weights from one
window of every list, with rows of several shapes from one of every bucket. A cache that holds the parts of these
windows opens a part once a window; a smaller one opens it again and again.
"""

import resource
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from ..utils.store.cache import is_there
from .filelist import Source
from .formats.open import open_part
from .formats.open_file import changed, gone
from .formats.rows import Rows
from .order.rows import RUN_LENGTH, WINDOW_RUNS, bucket_window_runs

_MIN_OPEN_PARTS = 16
# A file that is copied has two files open, itself and its copy; the rest of the process needs some as well.
_FILES_OF_A_PART = 2
_OTHER_FILES = 256
T = TypeVar("T")


class LastUsed(Generic[T]):
    """`get(number)` is `open(number)`, the latest `count` of which are kept; a copy elsewhere opens its own."""

    def __init__(self, open: Callable[[int], T], count: int):
        self._arguments = open, count
        self.get: Callable[[int], T] = lru_cache(maxsize=count)(open)

    def __getstate__(self):
        return self._arguments

    def __setstate__(self, state):
        self.__init__(*state)


class OpenParts:
    """Opens parts by their number and keeps the latest `count` open. One that falls out closes with its last user.

    names: (path, how to read it). contents: (bytes, CRC-32) that each had when the run began; None: not known.
    """

    def __init__(
        self,
        names: Sequence[tuple[Path, Source]],
        count: int,
        contents: Sequence[tuple[int, int]] | None = None,
    ):
        self.names, self.count, self.contents = names, count, contents
        self._open = LastUsed(self._open_part, count)

    def __getitem__(self, number: int) -> Rows:
        """Raises PartError, ConfigError, OutputError."""
        return self._open.get(number)

    def path(self, number: int) -> Path:
        """Where a part lies."""
        return self.names[number][0]

    def _open_part(self, number: int) -> Rows:
        path, source = self.names[number]
        if not is_there(path) and source.latents != "cached":
            raise gone(path)
        rows = open_part(path, source)
        if self.contents and rows.identity[:2] != self.contents[number]:
            rows.close()
            raise changed(path)
        return rows


def count_open_parts(
    rows_of_parts: Sequence[int], parts_of_lists: Sequence[int], weights: Sequence[float] | None
) -> int:
    """How many parts to keep open.

    rows_of_parts: rows of each part that the order draws from, [parts], or of each of several shapes, [parts, shapes].
    parts_of_lists: how many parts each list has. weights: of the lists, each of which then has an order of its own;
    None where one order goes over all.
    """
    if weights is None:
        parts_of_lists, weights = [len(rows_of_parts)], [1.0]
    lists = np.split(np.asarray(rows_of_parts), np.cumsum(parts_of_lists)[:-1])
    needed = sum(_count_of_list(rows) for rows, weight in zip(lists, weights, strict=True) if weight)
    return max(_MIN_OPEN_PARTS, min(needed, _count_allowed()))


def _count_of_list(rows_of_parts: np.ndarray) -> int:
    buckets = rows_of_parts.reshape(len(rows_of_parts), -1).T
    buckets = buckets[buckets.any(axis=1)]
    window_runs = bucket_window_runs(len(buckets)) if len(buckets) > 1 else WINDOW_RUNS
    needed = sum(count_parts_in_window(rows, window_runs=window_runs) for rows in buckets)
    return min(needed, np.count_nonzero(buckets.any(axis=0)))


def count_parts_in_window(
    rows_of_parts: Sequence[int], run_length: int = RUN_LENGTH, window_runs: int = WINDOW_RUNS
) -> int:
    """The most parts that a window of `Order` can read from: those of its runs, were they the runs with the most."""
    ends = np.cumsum(np.asarray(rows_of_parts, dtype=np.int64))
    if not len(ends) or not ends[-1]:
        return 0
    firsts = np.arange(0, ends[-1], run_length)
    lasts = np.minimum(firsts + run_length, ends[-1]) - 1
    parts = np.searchsorted(ends, lasts, side="right") - np.searchsorted(ends, firsts, side="right") + 1
    if len(parts) > window_runs:
        parts = np.partition(parts, -window_runs)[-window_runs:]
    return min(int(parts.sum()), int(np.count_nonzero(rows_of_parts)))


def _count_allowed() -> int:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 16 if files == resource.RLIM_INFINITY else (files - _OTHER_FILES) // _FILES_OF_A_PART

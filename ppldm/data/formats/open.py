"""Every format that a filelist can name, behind one interface: the rows of a file, numbered from 0.

As many parts are kept open as the order of rows reads from at a time, within the limit on open files: one window of
runs of consecutive rows, with weights of every list, with rows of several shapes of every bucket."""

import random
import resource
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from functools import cache, lru_cache, partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Generic, TypeVar

import numpy as np

from ...utils.log import get_logger, progress
from ...utils.processes.workers import map_in_threads, map_unordered
from ...utils.store.cache import is_there, size_of
from ..filelist import Source
from ..order import RUN_LENGTH, WINDOW_RUNS, bucket_window_runs
from .base import changed, gone
from .index import IndexSummary, find_smallest_side
from .layouts import FORMATS, index_layout
from .row import Rows

_MIN_OPEN_PARTS = 16
# A file that is copied has two files open, itself and its copy; the rest of the process needs some as well.
_FILES_OF_A_PART = 2
_OTHER_FILES = 256
T = TypeVar("T")


def open_part(path, source: Source) -> "Rows":
    """What a line of a filelist names; indexed first if need be. Raises PartError, ConfigError, OutputError."""
    if _is_only_cached(Path(path), source):
        from ..cached.file import CachedRows

        return CachedRows(path, source)
    open_rows = _class_of(source.format)
    if source.format == "webdataset":
        return open_rows(path, source.idx_to_prompt, source.layout)
    return open_rows(path, source.layout)


@cache
def _class_of(name: str) -> Any:  # a kind of IndexedRows
    return resolve_name(f"{__package__}.{FORMATS[name].reader}")


def summarize(path, source: Source) -> IndexSummary:
    """How many rows, and how small; only from the header of the index where that fits. Raises as `open_part`."""
    summary = find_summary(Path(path), source)
    if summary is not None:
        return summary
    with closing(open_part(path, source)) as part:
        from ..select.columns import build_columns

        build_columns(part, source)
        return _summary_of(part)


def _summary_of(rows: Rows) -> IndexSummary:
    return IndexSummary(len(rows), find_smallest_side(rows.widths, rows.heights), rows.identity[:2])


def build_indexes(paths: Iterable, source: Source, num_workers: int = 1) -> list[IndexSummary]:
    """What each file holds; those without an index are indexed in several processes. Raises as `open_part`."""
    paths, source = [Path(path) for path in paths], source.without_parts()
    found = map_in_threads(partial(find_summary, source=source), paths, "counting rows")
    summaries = {path: summary for path, summary in zip(paths, found, strict=True) if summary is not None}
    missing = [path for path in dict.fromkeys(paths) if path not in summaries]
    if len(missing) > 1:
        get_logger().info("indexing %d of %d parts, once", len(missing), len(paths))
    # Ranks that index the same parts at the same time meet at different ones.
    random.SystemRandom().shuffle(missing)
    total = sum(size_of(path) for path in missing)
    with progress(total=total, desc="index", unit="B", unit_scale=True, delay=3, disable=len(missing) < 2) as bar:
        for path, summary in map_unordered(partial(summarize, source=source), missing, num_workers):
            summaries[path] = summary
            bar.update(size_of(path))
    return [summaries[path] for path in paths]


def find_summary(path: Path, source: Source) -> IndexSummary | None:
    """What the index tells of a file that has one, or the latents of one that is not here."""
    if _is_only_cached(path, source):
        with closing(open_part(path, source)) as rows:
            return _summary_of(rows)
    return _class_of(source.format).summarize(path, index_layout(source.layout, source.format))


def _is_only_cached(path: Path, source: Source) -> bool:
    """Whether the rows of a part are to be read from its latents, as it is not here itself."""
    return source.latents == "cached" and not is_there(path)


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
    names: (path, how to read it). contents: (bytes, CRC-32) that each had when the run began; None: not known."""

    def __init__(
        self, names: Sequence[tuple[Path, Source]], count: int, contents: Sequence[tuple[int, int]] | None = None
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
    """How many parts to keep open. rows_of_parts: rows of each part that the order draws from, [parts], or of each of
    several shapes, [parts, shapes]. parts_of_lists: how many parts each list has. weights: of the lists, each of which
    then has an order of its own; None where one order goes over all."""
    if weights is None:
        parts_of_lists, weights = [len(rows_of_parts)], [1.0]
    lists = np.split(np.asarray(rows_of_parts), np.cumsum(parts_of_lists)[:-1])
    needed = sum(_count_of_list(rows) for rows, weight in zip(lists, weights, strict=True) if weight)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = 1 << 16 if files == resource.RLIM_INFINITY else (files - _OTHER_FILES) // _FILES_OF_A_PART
    return max(_MIN_OPEN_PARTS, min(needed, allowed))


def _count_of_list(rows_of_parts: np.ndarray) -> int:
    buckets = rows_of_parts.reshape(len(rows_of_parts), -1).T
    buckets = buckets[buckets.any(axis=1)]
    window_runs = bucket_window_runs(len(buckets)) if len(buckets) > 1 else WINDOW_RUNS
    needed = sum(count_parts_in_window(rows, window_runs=window_runs) for rows in buckets)
    return min(needed, np.count_nonzero(buckets.any(axis=0)))


def count_parts_in_window(rows_of_parts: Sequence[int], run_length=RUN_LENGTH, window_runs=WINDOW_RUNS) -> int:
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

"""Every format that a filelist can name, behind one interface: the rows of a file, numbered from 0.

What reads rows needs no more than `Rows`; order, resume, counts and filters know no format.
"""

import random
from collections.abc import Iterable
from contextlib import closing
from functools import cache, partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from ...utils.log import get_logger, progress
from ...utils.processes.workers import map_in_threads, map_unordered
from ...utils.store.cache import is_there, size_of
from ..filelist import Source
from ..select.columns import build_columns
from .index.entries import IndexSummary, find_smallest_side
from .layouts import FORMATS, index_layout
from .rows import Rows


def open_part(path, source: Source) -> Rows:
    """What a line of the filelist `source` names, in the format it says; indexed first where that was not done.

    Raises PartError, ConfigError, OutputError.
    """
    if _is_only_cached(Path(path), source):
        from ..cached.latents import CachedRows

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
        build_columns(part, source)
        return IndexSummary(len(part), find_smallest_side(part.widths, part.heights), part.identity[:2])


def build_indexes(paths: Iterable, source: Source, num_workers: int = 1) -> list[IndexSummary]:
    """What each file holds, after indexing those that have no index yet, in several processes.

    `source` says how to read them. Raises as `open_part`.
    """
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
        from ..cached.latents import summarize_cached

        return summarize_cached(path, source)
    return _class_of(source.format).summarize(path, index_layout(source.layout, source.format))


def _is_only_cached(path: Path, source: Source) -> bool:
    """Whether the rows of a part are to be read from its latents, as it is not here itself."""
    return source.latents == "cached" and not is_there(path)

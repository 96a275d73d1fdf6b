"""What the commands of this folder share: the parts that filelists name, their rows, and tasks over both.

A part that cannot be opened is a finding, not the end of the command: it is listed with its error.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from ..data.cached.file import list_cached
from ..data.filelist import Source, read_sources
from ..data.formats.layouts import DEFAULT_LAYOUT
from ..data.formats.open import open_part, summarize
from ..data.formats.row import Rows
from ..data.select.columns import read_columns
from ..utils.errors import DataError, OutputError, RowError
from ..utils.files import make_output_dir
from ..utils.log import progress
from ..utils.processes.workers import map_unordered
from ..utils.store.cache import is_there

Result = TypeVar("Result")

_ROWS_PER_TASK = 1000


@dataclass(frozen=True)
class PartName:
    """A line of a filelist. `source` says how to read it and names no other parts, so that this pickles small."""

    path: Path
    source: Source


@dataclass(frozen=True)
class Indexed:
    """Parts in the order of the filelists: rows of those that can be opened, errors of the others."""

    rows: dict[PartName, int]
    bad: dict[PartName, str]

    @property
    def num_rows(self) -> int:
        return sum(self.rows.values())

    def bad_parts(self) -> dict[str, str]:
        return {str(part.path): error for part, error in self.bad.items()}


@dataclass(frozen=True)
class Span:
    """Rows [start, stop) of a part."""

    part: PartName
    start: int
    stop: int


def list_parts(
    filelists: list[str], layout: str = DEFAULT_LAYOUT, must_exist: bool = True, latents_dir: str = ""
) -> list[PartName]:
    """The parts of filelists and their lists, in order; `layout` of those that name none. Parts that need not exist are
    read from their latents. Raises ConfigError, FilelistError."""
    folder, parts = Path(latents_dir) if latents_dir else None, []
    for filelist in filelists:
        for source in read_sources(filelist, layout, must_exist, latents_dir=folder):
            for path in source.parts:
                own = source.without_parts()
                if not (must_exist or is_there(path)) and list_cached(own.latents_dir or path.parent, path.name):
                    own = replace(own, latents="cached")
                parts.append(PartName(path, own))
    return parts


def index_parts(parts: list[PartName], num_workers: int, with_columns: bool = False) -> Indexed:
    """Count the rows of parts, building the indexes that are missing; `with_columns` those too that `--where` reads."""
    counted = map_unordered(partial(_count, with_columns=with_columns), parts, num_workers)
    found: dict[PartName, int | str] = dict(progress(counted, total=len(parts), desc="index", unit="part", delay=1))
    rows = {part: count for part in parts if isinstance(count := found[part], int)}
    return Indexed(rows, {part: error for part in parts if isinstance(error := found[part], str)})


def over_rows(
    function: Callable[[Span], Result], indexed: Indexed, num_workers: int, name: str, max_rows: int | None = None
) -> Iterator[tuple[Span, Result]]:
    """`function` over all rows of the parts that can be opened, cut into spans, under a progress bar named `name`; with
    `max_rows`, over about so many, evenly spread: the same ones for any number of processes."""
    spans = [
        Span(part, start, min(start + _ROWS_PER_TASK, rows))
        for part, rows in indexed.rows.items()
        for start in range(0, rows, _ROWS_PER_TASK)
    ]
    if max_rows is not None and max_rows < indexed.num_rows:
        spans = thin_out(spans, max_rows)
    with progress(total=sum(span.stop - span.start for span in spans), desc=name, unit="row") as bar:
        for span, result in map_unordered(function, spans, num_workers):
            yield span, result
            bar.update(span.stop - span.start)


def thin_out(spans: list[Span], max_rows: int) -> list[Span]:
    """The beginning of each span, of equal shares, or of evenly spread spans where even one row of each is too much."""
    spans = spans[:: -(-len(spans) // max_rows)]
    share = max_rows / sum(span.stop - span.start for span in spans)
    if share >= 1:
        return spans
    return [replace(span, stop=span.start + max(1, int((span.stop - span.start) * share))) for span in spans]


def check_output(path: str) -> None:
    """Raises OutputError, before the work, where a result cannot be written to the file `path`."""
    make_output_dir(Path(path).parent)
    if Path(path).is_dir():
        raise OutputError(f"--out {path} is a folder; name a file")


def describe_bad_parts(bad_parts: dict[str, str]) -> list[str]:
    lines = [f"  cannot be opened: {error}" for error in list(bad_parts.values())[:10]]
    return lines + ([f"  and {len(bad_parts) - 10} more"] if len(bad_parts) > 10 else [])


def count_not_rows(part: Rows, span: Span) -> Counter:
    """What lies between the rows of a span and has no number, by reason: `blank` lines."""
    with suppress(RowError):
        if blank := part.count_blank_lines(span.start, span.stop):
            return Counter(blank=blank)
    return Counter()


def describe_not_rows(not_rows: dict[str, int]) -> list[str]:
    return [f"  not rows, {reason} lines: {count}" for reason, count in not_rows.items()]


def locate(indexed: Indexed, row: int) -> tuple[PartName, int]:
    """The part of a row counted through all parts, and the row's number in it."""
    for part, rows in indexed.rows.items():
        if row < rows:
            return part, row
        row -= rows
    raise IndexError(f"no row {row}")


def open_rows(part: PartName) -> Rows:
    return open_part(part.path, part.source)


def _count(part: PartName, with_columns: bool) -> int | str:
    """The rows of a part, or why it cannot be opened."""
    try:
        summary = summarize(part.path, part.source)
        if with_columns:
            with closing(open_rows(part)) as rows:
                read_columns(rows, part.source, ())
        return summary.rows
    except DataError as error:
        return str(error)

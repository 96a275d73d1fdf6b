"""Which rows are trained on, decided before training starts: those that are large enough and meet `--where`.

The rows of all sources are numbered through; a `Selection` is a sequence of some of these numbers, in ascending order.
It costs a bit a row, and nothing for a part of which every row is used. It is a function of the parts and the condition
alone.

A condition on width and height is answered by the indexes, one on captions and metadata by the columns beside them
(`ppldm.data.select.sidecar`), without reading a row.
"""

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

from ...utils.errors import DataError
from ...utils.log import get_logger, progress
from ...utils.workers import map_unordered
from ..filelist import Source
from ..formats.open import Rows, build_indexes, open_part
from .columns import INDEX_FIELDS, Block
from .evaluate import judge
from .expression import Expression, field_names
from .sidecar import read_columns

TOO_SMALL = "too small"

_MASKS_UNPACKED = 64
_PARTS_AT_ONCE = 32  # that a process is given: handing out one by one takes as long as judging


class Selection:
    """Some of the rows of all parts. `len()` is how many; `selection[i]` the number of the i-th, ascending.

    `list_sizes`: selected rows of each source. `num_rows`: all rows. `skipped`: rows that are not selected, by reason.
    `contents`: (bytes, CRC-32) of each part as it was indexed, None where that is not known.
    """

    def __init__(
        self,
        rows_of_parts: list[int],
        masks: list[np.ndarray | None],
        parts_of_lists: list[int],
        skipped,
        contents: list[tuple[int, int]] | None = None,
    ):
        """masks: bits of a part's rows, packed, set where selected; None for all."""
        self.contents = contents
        self.starts = np.cumsum([0, *rows_of_parts])
        sizes = [
            rows if mask is None else int(np.unpackbits(mask).sum())
            for rows, mask in zip(rows_of_parts, masks, strict=True)
        ]
        self._selected_starts = np.cumsum([0, *sizes])
        self.list_sizes = np.diff(self._selected_starts[np.cumsum([0, *parts_of_lists])]).tolist()
        self.num_rows = int(self.starts[-1])
        self.skipped = Counter(skipped)
        self._masks = masks
        self._unpack = lru_cache(maxsize=_MASKS_UNPACKED)(self._unpack_part)

    def __len__(self) -> int:
        return int(self._selected_starts[-1])

    @property
    def rows_of_parts(self) -> np.ndarray:
        """Selected rows of each part, int64 [parts]."""
        return np.diff(self._selected_starts)

    def __getitem__(self, position: int) -> int:
        if not 0 <= position < len(self):
            raise IndexError(f"{len(self)} rows are selected, there is no place {position}")
        part = int(np.searchsorted(self._selected_starts, position, side="right")) - 1
        place = position - int(self._selected_starts[part])
        return int(self.starts[part]) + (place if self._masks[part] is None else int(self._unpack(part)[place]))

    def __getstate__(self):
        return {key: value for key, value in self.__dict__.items() if key != "_unpack"}

    def __setstate__(self, state):
        self.__dict__.update(state)
        self._unpack = lru_cache(maxsize=_MASKS_UNPACKED)(self._unpack_part)

    def _unpack_part(self, part: int) -> np.ndarray:
        return np.flatnonzero(np.unpackbits(self._masks[part])).astype(np.uint32)

    def log(self) -> None:
        """Say how many rows are left, and why not the others, as a small table in the log."""
        lines = [("rows", self.num_rows), *self.skipped.most_common(), ("rows used", len(self))]
        width = max(len(name) for name, _ in lines)
        for name, count in lines:
            get_logger().info("  %-*s %12s", width, name, f"{count:,}")


def select_rows(
    sources: list[Source], where: Expression | None = None, min_side: int = 0, num_workers: int = 1
) -> Selection:
    """The rows of all sources for which `where` is true, of images whose sides are unknown or at least `min_side`.

    Parts without an index are indexed first. Raises PartError, OutputError, and DataError where a list that is to be
    drawn from has no rows left.
    """
    summaries = [summary for source in sources for summary in build_indexes(source.parts, source, num_workers)]
    rows_of_parts = [summary.rows for summary in summaries]
    parts = [(path, source.without_parts()) for source in sources for path in source.parts]
    masks: list[np.ndarray | None] = [None] * len(parts)
    skipped = Counter()
    if where is not None or min_side > 0:
        # Of rows that are to be read, each process takes a part at a time; sizes are faster here than there.
        num_workers = num_workers if where is not None and field_names(where) - INDEX_FIELDS else 1
        judge_parts = partial(_judge_parts, where=where, min_side=min_side)
        tasks = [
            (number, path, source)
            for number, ((path, source), summary) in enumerate(zip(parts, summaries, strict=True))
            if where is not None or summary.smallest_side is None or summary.smallest_side < min_side
        ]
        # Ranks that read the same parts at the same time meet at different ones.
        random.SystemRandom().shuffle(tasks)
        num_rows = sum(rows_of_parts[number] for number, _, _ in tasks)
        at_once = max(1, min(_PARTS_AT_ONCE, len(tasks) // (4 * num_workers)))
        groups = [tasks[start : start + at_once] for start in range(0, len(tasks), at_once)]
        with progress(total=num_rows, desc="selecting rows", unit="row", unit_scale=True, delay=3) as bar:
            for group, found in map_unordered(judge_parts, groups, num_workers):
                for (number, _, _), (mask, reasons) in zip(group, found, strict=True):
                    masks[number] = mask
                    skipped.update(reasons)
                    bar.update(rows_of_parts[number])
    contents = [summary.content for summary in summaries]
    selection = Selection(rows_of_parts, masks, [len(source.parts) for source in sources], skipped, contents)
    _refuse_empty(selection, sources, min_side)
    return selection


def _refuse_empty(selection: Selection, sources: list[Source], min_side: int) -> None:
    for source, size in zip(sources, selection.list_sizes, strict=True):
        if not size and (source.weight or not len(selection)):
            reasons = ", ".join(f"{count} {reason}" for reason, count in selection.skipped.most_common(5))
            raise DataError(
                f"no row of {source.path} can be used (of all: {reasons}; images need sides of {min_side} pixels); "
                "change --where, --resolution or the list"
            )


def _judge_parts(tasks: list[tuple[int, Path, Source]], **how) -> list[tuple[np.ndarray | None, dict]]:
    return [_judge_part(task, **how) for task in tasks]


def _judge_part(
    task: tuple[int, Path, Source], where: Expression | None, min_side: int
) -> tuple[np.ndarray | None, dict]:
    """(packed mask or None for all, skipped rows by reason) of a part (number, path, how to read it)."""
    _, path, source = task
    with closing(open_part(path, source)) as part:
        sizes = {"width": np.asarray(part.widths), "height": np.asarray(part.heights)}
        sides = np.minimum(*sizes.values())
        small = (sides < min_side) & (sides > 0)
        used, reasons = ~small, Counter({TOO_SMALL: int(small.sum())})
        if where is not None:
            start = 0
            for codes, names in _judge_blocks(part, source, where, sizes):
                block = used[start : start + len(codes)]
                counts = np.bincount(codes[block], minlength=len(names) + 1)
                for name, count in zip(names, counts[1:].tolist(), strict=True):
                    reasons[name] += count
                block &= codes == 0
                start += len(codes)
    return None if used.all() else np.packbits(used), {reason: count for reason, count in reasons.items() if count}


def _judge_blocks(part: Rows, source: Source, where: Expression, sizes: dict) -> list[tuple[np.ndarray, list[str]]]:
    """(code of each row, reasons), as `judge` gives them, of runs of rows, one after the other."""
    names = field_names(where) - INDEX_FIELDS
    if not names:
        return [judge(where, sizes, len(part))]
    return list(_judge_columns(read_columns(part, source, names), where, sizes))


def _judge_columns(blocks: list[Block], where: Expression, sizes: dict) -> Iterator[tuple[np.ndarray, list[str]]]:
    start = 0
    for num_rows, found, errors in blocks:
        own_sizes = {name: values[start : start + num_rows] for name, values in sizes.items()}
        codes, reasons = judge(where, {**found, **own_sizes}, num_rows)
        if errors is not None:
            # Of rows that cannot be read, what the sizes decide stays decided.
            by_size, _ = judge(where, own_sizes, num_rows)
            first = len(reasons) + 1
            codes = np.where(
                by_size > 1, np.where(errors.places < len(errors.values) - 1, first + errors.places, codes), codes
            )
            reasons = reasons + errors.values[:-1]
        yield codes, reasons
        start += num_rows

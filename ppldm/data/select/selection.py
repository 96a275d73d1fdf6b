"""Which rows are trained on, decided before training starts: those that are large enough and meet `--where`.

The rows of all sources are numbered through; a `Selection` is a sequence of some of these numbers, in ascending order:
a bit a row, nothing for a part of which every row is used, with buckets (`ppldm.data.shapes`) a byte more. It is a
function of the parts, the condition and the shapes alone."""

import random
from collections import Counter
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np

from ...utils.errors import DataError
from ...utils.log import get_logger, progress
from ...utils.processes.workers import map_unordered
from ..filelist import Source
from ..formats.open import LastUsed, build_indexes, open_part
from ..shapes import NO_SHAPE, TOO_SMALL, Buckets, ShapeRule, Tally, describe, refusals

_MASKS_UNPACKED = 64
_PARTS_AT_ONCE = 32  # that a process is given: handing out one by one takes as long as judging


class Selection:
    """Some of the rows of all parts. `selection[i]`: the number of the i-th, ascending. `list_sizes`: selected rows of
    each source. `num_rows`: all rows. `skipped`: rows that are not selected, by reason. `contents`: (bytes, CRC-32) of
    each part, None where not known. `buckets`: the shapes of the selected rows, None where all are squares."""

    def __init__(
        self,
        rows_of_parts: list[int],
        masks: list[np.ndarray | None],
        parts_of_lists: list[int],
        skipped,
        contents: list[tuple[int, int]] | None = None,
        buckets: Buckets | None = None,
    ):
        """masks: bits of a part's rows, packed, set where selected; None for all."""
        self.contents, self.buckets = contents, buckets
        self.starts = np.cumsum([0, *rows_of_parts])
        sizes = [
            rows if mask is None else int(np.unpackbits(mask).sum())
            for rows, mask in zip(rows_of_parts, masks, strict=True)
        ]
        # Where the selected rows of each part begin among all that are selected, and where they end. int64 [parts + 1].
        self.part_bounds = np.cumsum([0, *sizes])
        self.list_sizes = np.diff(self.part_bounds[np.cumsum([0, *parts_of_lists])]).tolist()
        self.num_rows = int(self.starts[-1])
        self.skipped = Counter(skipped)
        self._masks, self._unpacked = masks, LastUsed(self._unpack_part, _MASKS_UNPACKED)

    def __len__(self) -> int:
        return int(self.part_bounds[-1])

    def __getitem__(self, position: int) -> int:
        if not 0 <= position < len(self):
            raise IndexError(f"{len(self)} rows are selected, there is no place {position}")
        part = int(np.searchsorted(self.part_bounds, position, side="right")) - 1
        place = position - int(self.part_bounds[part])
        return int(self.starts[part]) + (place if self._masks[part] is None else int(self._unpacked.get(part)[place]))

    def rows_of(self, part: int) -> tuple[np.ndarray, np.ndarray]:
        """The selected rows of a part, by their numbers in it, int64, and the codes of their shapes, uint8."""
        first, end = self.part_bounds[part : part + 2].tolist()
        rows = np.arange(end - first) if self._masks[part] is None else self._unpacked.get(part)
        codes = self.buckets.codes[first:end] if self.buckets else np.zeros(end - first, np.uint8)
        return rows.astype(np.int64), codes

    def _unpack_part(self, part: int) -> np.ndarray:
        return np.flatnonzero(np.unpackbits(self._masks[part])).astype(np.uint32)

    def log(self) -> None:
        """Say how many rows are left, and why not the others, as a small table in the log."""
        lines = [("rows", self.num_rows), *self.skipped.most_common(), ("rows used", len(self))]
        width = max(len(name) for name, _ in lines)
        for name, count in lines:
            get_logger().info("  %-*s %12s", width, name, f"{count:,}")
        for line in describe(self.buckets.report()) if self.buckets else ():
            get_logger().info("%s", line)


def select_rows(
    sources: list[Source], where=None, min_side: int = 0, num_workers: int = 1, shapes: ShapeRule | None = None
) -> Selection:
    """The rows of all sources for which the Expression `where` is true, of images whose sides are unknown or at least
    `min_side`; with `shapes`, of those that get one. Parts without an index are indexed first. Raises PartError,
    OutputError, and DataError where a list that is to be drawn from has no rows left."""
    summaries = [summary for source in sources for summary in build_indexes(source.parts, source, num_workers)]
    rows_of_parts = [summary.rows for summary in summaries]
    parts = [(path, source.without_parts()) for source in sources for path in source.parts]
    masks: list[np.ndarray | None] = [None] * len(parts)
    skipped, starts = Counter(), np.cumsum([0, *rows_of_parts])
    tally = Tally(shapes, int(starts[-1])) if shapes else None
    reads_columns = False
    if where is not None:
        from .columns import INDEX_FIELDS
        from .expression import field_names

        reads_columns = not field_names(where) <= INDEX_FIELDS
    # Of rows that are to be read, each process takes a part at a time; sizes are faster here than there.
    num_workers = num_workers if reads_columns else 1
    tasks = [
        (number, *part)
        for number, (part, summary) in enumerate(zip(parts, summaries, strict=True))
        if where is not None or shapes or (summary.smallest_side or 0) < min_side
    ]
    # Ranks that read the same parts at the same time meet at different ones.
    random.SystemRandom().shuffle(tasks)
    at_once = max(1, min(_PARTS_AT_ONCE, len(tasks) // (4 * num_workers)))
    groups = [tasks[start : start + at_once] for start in range(0, len(tasks), at_once)]
    judge_parts = partial(_judge_parts, where=where, min_side=min_side, shapes=shapes)
    num_rows = sum(rows_of_parts[number] for number, *_ in tasks)
    with progress(total=num_rows, desc="selecting rows", unit="row", unit_scale=True, delay=3) as bar:
        for group, found in map_unordered(judge_parts, groups, num_workers):
            for (number, *_), (masks[number], reasons, *shaped) in zip(group, found, strict=True):
                skipped.update(reasons)
                if tally:
                    tally.add(slice(starts[number], starts[number + 1]), *shaped)
                bar.update(rows_of_parts[number])
    buckets = _settle_shapes(tally, parts, starts, masks, skipped) if tally else None
    contents, parts_of_lists = [summary.content for summary in summaries], [len(source.parts) for source in sources]
    selection = Selection(rows_of_parts, masks, parts_of_lists, skipped, contents, buckets)
    for source, size in zip(sources, selection.list_sizes, strict=True):
        if not size and (source.weight or not len(selection)):
            raise _no_rows(source, selection, min_side)
    return selection


def _settle_shapes(tally: Tally, parts: list, starts: np.ndarray, masks: list, skipped: Counter) -> Buckets:
    """Merge shapes that are too rare; a row for which there is no other is used no more."""
    rare, sizes = tally.rare_rows(), []
    cuts = np.searchsorted(rare, starts)
    for number in np.flatnonzero(np.diff(cuts)).tolist():
        with closing(open_part(*parts[number])) as part:
            rows = rare[cuts[number] : cuts[number + 1]] - starts[number]
            sizes.append(np.stack([np.asarray(part.widths)[rows], np.asarray(part.heights)[rows]]))
    widths, heights = np.concatenate(sizes, axis=1) if sizes else np.empty((2, 0), np.int64)
    merged = tally.merge(rare, widths, heights)
    left_out = rare[tally.codes[rare] == NO_SHAPE]
    for number in np.unique(np.searchsorted(starts, left_out, side="right") - 1).tolist():
        masks[number] = np.packbits(tally.codes[starts[number] : starts[number + 1]] != NO_SHAPE)
    if len(left_out):
        skipped[TOO_SMALL] += len(left_out)
    return tally.buckets(merged)


def _no_rows(source: Source, selection: Selection, min_side: int) -> DataError:
    reasons = ", ".join(f"{count} {reason}" for reason, count in selection.skipped.most_common(5))
    needed = "to fill a shape" if selection.buckets else f"sides of {min_side} pixels"
    return DataError(
        f"no row of {source.path} can be used (of all: {reasons}; images need {needed}); change --where, "
        f"{'--buckets, ' if selection.buckets else ''}--resolution or the list"
    )


def _judge_parts(tasks: list[tuple[int, Path, Source]], **how) -> list[tuple]:
    return [_judge_part(task, **how) for task in tasks]


def _judge_part(task: tuple[int, Path, Source], where, min_side: int, shapes: ShapeRule | None) -> tuple:
    """(the rows used, packed, None for all; why not the others; shapes and kept areas, None without `shapes`)."""
    number, path, source = task
    codes = kept = None
    with closing(open_part(path, source)) as part:
        sizes = {"width": np.asarray(part.widths), "height": np.asarray(part.heights)}
        if shapes:
            codes, kept = shapes.assign(sizes["width"], sizes["height"], number)
            used, reasons = codes != NO_SHAPE, refusals(codes, *sizes.values())
        else:
            sides = np.minimum(*sizes.values())
            small = (sides < min_side) & (sides > 0)
            used, reasons = ~small, Counter({TOO_SMALL: int(small.sum())})
        if where is not None:
            from .evaluate import judge_blocks

            start = 0
            for places, names in judge_blocks(part, source, where, sizes):
                block = used[start : start + len(places)]
                counts = np.bincount(places[block], minlength=len(names) + 1)
                for name, count in zip(names, counts[1:].tolist(), strict=True):
                    reasons[name] += count
                block &= places == 0
                start += len(places)
    if shapes:
        codes[~used] = NO_SHAPE
    mask = None if used.all() else np.packbits(used)
    return mask, Counter({reason: count for reason, count in reasons.items() if count}), codes, kept

"""Which rows are trained on, decided before training starts: those that are large enough and meet `--where`.

The rows of all sources are numbered through; a `Selection` is a sequence of some of these numbers, in ascending order.
It costs a bit a row, and nothing for a part of which every row is used. It is a function of the parts and the condition
alone.

A condition on width and height is answered by the indexes, without reading a row. Any other needs the captions and
metadata of the rows that the sizes alone do not decide: each part is read once, and the answer kept in the cache folder
(`PPLDM_CACHE_DIR`, else `~/.cache/ppldm`) for as long as part, layout and condition stay the same. An answer that is
damaged or gone is found anew.
"""

import hashlib
import json
import random
import zlib
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

from ..utils.errors import DataError, OutputError, RowError
from ..utils.files import atomic_write, make_output_dir
from ..utils.log import get_logger, progress
from ..utils.workers import map_unordered
from .container import Rows, build_indexes, open_part
from .expression import Expression, field_names
from .filelist import Source
from .judge import judge
from .stored import cache_dir

TOO_SMALL = "too small"

_INDEX_FIELDS = {"width", "height"}
# Part of every cache key: a change of what an expression means must change it.
_VERSION = 1
_MASKS_UNPACKED = 64


class Selection:
    """Some of the rows of all parts. `len()` is how many; `selection[i]` the number of the i-th, ascending.

    `list_sizes`: selected rows of each source. `num_rows`: all rows. `skipped`: rows that are not selected, by reason.
    """

    def __init__(self, rows_of_parts: list[int], masks: list[np.ndarray | None], parts_of_lists: list[int], skipped):
        """masks: bits of a part's rows, packed, set where selected; None for all."""
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
        num_workers = num_workers if where is not None and field_names(where) - _INDEX_FIELDS else 1
        judge_part = partial(_judge_part, where=where, min_side=min_side)
        tasks = [
            (number, path, source)
            for number, ((path, source), summary) in enumerate(zip(parts, summaries, strict=True))
            if where is not None or summary.smallest_side is None or summary.smallest_side < min_side
        ]
        # Ranks that read the same parts at the same time meet at different ones.
        random.SystemRandom().shuffle(tasks)
        num_rows = sum(rows_of_parts[number] for number, _, _ in tasks)
        with progress(total=num_rows, desc="selecting rows", unit="row", unit_scale=True, delay=3) as bar:
            for (number, _, _), (mask, reasons) in map_unordered(judge_part, tasks, num_workers):
                masks[number] = mask
                skipped.update(reasons)
                bar.update(rows_of_parts[number])
    selection = Selection(rows_of_parts, masks, [len(source.parts) for source in sources], skipped)
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


def _judge_part(
    task: tuple[int, Path, Source], where: Expression | None, min_side: int
) -> tuple[np.ndarray | None, dict]:
    """(packed mask or None for all, skipped rows by reason) of a part (number, path, how to read it)."""
    _, path, source = task
    with closing(open_part(path, source)) as part:
        widths, heights = np.asarray(part.widths), np.asarray(part.heights)
        small = (np.minimum(widths, heights) < min_side) & (np.minimum(widths, heights) > 0)
        reasons = Counter({TOO_SMALL: int(small.sum())})
        used = ~small
        if where is not None:
            verdict = _judge_rows(part, source, where)
            counts = np.bincount(verdict.codes[used], minlength=len(verdict.reasons) + 1)
            reasons.update(dict(zip(verdict.reasons, counts[1:].tolist(), strict=True)))
            used &= verdict.codes == 0
    return None if used.all() else np.packbits(used), {reason: count for reason, count in reasons.items() if count}


@dataclass(frozen=True)
class _Verdict:
    """`codes`: uint16 [rows], 0 for a row that `where` selects, else 1 + the place of its reason in `reasons`."""

    codes: np.ndarray
    reasons: list[str]


def _judge_rows(part: Rows, source: Source, where: Expression) -> _Verdict:
    sizes = {"width": part.widths, "height": part.heights}
    verdict = _Verdict(*judge(where, sizes, len(part)))
    names = field_names(where) - _INDEX_FIELDS
    if not names:
        return verdict
    cached = _cache_path(part, source, where)
    found = _read_verdict(cached, len(part))
    if found is None:
        found = _judge_read_rows(part, where, names, sizes, verdict)
        _write_verdict(cached, found)
    return found


def _judge_read_rows(part: Rows, where: Expression, names: set[str], sizes: dict, verdict: _Verdict) -> _Verdict:
    """Read the rows that the sizes leave undecided, and judge those again."""
    rows = np.flatnonzero(verdict.codes > 1)
    errors: dict[int, str] = {}
    columns: dict[str, list] = {name: [] for name in names}
    for i, row in enumerate(rows.tolist()):
        try:
            caption, meta = part.read_fields(row)
        except RowError as error:
            errors[i] = error.reason
            caption, meta = None, {}
        for name, values in columns.items():
            values.append(caption if name == "caption" else meta.get(name))
    sizes = {name: values[rows] for name, values in sizes.items()}
    codes_read, reasons = judge(where, {**columns, **sizes}, len(rows))
    for i, reason in errors.items():
        reasons += [reason] if reason not in reasons else []
        codes_read[i] = 1 + reasons.index(reason)
    codes = np.minimum(verdict.codes, 1)
    codes[rows] = codes_read
    return _Verdict(codes, reasons)


def _cache_path(part: Rows, source: Source, where: Expression) -> Path:
    key = json.dumps([_VERSION, part.path.name, *part.identity, len(part), source.format, source.layout, str(where)])
    return cache_dir() / "where" / hashlib.sha256(key.encode()).hexdigest()[:32]


def _write_verdict(path: Path, verdict: _Verdict) -> None:
    body = zlib.compress(verdict.codes.astype("<u2").tobytes(), 1)
    make_output_dir(path.parent)
    try:
        with atomic_write(path) as file:
            file.write(json.dumps(_describe(verdict.reasons, body)).encode() + b"\n" + body)
    except OSError as error:
        raise OutputError(
            f"cannot write {path}: {error.strerror}; free some space or set PPLDM_CACHE_DIR to another folder"
        ) from error


def _describe(reasons: list[str], body: bytes) -> dict:
    return {"reasons": reasons, "crc32": zlib.crc32(json.dumps(reasons).encode(), zlib.crc32(body))}


def _read_verdict(path: Path, num_rows: int) -> _Verdict | None:
    """What was found out before; None where it is not there or damaged."""
    try:
        head, _, body = path.read_bytes().partition(b"\n")
        stated = json.loads(head)
        codes = np.frombuffer(zlib.decompress(body), dtype="<u2")
        if stated != _describe(stated["reasons"], body) or len(codes) != num_rows:
            raise ValueError("checksum")
        return _Verdict(codes, stated["reasons"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, zlib.error) as error:
        get_logger().warning("%s is damaged (%s); the rows are read again", path, error)
        return None

"""The latents of one part: its rows decoded by threads, encoded in batches, kept in files that are finished or absent.

A file is made under a temporary name, in which a killed run leaves what it has computed, and gets its own name once all
wanted rows are there. In one that has its name already, what is missing is filled in: rows that another `--where`
selects or that training did not come to, and what is damaged.

No paddle here: what encodes is handed in.
"""

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np

from ..data.cached.key import LatentsKey
from ..data.cached.latents import Latents, create_latents, read_texts
from ..data.formats.index_lock import build_lock
from ..data.formats.open import open_part
from ..data.formats.rows import Rows
from ..data.images.crop import CropRule, DrawnCrop
from ..utils.errors import PartError, RowError
from ..utils.files import finish_file
from ..utils.log import get_logger
from .latents_plan import PartTask, unfinished_path

# Of a picture in a file of its own, which may be there the next time.
_PASSING = "unreadable"
_ROWS_AHEAD = 64  # decoded and waiting, at least


@dataclass
class Account:
    """What became of moments. encoded: computed now. found: there before. repaired: of those encoded, damaged before.
    bad: of rows that cannot be used, by reason, now or before."""

    encoded: int = 0
    found: int = 0
    repaired: int = 0
    bad: Counter = field(default_factory=Counter)

    def __add__(self, other: "Account") -> "Account":
        return Account(self.encoded + other.encoded, self.found + other.found, self.repaired + other.repaired,
                       self.bad + other.bad)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """The moments of one crop of a row. file: its number among the files of the part."""

    file: int
    variant: int
    shape: tuple[int, int]
    crop: DrawnCrop


class Encode(Protocol):
    """uint8 pixels [n, 3, H, W], n at most `batch_size`, to float32 moments [n, 2, C, h, w]; those of a row are
    the same whatever the others are (`inference.encoder`)."""

    batch_size: int
    digest: str
    channels: int
    factor: int

    def __call__(self, pixels: np.ndarray) -> np.ndarray: ...


def measure_cost(task: PartTask, encoder: Encode, pool: Executor) -> tuple[float, list[float]]:
    """(bytes of a row's texts, seconds of a crop of each of the settings' shapes), of the first rows of a part."""
    rows = np.unique(np.concatenate(task.rows))[: encoder.batch_size].tolist()
    crops, seconds = task.settings.crops, []
    with closing(open_part(task.path, task.source)) as part:
        texts = read_texts(part, rows)
        for shape, *_ in task.settings.shapes:
            pixels = np.zeros((encoder.batch_size, 3, *shape), np.uint8)
            cells = {row: [Cell(0, 0, shape, crops.list_variants()[0])] for row in rows}
            for _ in range(2):  # the first time is slower
                began = time.monotonic()
                deque(_load_cells(part, cells, crops, pool), maxlen=0)
                encoder(pixels)
            seconds.append((time.monotonic() - began) / len(rows))
    return sum(map(len, texts)) / len(texts), seconds


def encode_part(
    task: PartTask, encoder: Encode, pool: Executor, told: Callable[[int], None] = lambda count: None
) -> Account:
    """Make the files of a part whole. pool: threads that decode pictures. told: is called with how many moments are
    settled. Raises PartError, OSError."""
    with ExitStack() as stack:
        for target in task.paths:
            stack.enter_context(build_lock(target))
        part = stack.enter_context(closing(open_part(task.path, task.source)))
        if part.identity[:2] != task.content:
            raise PartError(f"{task.path} has changed since the command began; run it again")
        files = _open_files(task, part)
        for latents in files:
            stack.callback(latents.close)
        account, wanted = _find_wanted(task, files)
        told(account.found + account.bad.total())
        _fill(files, _load_cells(part, wanted, task.settings.crops, pool), encoder, account, told)
        for latents, target in zip(files, task.paths, strict=True):
            latents.flush()
            if latents.path != target:
                finish_file(latents.path, target)
    return account


def _open_files(task: PartTask, part: Rows) -> list[Latents]:
    """Those that are there, whole or as a killed run left them; others are created."""
    found = [_open_file(target, key) for target, key in zip(task.paths, task.keys, strict=True)]
    if None in found:
        sizes, texts = np.stack([part.widths, part.heights]), read_texts(part)
        for number, (target, key) in enumerate(zip(task.paths, task.keys, strict=True)):
            if found[number] is None:
                path, codes = unfinished_path(target), key.find_codes(part.widths, part.heights)
                create_latents(path, key, task.settings.channels, task.settings.factor, codes, sizes, texts)
                found[number] = Latents(path, key, writable=True)
    return found


def _open_file(target: Path, key: LatentsKey) -> Latents | None:
    for path in (target, unfinished_path(target)):
        if path.exists():
            try:
                return Latents(path, key, writable=True)
            except PartError as error:
                get_logger().warning("making a file of latents again: %s", error)
                path.unlink()
    return None


def _find_wanted(task: PartTask, files: list[Latents]) -> tuple[Account, dict[int, list[Cell]]]:
    """(what is there, what is to be computed of each row). What is damaged is made missing."""
    account, wanted = Account(), defaultdict(list)
    variants = [*enumerate(task.settings.crops.list_variants())]
    for number, (latents, rows) in enumerate(zip(files, task.rows, strict=True)):
        for row in rows.tolist():
            for variant, crop in variants:
                reason = latents.reason(row, variant)
                if latents.is_damaged(row, variant) or reason == _PASSING:
                    account.repaired += reason != _PASSING
                    latents.forget(row, variant)
                elif latents.states[row, variant]:
                    account.found += reason is None
                    account.bad.update([reason] if reason else [])
                    continue
                wanted[row].append(Cell(number, variant, latents.shape(row), crop))
    return account, dict(sorted(wanted.items()))


def _load_cells(
    part: Rows, wanted: dict[int, list[Cell]], crops: CropRule, pool: Executor
) -> Iterator[tuple[int, Cell, np.ndarray | RowError]]:
    """(row, cell, its pixels or why there are none), in order. Rows are read here and decoded by the pool, which keeps
    some ahead."""
    waiting = deque()
    for row, cells in wanted.items():
        try:
            waiting.append((row, pool.submit(_cut, part.read(row).image, row, cells, crops).result))
        except RowError as error:
            waiting.append((row, partial(list, [error] * len(cells))))
        if len(waiting) > _ROWS_AHEAD:
            yield from _take(waiting, wanted)
    while waiting:
        yield from _take(waiting, wanted)


def _take(waiting: deque, wanted: dict[int, list[Cell]]) -> Iterator[tuple[int, Cell, np.ndarray | RowError]]:
    row, result = waiting.popleft()
    for cell, pixels in zip(wanted[row], result(), strict=True):
        yield row, cell, pixels


def _cut(image: bytes, row: int, cells: list[Cell], crops: CropRule) -> list[np.ndarray | RowError]:
    try:
        decoded = crops.decode(image)
    except RowError as error:
        return [error] * len(cells)
    found = []
    for cell in cells:
        pixels = np.empty((3, *cell.shape), np.uint8)
        try:
            crops.cut(decoded, cell.crop, row, pixels)
            found.append(pixels)
        except RowError as error:
            found.append(error)
    return found


def _fill(
    files: list[Latents],
    cells: Iterable[tuple[int, Cell, np.ndarray | RowError]],
    encoder: Encode,
    account: Account,
    told: Callable[[int], None],
) -> None:
    """Write the moments of cells, encoded in batches of one shape."""
    batches = defaultdict(list)
    for row, cell, pixels in cells:
        if isinstance(pixels, RowError):
            files[cell.file].mark_bad(row, cell.variant, pixels.reason)
            account.bad[pixels.reason] += 1
            told(1)
            continue
        batch = batches[cell.shape]
        batch.append((row, cell, pixels))
        if len(batch) == encoder.batch_size:
            _encode(files, batch, encoder, account)
            told(len(batch))
            batch.clear()
    for batch in filter(None, batches.values()):
        _encode(files, batch, encoder, account)
        told(len(batch))


def _encode(files: list[Latents], batch: list[tuple[int, Cell, np.ndarray]], encoder: Encode, account: Account) -> None:
    moments = encoder(np.stack([pixels for _, _, pixels in batch]))
    for (row, cell, _), one in zip(batch, moments, strict=True):
        if files[cell.file].write(row, cell.variant, one) is None:
            account.bad["not_finite"] += 1
        else:
            account.encoded += 1

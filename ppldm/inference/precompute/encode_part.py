"""The latents of one part: its rows decoded by threads, encoded in batches, kept in its files (`part_files`).

No paddle here: what encodes is handed in.
"""

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Protocol

import numpy as np

from ...data.cached.key import LatentsKey
from ...data.cached.latents import Latents, create_latents, read_texts
from ...data.formats.open import open_part
from ...data.formats.rows import Rows
from ...data.images.crop import CropRule, DrawnCrop
from ...utils.errors import RowError
from .latents_plan import PartTask
from .part_files import Account, locked_part, unfinished_file

_ROWS_AHEAD = 64  # decoded and waiting, at least


@dataclass(frozen=True)
class Cell:
    """The moments of one crop of a row. file: its number among the files of the part."""

    file: int
    variant: int
    shape: tuple[int, int]
    crop: DrawnCrop


class Encode(Protocol):
    """uint8 pixels [n, 3, H, W], n at most `batch_size`, to float32 moments [n, 2, C, h, w]; those of a row are
    the same whatever the others are (`inference.precompute.picture_encoder`)."""

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
    settled. Raises PartError, ConfigError, OSError."""
    task = task.without_empty
    with ExitStack() as stack:
        part = stack.enter_context(locked_part(task))
        read = cache(partial(read_texts, part))
        files = [
            stack.enter_context(unfinished_file(Latents, target, key, partial(_create, task, part, key, read)))
            for target, key in zip(task.paths, task.keys, strict=True)
        ]
        account, wanted = _find_wanted(task, files)
        told(account.found + account.bad.total())
        left = Counter(cell.shape for cells in wanted.values() for cell in cells)
        _fill(files, _load_cells(part, wanted, task.settings.crops, pool), left, encoder, account, told)
    return account


def _create(task: PartTask, part: Rows, key: LatentsKey, read: Callable[[], list[bytes]], path: Path) -> None:
    """Write a file of which all is missing. read: gives the texts of the part."""
    codes, sizes = key.find_codes(part.widths, part.heights), np.stack([part.widths, part.heights])
    settings = task.settings
    create_latents(path, key, settings.channels, settings.factor, codes, sizes, read(), settings.engine)


def _find_wanted(task: PartTask, files: list[Latents]) -> tuple[Account, dict[int, list[Cell]]]:
    """(what is there, what is to be computed of each row, those of one shape after another). What is damaged is made
    missing. Raises ConfigError where another engine began a file."""
    account, wanted = Account(), defaultdict(list)
    variants = [*enumerate(task.settings.crops.list_variants())]
    for number, (latents, rows) in enumerate(zip(files, task.rows, strict=True)):
        for row in rows.tolist():
            for variant, crop in variants:
                if account.wants(latents, row, variant):
                    latents.check_engine(task.settings.engine)
                    wanted[row].append(Cell(number, variant, latents.shape(row), crop))
    return account, dict(sorted(wanted.items(), key=lambda one: ([cell.shape for cell in one[1]], one[0])))


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
    found: list[np.ndarray | RowError] = []
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
    left: Counter,
    encoder: Encode,
    account: Account,
    told: Callable[[int], None],
) -> None:
    """Write the moments of cells, encoded in batches of one shape. left: how many cells each shape has."""
    batches = defaultdict(list)
    for row, cell, pixels in cells:
        batch = batches[cell.shape]
        left[cell.shape] -= 1
        if isinstance(pixels, RowError):
            files[cell.file].mark_bad(row, cell.variant, pixels.reason)
            account.bad[pixels.reason] += 1
            told(1)
        else:
            batch.append((row, cell, pixels))
        if len(batch) == encoder.batch_size or (batch and not left[cell.shape]):
            _encode(files, batch, encoder, account)
            told(len(batch))
            batch.clear()


def _encode(files: list[Latents], batch: list[tuple[int, Cell, np.ndarray]], encoder: Encode, account: Account) -> None:
    moments = encoder(np.stack([pixels for _, _, pixels in batch]))
    for (row, cell, _), one in zip(batch, moments, strict=True):
        if files[cell.file].write(row, cell.variant, one) is None:
            account.bad["not_finite"] += 1
        else:
            account.encoded += 1

"""Latents: the rows of a part read, decoded by threads and cut as training does. No paddle."""

import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from ..config.data import EAGER
from ..data.cached.file import CachedFile, count_file_bytes
from ..data.cached.key import LatentsKey
from ..data.cached.latents import create_latents, read_texts
from ..data.formats.open import open_part
from ..data.formats.rows import Rows as PartRows
from ..data.images.crop import CropRule
from ..utils.errors import ConfigError, RowError
from .plan import Cell, Encoder, Request, Rows, Shapes, Task, Wanted

_ROWS_AHEAD = 64  # decoded and waiting, at least


@dataclass(frozen=True, kw_only=True)
class LatentsRequest(Request):
    """Latents of pictures by a VAE, or by an EfficientNet in a folder. crops: of each row."""

    name = ""
    things = "crops"
    flag = "--latents cached"

    crops: CropRule

    def load(self) -> Encoder:
        from .encoders import load_picture_encoder

        return load_picture_encoder(self)

    def list_keys(self, encoder: Encoder, shapes: Sequence[Shapes]) -> list[LatentsKey]:
        factor = encoder.header["factor"]
        for height, width in (shape for one in shapes for shape in one):
            if height % factor or width % factor:
                raise ConfigError(
                    f"pictures of {width} x {height} cannot be encoded; --resolutions and --buckets must be multiples "
                    f"of {factor}, the VAE's downscaling factor"
                )
        return [LatentsKey.of(encoder.digest, one, self.crops, self.dtype) for one in shapes]

    def choose(self, shapes: Sequence[Shapes], selected: list[Rows], num_rows: int) -> list[Rows]:
        """Without rows that an earlier file has in the same shape."""
        made, wanted = np.empty(0, np.int64), []
        for own, (rows, codes) in zip(shapes, selected, strict=True):
            cells = rows << 32 | np.array([height << 16 | width for height, width in own], np.int64)[codes]
            new = ~np.isin(cells, made)
            made = np.concatenate([made, cells])
            wanted.append((rows[new], codes[new]))
        return wanted

    def open(self, part: PartRows, encoder: Encoder) -> "PartPictures":
        engine = {"engine": self.engine} if self.engine != EAGER else {}
        return PartPictures(part, self.crops, {**encoder.header, **engine})

    def measure(self, task: Task, encoder: Encoder, pool: Executor) -> tuple[float, list[float]]:
        rows, seconds = np.unique(np.concatenate([file.rows for file in task.files]))[: self.batch_size].tolist(), []
        with closing(open_part(task.path, task.source)) as part:
            pictures, texts = self.open(part, encoder), read_texts(part, rows)
            for file in task.files:
                shape, *_ = file.key.shapes
                cells = [Cell(None, row, 0, self.crops.list_variants()[0], shape) for row in rows]
                pixels = np.zeros((self.batch_size, 3, *shape), np.uint8)
                for _ in range(2):  # the first time is slower
                    began = time.monotonic()
                    deque(pictures.load(cells, pool), maxlen=0)
                    encoder(pixels)
                seconds.append((time.monotonic() - began) / len(rows))
        return sum(map(len, texts)) / len(texts), seconds

    def estimate(self, file: Wanted, encoder: Encoder, measured: float) -> tuple[int, int]:
        """measured: bytes of a row's texts."""
        cells = file.key.cells(encoder.header)
        return len(file.codes) * cells.variants, count_file_bytes(cells, self.dtype, file.codes, measured)


class PartPictures:
    """What the latents of a part are made of."""

    def __init__(self, part: PartRows, crops: CropRule, header: dict):
        self._part, self._crops, self._header = part, crops, header

    @cached_property
    def _texts(self) -> list[bytes]:
        return read_texts(self._part)

    def create(self, path: Path, key: LatentsKey) -> None:
        create_latents(path, key, self._header, self._part, self._texts)

    def fits(self, file: CachedFile) -> bool:
        return True

    def list_cells(self, file: CachedFile, rows: np.ndarray) -> Iterator[Cell]:
        crops = [*enumerate(self._crops.list_variants())]
        for row in rows.tolist():
            shape = file.key.shapes[file.codes[row]]
            yield from (Cell(file, row, variant, crop, shape) for variant, crop in crops)

    def load(self, cells: Iterable[Cell], pool: Executor) -> Iterator[tuple[Cell, np.ndarray | RowError]]:
        """Rows are read here and decoded by the pool, which keeps some ahead."""
        of_row, waiting = defaultdict(list), deque()
        for cell in cells:
            of_row[cell.row].append(cell)
        for row, own in sorted(of_row.items(), key=lambda one: ([cell.shape for cell in one[1]], one[0])):
            try:
                waiting.append(pool.submit(self._cut, self._part.read(row).image, own).result)
            except RowError as error:
                waiting.append(partial(list, [(cell, error) for cell in own]))
            if len(waiting) > _ROWS_AHEAD:
                yield from waiting.popleft()()
        while waiting:
            yield from waiting.popleft()()

    def _cut(self, image: bytes, cells: list[Cell]) -> list[tuple[Cell, np.ndarray | RowError]]:
        try:
            decoded = self._crops.decode(image)
        except RowError as error:
            return [(cell, error) for cell in cells]
        found: list[tuple[Cell, np.ndarray | RowError]] = []
        for cell in cells:
            pixels = np.empty((3, *cell.shape), np.uint8)
            try:
                self._crops.cut(decoded, cell.what, cell.row, pixels)
                found.append((cell, pixels))
            except RowError as error:
                found.append((cell, error))
        return found

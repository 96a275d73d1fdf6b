"""What `ppldm precompute` is asked for: which files of latents, how large, and what is left to do. No paddle."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ...config.data import EAGER
from ...data.cached.file import count_file_bytes
from ...data.cached.key import LatentsKey, cached_path, unfinished_path
from ...data.filelist import Source
from ...data.images.crop import CropRule
from ...data.select.expression import Expression
from ...data.select.selection import Selection, select_rows
from ...data.shapes import ShapeRule
from ...utils.errors import DiskFullError
from ...utils.files import count_free_bytes
from ...utils.text import count_of

Shapes = tuple[tuple[int, int], ...]  # (height, width) in pixels
MOST_IN_GROUP = 64  # rows of one shape, as many as a device's batch has: bounds what rows of rare shapes cost


@dataclass(frozen=True)
class Settings:
    """What decides the latents of any row besides its picture. autoencoder: `encoder_digest` of the VAE, which has
    `channels` and `factor` pixels a side to one latent. shapes: for each file of a part, those of its rows. folder:
    where the files go; None: beside the parts. engine: what computes them, one of `inference.engine.ENGINES`."""

    autoencoder: str
    channels: int
    factor: int
    shapes: tuple[Shapes, ...]
    crops: CropRule
    dtype: str
    folder: Path | None = None
    engine: str = EAGER

    @property
    def digest(self) -> str:
        """Of what encodes."""
        return self.autoencoder


@dataclass(frozen=True)
class PartTask:
    """The latents of a part. content: bytes and CRC-32 of its file. rows: for each of the settings' lists of shapes,
    the numbers of the rows wanted, int64; codes: of their shapes, uint8."""

    settings: Settings
    path: Path
    source: Source
    content: tuple[int, int]
    rows: tuple[np.ndarray, ...]
    codes: tuple[np.ndarray, ...]

    @property
    def without_empty(self) -> "PartTask":
        """Without the lists of shapes of which it has no rows, and so no files."""
        own = [number for number, rows in enumerate(self.rows) if len(rows)]
        shapes, rows, codes = (
            tuple(one[number] for number in own) for one in (self.settings.shapes, self.rows, self.codes)
        )
        return replace(self, settings=replace(self.settings, shapes=shapes), rows=rows, codes=codes)

    @property
    def keys(self) -> list[LatentsKey]:
        """Of its files, one for each of the settings' shapes."""
        wanted = self.settings
        return [
            LatentsKey.of(wanted.autoencoder, shapes, wanted.crops, wanted.dtype, self.source, self.content)
            for shapes in wanted.shapes
        ]

    @property
    def paths(self) -> list[Path]:
        """Its files, in the order of `keys`."""
        return [cached_path(self.path, key, self.settings.folder) for key in self.keys]

    @property
    def num_cells(self) -> int:
        """How many moments are wanted, in all files."""
        return sum(len(rows) for rows in self.rows) * self.settings.crops.num_variants

    @property
    def labels(self) -> list[str]:
        """What is in its files, for people."""
        found = []
        for (height, width), *others in self.settings.shapes:
            more = f" and {count_of(len(others), 'other shape')}" if others else ""
            found.append(f"crops of {width} x {height}{more}")
        return found

    def estimate(self, text_bytes: float) -> list[tuple[int, int]]:
        """(moments, bytes) of each of its files. text_bytes: of a row's texts, about."""
        header = {"channels": self.settings.channels, "factor": self.settings.factor}
        return [
            (len(codes) * key.num_variants, count_file_bytes(key.cells(header), key.dtype, codes, text_bytes))
            for key, codes in zip(self.keys, self.codes, strict=True)
        ]


def choose_rows(
    sources: list[Source], condition: Expression | None, sizes: list[int | ShapeRule], num_workers: int
) -> list[tuple[Shapes, Selection]]:
    """For each of `sizes`, sides of squares in pixels or rules of buckets, the shapes and the rows that training has at
    that size. A rule of no group size stands for those of all groups up to MOST_IN_GROUP. Raises DataError."""
    chosen: list[tuple[Shapes, Selection]] = []
    for size in sizes:
        if isinstance(size, int):
            chosen.append((((size, size),), select_rows(sources, condition, size, num_workers)))
        else:
            group_size = size.group_size or 1
            while True:
                rule = replace(size, group_size=group_size)
                selection = select_rows(sources, condition, 0, num_workers, rule)
                chosen.append((tuple(selection.buckets.shapes), selection))
                # The least group for which another shape is too rare.
                group_size = min(selection.buckets.rows) + 1
                if size.group_size or group_size > MOST_IN_GROUP or len(selection.buckets.shapes) == 1:
                    break
    return chosen


def list_tasks(settings: Settings, sources: list[Source], selections: list[Selection]) -> list[PartTask]:
    """Of all parts of which rows are selected. selections: of each of the settings' shapes, which rows."""
    parts = [(path, source.without_parts()) for source in sources for path in source.parts]
    found = zip(*map(list_rows, selections), strict=True)
    tasks = [
        PartTask(settings, path, source, content, *_each_once(settings.shapes, rows_and_codes))
        for (path, source), content, rows_and_codes in zip(parts, selections[0].contents, found, strict=True)
    ]
    return [task for task in tasks if task.num_cells]


def _each_once(shapes: tuple[Shapes, ...], rows_and_codes: Iterable) -> tuple[tuple[np.ndarray, ...], ...]:
    """(rows, codes) for each list of shapes, without rows that an earlier list has in the same shape."""
    made, wanted = np.empty(0, np.int64), []
    for own, (rows, codes) in zip(shapes, rows_and_codes, strict=True):
        cells = rows << 32 | np.array([height << 16 | width for height, width in own], np.int64)[codes]
        new = ~np.isin(cells, made)
        made = np.concatenate([made, cells])
        wanted.append((rows[new], codes[new]))
    return tuple(zip(*wanted, strict=True))


def list_rows(selection: Selection) -> list[tuple[np.ndarray, np.ndarray]]:
    """Of each part the selected rows and the codes of their shapes (`Selection.rows_of`)."""
    return [selection.rows_of(part) for part in range(len(selection.part_bounds) - 1)]


@dataclass(frozen=True)
class Projection:
    """How much a plan is. files, finished: how many, and how many are there already. cells: of each of the files of a
    part, how many arrays are to be computed for the others. bytes: that these will take, beyond what they take
    already."""

    files: int
    finished: int
    cells: tuple[int, ...]
    bytes: int


def project(plans: Iterable[tuple[list, float]]) -> list[Projection]:
    """How much each of some plans is. plans: tasks for files of one kind, and what their `estimate` takes. Files that
    are there are taken for finished. Raises DiskFullError where the others do not fit where they should go."""
    needed, folders, found = defaultdict(int), {}, []
    for tasks, measured in plans:
        files, finished, cells, total = 0, 0, [0] * len(tasks[0].paths), 0
        for task in tasks:
            for number, (target, (count, size)) in enumerate(zip(task.paths, task.estimate(measured), strict=True)):
                files += count > 0
                if target.exists() or not count:
                    finished += count > 0
                    continue
                cells[number] += count
                size, device = max(0, size - _bytes_taken(unfinished_path(target))), target.parent.stat().st_dev
                folders[device] = target.parent
                needed[device] += size
                total += size
        found.append(Projection(files, finished, tuple(cells), total))
    for device, size in needed.items():
        free = count_free_bytes(folders[device])
        if size > free:
            raise DiskFullError(
                f"that needs {size / 1e9:.3f} GB, and {folders[device]} has {free / 1e9:.3f} GB free; free some, "
                "choose another --latents-dir, or a smaller --dtype or fewer --crops"
            )
    return found


def _bytes_taken(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0

"""What `ppldm precompute` is asked for: which files of which parts, how large, and what is left to do. No paddle."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np

from ..config.data import EAGER
from ..data.cached.file import CachedFile
from ..data.cached.find import cached_path, unfinished_path
from ..data.cached.key import CacheKey
from ..data.filelist import Source
from ..data.formats.rows import Rows as PartRows
from ..data.select.expression import Expression
from ..data.select.selection import Selection, select_rows
from ..data.shapes import ShapeRule
from ..utils.errors import DiskFullError
from ..utils.files import count_free_bytes

Shapes = tuple[tuple[int, int], ...]  # (height, width) in pixels
Rows = tuple[np.ndarray, np.ndarray]  # the numbers of rows in their part, int64, the codes of their shapes, uint8
MOST_IN_GROUP = 64  # rows of one shape, as many as a device's batch has: bounds what rows of rare shapes cost


class Encoder(Protocol):
    """A frozen network: at most `batch_size` pictures or captions to their arrays, float32; the array of one is the
    same whatever the others are (`cache.encoders`). digest: of all that they depend on. header: what the header of a
    file says of it."""

    batch_size: int
    digest: str
    header: dict

    def __call__(self, inputs, /) -> np.ndarray: ...


@dataclass(frozen=True)
class Cell:
    """An array of a file. what: it is made of, a crop or a text, or why it cannot be made. shape: (height, width) of
    the picture; a batch has one."""

    file: CachedFile
    row: int
    variant: int
    what: Any
    shape: tuple[int, ...] = ()


class Contents(Protocol):
    """What the files of a part are made of."""

    def create(self, path: Path, key: Any) -> None:
        """Write a file of which all is missing. Raises OSError."""

    def fits(self, file: CachedFile) -> bool:
        """Whether a file that is there can be continued."""

    def list_cells(self, file: CachedFile, rows: np.ndarray) -> Iterator[Cell]:
        """The arrays of these rows, row by row."""

    def load(self, cells: list[Cell], pool: Executor) -> Iterator[tuple[Cell, Any]]:
        """(cell, what the encoder takes of it, or a RowError), those of one shape after another."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """The settings of one kind of files. model: folder or name of the network, which takes `batch_size` pictures or
    captions at a time. dtype: in which arrays are kept. engine: what computes them, one of `networks.engine.ENGINES`.

    Of a subclass, name: in the report, where latents are not below a name; things: what is encoded, in words; flag: by
    which training uses it."""

    name: ClassVar[str]
    things: ClassVar[str]
    flag: ClassVar[str]

    model: str
    dtype: str = "float16"
    batch_size: int = 16
    offline: bool = False
    engine: str = EAGER

    def load(self) -> Encoder:
        """The network; from here on this process computes exactly. Raises ModelError, ConfigError."""
        raise NotImplementedError

    def list_keys(self, encoder: Any, shapes: Sequence[Shapes]) -> Sequence[CacheKey]:
        """Of the files of any part. Raises ConfigError."""
        raise NotImplementedError

    def choose(self, shapes: Sequence[Shapes], selected: list[Rows], num_rows: int) -> list[Rows]:
        """The rows wanted of each file of a part of `num_rows`. selected: at each of `shapes`."""
        raise NotImplementedError

    def open(self, part: PartRows, encoder: Encoder) -> Contents:
        """What the files of a part are made of. Raises PartError."""
        raise NotImplementedError

    def measure(self, task: "Task", encoder: Encoder, pool: Executor) -> tuple[float, list[float]]:
        """(what `estimate` takes, seconds of an array of each of the files), of the first rows of a part."""
        raise NotImplementedError

    def estimate(self, file: Any, encoder: Encoder, measured: float) -> tuple[int, int]:
        """(arrays, bytes) of a file, about."""
        raise NotImplementedError


@dataclass(frozen=True)
class Wanted:
    """A file. rows: the numbers of the rows wanted, int64; codes: of their shapes, uint8."""

    path: Path
    key: CacheKey
    rows: np.ndarray
    codes: np.ndarray


@dataclass(frozen=True)
class Task:
    """The files of a part, also those of which no rows are wanted. digest: of what encodes. content: bytes and CRC-32
    of the part."""

    request: Request
    digest: str
    path: Path
    source: Source
    content: tuple[int, int]
    files: tuple[Wanted, ...]

    @property
    def num_rows(self) -> int:
        """How many are wanted, in all files."""
        return sum(len(file.rows) for file in self.files)


@dataclass
class Plan:
    """The tasks of a request. measured, seconds: what `Request.measure` gives."""

    request: Request
    encoder: Encoder
    tasks: list[Task]
    measured: float = 0.0
    seconds: Sequence[float] = ()

    def measure(self, pool: Executor) -> None:
        """Find out what the first part takes."""
        self.measured, self.seconds = self.request.measure(self.tasks[0], self.encoder, pool)


@dataclass
class Projection:
    """How much a plan is. files, finished: how many, and how many are there already. cells: of each of the files of a
    part, how many arrays are to be computed for the others. bytes: that these will take, beyond what they take
    already."""

    cells: list[int]
    files: int = 0
    finished: int = 0
    bytes: int = 0


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


def make_plan(
    request: Request,
    encoder: Encoder,
    sources: list[Source],
    chosen: list[tuple[Shapes, Selection]],
    folder: Path | None,
) -> Plan:
    """Tasks for all parts of which rows are chosen. chosen: by `choose_rows`. folder: where the files go; None: beside
    the parts. Raises ConfigError."""
    shapes, selections = zip(*chosen, strict=True)
    keys = request.list_keys(encoder, shapes)
    parts = [(path, source.without_parts()) for source in sources for path in source.parts]
    num_rows, tasks = np.diff(selections[0].starts).tolist(), []
    for number, ((path, source), content) in enumerate(zip(parts, selections[0].contents, strict=True)):
        wanted = request.choose(shapes, [one.rows_of(number) for one in selections], num_rows[number])
        own = [key.of_part(source, content) for key in keys]
        files = [Wanted(cached_path(path, key, folder), key, *rows) for key, rows in zip(own, wanted, strict=True)]
        tasks.append(Task(request, encoder.digest, path, source, content, tuple(files)))
    return Plan(request, encoder, [task for task in tasks if task.num_rows])


def project(plans: list[Plan]) -> list[Projection]:
    """How much each plan is. Files that are there are taken for finished. Raises DiskFullError where the others do not
    fit where they should go."""
    needed, folders, found = defaultdict(int), {}, []
    for plan in plans:
        found.append(sizes := Projection([0] * len(plan.tasks[0].files)))
        for number, file in [each for task in plan.tasks for each in enumerate(task.files) if len(each[1].rows)]:
            sizes.files += 1
            if file.path.exists():
                sizes.finished += 1
                continue
            count, size = plan.request.estimate(file, plan.encoder, plan.measured)
            size, device = max(0, size - _bytes_taken(unfinished_path(file.path))), file.path.parent.stat().st_dev
            folders[device] = file.path.parent
            needed[device] += size
            sizes.cells[number] += count
            sizes.bytes += size
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

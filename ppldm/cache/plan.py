"""What `ppldm precompute` is asked for: which files of which parts, how large, and what is left to do. No paddle."""

from collections import defaultdict
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ..data.cached.file import cached_path, unfinished_path
from ..data.filelist import Source
from ..data.select.expression import Expression
from ..data.select.selection import Selection, select_rows
from ..data.shapes import ShapeRule
from ..utils.errors import DiskFullError
from ..utils.files import count_free_bytes
from .kinds import Encoder, Request, Shapes, Task, Wanted

MOST_IN_GROUP = 64  # rows of one shape, as many as a device's batch has: bounds what rows of rare shapes cost


@dataclass(frozen=True)
class Plan:
    """The tasks of a request."""

    request: Request
    encoder: Encoder
    tasks: list[Task]


def choose_rows(
    sources: list[Source], condition: Expression | None, sizes: list[int | ShapeRule], num_workers: int
) -> list[tuple[Shapes, Selection]]:
    """For each of `sizes`, sides of squares in pixels or rules of buckets, the shapes and the rows that training has at
    that size. A rule of no group size stands for those of all groups up to MOST_IN_GROUP. Raises DataError."""
    chosen: list[tuple[Shapes, Selection]] = []
    for size in sizes:
        if isinstance(size, int):
            chosen.append((((size, size),), select_rows(sources, condition, size, num_workers)))
            continue
        group_size = size.group_size or 1
        while True:
            selection = select_rows(sources, condition, 0, num_workers, replace(size, group_size=group_size))
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
    parts = [(path, source.without_parts()) for source in sources for path in source.parts]
    num_rows, tasks = np.diff(selections[0].starts).tolist(), []
    for number, ((path, source), content) in enumerate(zip(parts, selections[0].contents, strict=True)):
        files = []
        selected = [one.rows_of(number) for one in selections]
        for key, rows, codes in request.choose(encoder, shapes, selected, num_rows[number]):
            key = key.of_part(source, content)
            files.append(Wanted(cached_path(path, key, folder), key, rows, codes))
        tasks.append(Task(request, encoder.digest, path, source, content, tuple(files)))
    return Plan(request, encoder, [task for task in tasks if task.num_rows])


@dataclass(frozen=True)
class Projection:
    """How much a plan is. files, finished: how many, and how many are there already. cells, seconds: of each of the
    files of a part, how many arrays are to be computed for the others, and how long one takes. needed: the folder of
    each of the others, and the bytes that it will take beyond what it takes already."""

    files: int
    finished: int
    cells: list[int]
    seconds: list[float]
    needed: list[tuple[Path, int]]


def project(plan: Plan, pool: Executor) -> Projection:
    """How much a plan is, by the first rows of its first part. Files that are there are taken for finished."""
    seconds, estimate = plan.request.measure(plan.tasks[0], plan.encoder, pool)
    own = [each for task in plan.tasks for each in enumerate(task.files) if len(each[1].rows)]
    absent = [(number, file.path, *estimate(file)) for number, file in own if not file.path.exists()]
    cells = [sum(count for of, _, count, _ in absent if of == number) for number in range(len(seconds))]
    needed = [(path.parent, max(0, size - _bytes_taken(unfinished_path(path)))) for _, path, _, size in absent]
    return Projection(len(own), len(own) - len(absent), cells, seconds, needed)


def check_disks(projections: list[Projection]) -> None:
    """Raises DiskFullError where files do not fit where they should go."""
    needed, folders = defaultdict(int), {}
    for folder, size in [each for one in projections for each in one.needed]:
        device = folder.stat().st_dev
        folders[device] = folder
        needed[device] += size
    for device, size in needed.items():
        free = count_free_bytes(folders[device])
        if size > free:
            raise DiskFullError(
                f"that needs {size / 1e9:.3f} GB, and {folders[device]} has {free / 1e9:.3f} GB free; free some, "
                "choose another --latents-dir, or a smaller --dtype or fewer --crops"
            )


def _bytes_taken(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0

"""A conversion on Spark's executors: a task for each part or, where the source lies at an address, for each unit of it.

An executor copies such a unit, a tar or a parquet file, to its own disk, once for all parts that are to be made of it;
and once before, to count its rows, since the number of a part depends on the rows before it. All tasks are one job, so
that every executor works; an error of one is raised when the others are done.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import groupby
from pathlib import Path

from ...utils.errors import PpldmError
from ...utils.machine.spark import following_tasks, spark_session
from ..place import AddressPath, Hadoop, local_folder, reaching
from .part_task import PartTask, make_part
from .units import Span, Unit

DRIVER_MEMORY_GB = 1.0  # which has little to do


def make_on_spark(tasks: Sequence[PartTask], master: str | None) -> Iterator[tuple[PartTask, dict]]:
    """(task, its record as `make_part` gives it) of all tasks in their order."""
    with spark_session(master, DRIVER_MEMORY_GB) as spark:
        tasks = [
            replace(task, path=task.path.absolute(), unit=replace(task.unit, path=task.unit.path.absolute()))
            for task in tasks
        ]
        is_remote = isinstance(tasks[0].unit.path, AddressPath)
        groups = [list(group) for _, group in groupby(tasks, key=lambda task: task.unit if is_remote else task)]
        hadoop = Hadoop.of(spark).settings() if is_remote or isinstance(tasks[0].path, AddressPath) else None
        for group, records in run_tasks(spark, "convert", groups, partial(_make_parts, hadoop=hadoop)):
            yield from zip(group, records, strict=True)


def count_on_spark(units: Sequence[Unit], rows: int, master: str | None) -> Iterator[tuple[Unit, list[Span]]]:
    """(unit, its spans of at most that many rows) of units at an address."""
    with spark_session(master, DRIVER_MEMORY_GB) as spark:
        count = partial(_count_spans, rows=rows, hadoop=Hadoop.of(spark).settings())
        yield from run_tasks(spark, "counting rows", units, count)


def run_tasks(spark, name: str, asked: Sequence, act: Callable) -> Iterator[tuple]:
    """(each of `asked`, what `act` gives for it, in a task of its own). Raises the first error when all are done."""
    with following_tasks(spark, name, len(asked), num_stages=1):
        found = spark.sparkContext.parallelize(asked, len(asked)).map(partial(attempt, act)).collect()
    for one in found:
        if isinstance(one, PpldmError):
            raise one
    return zip(asked, found, strict=True)


def attempt(act: Callable, *arguments):
    """What `act` gives, or its error for the driver: Spark would wrap it in two pages of Java."""
    try:
        return act(*arguments)
    except PpldmError as error:
        return error


def _make_parts(tasks: list[PartTask], hadoop: str | None) -> list[dict]:
    if hadoop is None:
        return list(map(make_part, tasks))
    unit, copy, records = tasks[0].unit, None, []
    with reaching(hadoop) as client, local_folder(unit.path.parent) as folder:
        if isinstance(unit.path, AddressPath):
            unit = replace(unit, path=unit.path.at(client))
            copy = cache(partial(_fetch, unit, folder))
        for task in tasks:
            path = task.path.at(client) if isinstance(task.path, AddressPath) else task.path
            records.append(make_part(replace(task, path=path, unit=unit, copy=copy)))
    return records


def _count_spans(unit: Unit, rows: int, hadoop: str) -> list[Span]:
    with reaching(hadoop) as client, local_folder(unit.path.parent) as folder:
        return _fetch(replace(unit, path=unit.path.at(client)), folder).spans(rows)


def _fetch(unit: Unit, folder: Path) -> Unit:
    """A unit's copy in a folder of this machine."""
    unit.path.fetch(folder / unit.path.name)
    return replace(unit, path=folder / unit.path.name)

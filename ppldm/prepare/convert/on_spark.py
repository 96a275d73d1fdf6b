"""A conversion on Spark's executors: a task for each part or, where the source lies at an address, for each unit of it.

An executor copies such a unit, a tar or a parquet file, to its own disk, once for all parts that are to be made of it;
and once before, to count its rows, since the number of a part depends on the rows before it. All tasks are one job, so
that every executor works; an error of one is raised when the others are done.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import groupby

from ...utils.errors import PpldmError
from ...utils.machine.spark import following_tasks, spark_session
from ..address_path import AddressPath
from ..executor_hadoop import local_folder, reaching
from ..hadoop import Hadoop
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


def run_tasks(spark, name: str, asked: Sequence, answer: Callable) -> Iterator[tuple]:
    """(each of `asked`, what `answer` gives for it). answer: to (answer, error), a task of its own. Raises the first
    error when all are done."""
    with following_tasks(spark, name, len(asked), num_stages=1):
        found = spark.sparkContext.parallelize(asked, len(asked)).map(answer).collect()
    for _, error in found:
        if error:
            raise error
    return zip(asked, (one for one, _ in found), strict=True)


def _make_parts(tasks: list[PartTask], hadoop: str | None) -> tuple[list[dict], PpldmError | None]:
    """(the records of the parts up to an error, that error): Spark would wrap it in two pages of Java."""
    records = []
    try:
        if hadoop is None:
            records += map(make_part, tasks)
        else:
            with reaching(hadoop) as client, local_folder() as folder:
                copy = cache(partial(_fetch, tasks[0].unit, folder, client))
                is_remote = isinstance(tasks[0].unit.path, AddressPath)
                records += (make_part(_at(task, client, copy if is_remote else None)) for task in tasks)
    except PpldmError as error:
        return records, error
    return records, None


def _at(task: PartTask, hadoop: Hadoop, copy) -> PartTask:
    """A task with the gateway of this process."""
    path = task.path.at(hadoop) if isinstance(task.path, AddressPath) else task.path
    unit = replace(task.unit, path=task.unit.path.at(hadoop)) if copy else task.unit
    return replace(task, path=path, unit=unit, copy=copy)


def _count_spans(unit: Unit, rows: int, hadoop: str) -> tuple[list[Span], PpldmError | None]:
    try:
        with reaching(hadoop) as client, local_folder() as folder:
            try:
                return _fetch(unit, folder, client).spans(rows), None
            except PpldmError as error:
                raise type(error)(str(error).replace(str(folder), str(unit.path.parent))) from error
    except PpldmError as error:
        return [], error


def _fetch(unit: Unit, folder, hadoop: Hadoop) -> Unit:
    """A unit's copy in a folder of this machine."""
    hadoop.fetch(str(unit.path), str(folder / unit.path.name))
    return replace(unit, path=folder / unit.path.name)

"""What is done with each file of a data set, by processes or on Spark: fetched, and where it is to be, extracted."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ...utils.checksums import file_sha256
from ...utils.errors import PpldmError
from ...utils.files import make_output_dir
from ...utils.jobs import find_finished, finish, list_pieces, take_state
from ...utils.log import progress
from ...utils.processes.workers import check_workers, map_unordered
from .fetch import RemoteFile, fetch


@dataclass(frozen=True)
class FileTask:
    """One file to fetch to the folder `source`, and, where `tar` is named, to extract. `content`: of captions."""

    file: RemoteFile
    source: Path
    record: Path
    tar: Path | None = None
    captions: Path | None = None
    content: str = ""
    columns: tuple = ()
    most_rows: int = 0
    remove: bool = False

    def key(self) -> dict:
        """Settings and input of the tar."""
        file = {"file": self.file.name, "size": self.file.size, "sha256": self.file.sha256}
        settings = file | {"columns": dict(self.columns), "most_rows": self.most_rows}
        return {"settings": settings, "input": {"content": self.content}}

    def is_extracted(self) -> bool:
        """Whether the tar is there as a run with this key has made it."""
        return self.tar is not None and find_finished(self.record, self.key(), partial(_is_whole, self)) is not None


def map_files(function: Callable[[FileTask], dict], tasks: list[FileTask], num_workers: int, master: str) -> list[dict]:
    """The accounts of tasks in their order, by processes of this machine or by Spark."""
    if not tasks:
        return []
    for folder in {task.record.parent for task in tasks}:
        make_output_dir(folder)
    if master:
        return _map_on_spark(function, tasks, master)
    done = {}
    with progress(total=len(tasks), desc="files", unit="file") as bar:
        for task, account in map_unordered(function, tasks, check_workers(num_workers)):
            done[task.file.name] = account
            bar.update()
    return [done[task.file.name] for task in tasks]


def _map_on_spark(function: Callable[[FileTask], dict], tasks: list[FileTask], master: str) -> list[dict]:
    from ...utils.machine.spark import spark_session
    from ..convert.on_spark import DRIVER_MEMORY_GB, run_tasks

    with spark_session(master, DRIVER_MEMORY_GB) as spark:
        return [account for _, account in run_tasks(spark, "fetch", tasks, partial(_try, function))]


def _try(function: Callable[[FileTask], dict], task: FileTask) -> tuple[dict, PpldmError | None]:
    try:
        return function(task), None
    except PpldmError as error:
        return {}, error


def fetch_only(task: FileTask) -> dict:
    """Fetch a file; {"bytes"}."""
    return {"bytes": fetch(task.file, task.source).stat().st_size}


def get_file(task: FileTask) -> dict:
    """Fetch a file and extract it, unless that is done; its account."""
    if task.tar is None:
        return fetch_only(task)
    record, _ = finish(task.record, task.key(), partial(_is_whole, task), partial(_extract, task))
    if task.remove:
        (task.source / task.file.name).unlink(missing_ok=True)
    return record


def _extract(task: FileTask) -> dict:
    from .extract import extract

    path = fetch(task.file, task.source)
    account = extract(path, task.tar, task.captions, dict(task.columns), task.most_rows)
    return account | {"bytes": path.stat().st_size, "output": take_state(list_pieces(task.tar))}


def _is_whole(task: FileTask, record: dict) -> bool:
    if record["output"] == take_state(list_pieces(task.tar)):
        return True
    return (file_sha256(task.tar) if task.tar.is_file() else None) == record["sha256"]

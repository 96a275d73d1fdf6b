"""Downloads carried out: the look at the network and the disk before, shards in processes or on Spark, the accounts.

A shard whose part lies at an address is made in a folder of the executor, then put there. Law: the shard is the one
that `shard.download_shard` makes, and at its address, too, it is finished or absent: `NNNNN_stats.json` gets its name
last. A journal is of this machine and ends with the try, so that what was fetched for a shard that was not finished is
fetched again.
"""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

from ...utils.errors import ConfigError, DataError, EnvironmentProblem, OutputError, PpldmError
from ...utils.files import count_free_bytes, make_output_dir, write_json
from ...utils.log import following, get_logger
from ...utils.machine.spark import following_tasks, spark_session
from ...utils.processes.workers import map_with_deadline
from ..convert.on_spark import attempt
from ..place import AddressPath, local_folder, put_files, reaching
from .failures import describe_failures, describe_rows, find_network_fault, without_password
from .part import PartDownload, sample_urls
from .resize import blame, read_blamed
from .shard import (
    ShardSettings,
    ShardTask,
    download_shard,
    fetch_samples,
    find_pieces,
    in_flight_path,
    record_path,
    stats_path,
    work_folder,
)

DISTRIBUTORS = ("multiprocessing", "pyspark")
_KILL_GRACE_SECONDS = 120
# Of a shard, each after another picture was found that ends its process.
_MAX_TRIES = 21
_PREFLIGHT_URL_SECONDS, _PREFLIGHT_SECONDS = 20, 300
_MIN_PREFLIGHT_URLS, _MAX_SAMPLED_PARTS = 20, 16
# Below this, no more shards are begun.
_MIN_FREE_BYTES = 2**30
_SPARE = 1.1
# Rows wait in files for their shard, a few MB each.
_SHARDS_PER_JOB = 1000
DRIVER_MEMORY_GB = 1.0


def download_shard_at(task: ShardTask, settings: ShardSettings, hadoop: str) -> dict:
    """Download a shard to its address and return its record; `hadoop` are the settings of the file systems. Raises as
    `shard.download_shard`."""
    with reaching(hadoop) as client, local_folder(task.part_folder.parent) as folder:
        part, rows_file = task.part_folder.at(client), task.rows_file.at(client)
        local = replace(task, part_folder=folder / part.name, rows_file=folder / rows_file.name)
        rows_file.fetch(local.rows_file)
        record = download_shard(local, settings)
        put_shard(local.part_folder, part, task.number)
        rows_file.remove()
    return record


def put_shard(folder: Path, part: AddressPath, number: int) -> None:
    """Copy a finished shard from a part's folder here to that at an address, in place of what there is of it."""
    files = {piece: part / piece.name for piece in find_pieces(folder, number)}
    files |= {find(folder, number): find(part, number) for find in (record_path, stats_path)}
    put_files(files, [*find_pieces(part, number), record_path(part, number)], work_folder(part))


@dataclass(frozen=True)
class Runner:
    """Where shards are downloaded: in processes of this machine, or on a Spark cluster."""

    distributor: str
    master: str
    num_processes: int

    def __post_init__(self):
        if self.distributor not in DISTRIBUTORS:
            raise ConfigError(f"--distributor {self.distributor!r} is unknown; use {' or '.join(DISTRIBUTORS)}")
        if self.master and self.distributor != "pyspark":
            raise ConfigError("--master is only for --distributor pyspark; omit it")
        if self.num_processes < 1:
            raise ConfigError(f"--processes-count is {self.num_processes}; it must be at least 1")

    @property
    def spark_master(self) -> str:
        """Where Spark is to run, unless spark-submit says it."""
        return self.master or f"local[{self.num_processes}]"

    def run(self, part: PartDownload, tasks: Iterator[ShardTask], num_rows: int) -> tuple[list[ShardTask], int]:
        """Download shards of a part; return those that could not be finished, and how many pictures are known to have
        ended their processes on this machine. Raises PpldmError where none can be finished."""
        is_here = self.distributor == "multiprocessing"
        failed, num_blamed = [], 0
        for task, result in (self._run_here if is_here else self._run_on_spark)(part, tasks, num_rows):
            if isinstance(result, EnvironmentProblem | OutputError | ConfigError):
                raise result
            if isinstance(result, PpldmError):
                path = in_flight_path(task.part_folder, task.number)
                if is_here:
                    blame(path)
                    urls = read_blamed(path)
                    num_blamed += len(urls)
                    listed = ", ".join(map(without_password, sorted(urls)))
                    result = f"{result}; left out from now on: {listed}" if urls else result
                get_logger().warning("shard %d of %s: %s", task.number, task.part_folder, result)
                failed.append(task)
        return failed, num_blamed

    def _run_here(self, part: PartDownload, tasks: Iterator[ShardTask], num_rows: int) -> Iterator[tuple]:
        counter = multiprocessing.get_context("spawn").Value("q", 0)
        work = partial(download_shard, settings=part.settings, on_fetch=partial(_add_one, counter))
        seconds = part.settings.shard_seconds + part.settings.fetch.url_seconds + _KILL_GRACE_SECONDS
        with following(lambda: (counter.value, num_rows), desc=part.folder.name, unit="url"):
            yield from map_with_deadline(work, tasks, self.num_processes, seconds)

    def _run_on_spark(self, part: PartDownload, tasks: Iterator[ShardTask], num_rows: int) -> Iterator[tuple]:
        folder, num_before, download = part.folder, 0, download_shard
        at_address = isinstance(folder, AddressPath)
        if at_address:
            download = partial(download_shard_at, hadoop=folder.hadoop.settings())
        with spark_session(self.spark_master, DRIVER_MEMORY_GB) as spark:
            if spark.conf.get("spark.dynamicAllocation.enabled", "false") == "true":
                raise ConfigError(
                    "Spark may take executors away in the middle of a download (spark.dynamicAllocation.enabled): it "
                    "would stop early or never end; set that to false"
                )
            while batch := list(islice(tasks, _SHARDS_PER_JOB)):

                def count_done(batch=batch, num_before=num_before) -> tuple[int, int]:
                    done = (task.num_rows for task in batch if stats_path(folder, task.number).exists())
                    return num_before + sum(done), num_rows

                # At an address, to ask for each shard whether it is there would take longer than to wait for it.
                if at_address:
                    bar = following_tasks(spark, folder.name, len(batch), num_stages=1)
                else:
                    bar = following(count_done, desc=folder.name, unit="url")
                with bar:
                    act = partial(attempt, partial(download, settings=part.settings))
                    job = spark.sparkContext.parallelize(batch, len(batch)).map(act)
                    yield from zip(batch, job.collect(), strict=True)
                num_before += sum(task.num_rows for task in batch)


def download_parts(
    parts: Sequence[PartDownload], out, runner: Runner, num_sampled: int, ignore_disk_space: bool
) -> None:
    """Download; what was done before is left as it is. Raises PpldmError where that makes no sense."""
    todo = [part for part in parts if part.count_rows()]
    for part in parts:
        if part not in todo and part.job.is_new(*part.plan):
            with part.claimed():
                pass
    if not todo:
        return
    num_bytes = _check_network(todo, num_sampled) if num_sampled else 0
    make_output_dir(out)
    if not ignore_disk_space:
        _check_disk_space(out, num_bytes)
    for part in todo:
        _download_part(part, runner)


def _download_part(part: PartDownload, runner: Runner) -> None:
    with part.claimed():
        tasks, num_rows, known = _while_room(part.tasks(), part.folder), part.count_rows(), -1
        for _ in range(_MAX_TRIES):
            failed, num_blamed = runner.run(part, tasks, num_rows)
            # Whoever finds no other picture to blame than the try before has no more to try.
            if not failed or num_blamed == known:
                break
            get_logger().warning("%s: %d shard(s) are tried once more", part.folder, len(failed))
            tasks, num_rows, known = iter(failed), sum(task.num_rows for task in failed), num_blamed
        report = part.report()
        write_json(part.folder / ".download" / "report.json", report)
    get_logger().info("%s: %s", part.folder, describe_rows(report))


def _add_one(counter) -> None:
    with counter.get_lock():
        counter.value += 1


def _check_network(todo: Sequence[PartDownload], num_urls: int) -> float:
    """Fetch a sample of the URLs; return how many bytes the pictures of all rows will take.

    Raises EnvironmentProblem where it is the network that fails.
    """
    num_rows, settings = sum(part.count_rows() for part in todo), todo[0].settings
    num_urls = min(num_urls, max(_MIN_PREFLIGHT_URLS, num_rows // 20))
    sampled = todo[:_MAX_SAMPLED_PARTS]
    urls = [url for item in sampled for url in sample_urls(item.part, item.columns.url, -(-num_urls // len(sampled)))]
    get_logger().info("fetching %d URLs of the metadata to see whether the network is sound", len(urls))
    brief = replace(settings.fetch, url_seconds=min(settings.fetch.url_seconds, _PREFLIGHT_URL_SECONDS))
    fetch = partial(fetch_samples, settings=replace(settings, fetch=brief), seconds=_PREFLIGHT_SECONDS)
    [(_, samples)] = map_with_deadline(fetch, [urls], 1, _PREFLIGHT_SECONDS + _KILL_GRACE_SECONDS)
    if isinstance(samples, DataError):  # its process was ended, as a shard's may be
        get_logger().warning("how much room the pictures need is not known: %s", samples)
        return 0.0
    if isinstance(samples, PpldmError):
        raise samples
    outcomes = [outcome for outcome, _ in samples]
    if fault := find_network_fault(outcomes, ask_again=True):
        raise EnvironmentProblem(f"{fault}; nothing was marked complete, and the same command goes on")
    failed = Counter(outcome.name for outcome in outcomes)
    num_good = failed.pop("success", 0)
    num_bytes = sum(size for _, size in samples)
    lines = [
        f"{num_good} of them are pictures, {num_bytes / 1e3 / max(num_good, 1):.0f} KB each as kept",
        *describe_failures(failed, len(samples), {}),
    ]
    get_logger().info("%s", "\n".join(lines))
    return num_rows * num_bytes / max(len(samples), 1)


def _check_disk_space(out, num_bytes: float) -> None:
    """Raises OutputError where the disk has less than what the sample says that is needed."""
    free = count_free_bytes(out)
    if num_bytes * _SPARE > free:
        raise OutputError(
            f"about {num_bytes * _SPARE / 1e9:,.1f} GB are needed and {out} has {free / 1e9:,.1f} GB free; choose a "
            "larger disk for --out, download part by part (--part-id), or go on all the same with --ignore-disk-space"
        )


def _while_room(tasks: Iterable[ShardTask], folder) -> Iterator[ShardTask]:
    for task in tasks:
        if count_free_bytes(folder) < _MIN_FREE_BYTES:
            raise OutputError(f"the disk of {folder} is nearly full; make room, and the same command goes on")
        yield task

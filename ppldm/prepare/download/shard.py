"""One shard of a download: img2dataset's Downloader between a file of rows and finished files.

Laws. Rows in = rows in the shard's parquet file, each with its picture or the reason why not. A shard is downloaded in
a folder of its own and moved to its place when it is whole, `NNNNN_stats.json` last; so where that file is, the shard
is finished, and what a killed run left is outside of the data. What it had fetched is in a journal, and is not fetched
again (`shard_journal`). After `shard_seconds` what has not been fetched fails
as "deadline", and the shard is closed with it.

    part_1/00000/000000000.jpg .txt .json    or 00000.tar; in the parquet format, the pictures are in 00000.parquet
    part_1/00000.parquet                     a line for each row
    part_1/00000_stats.json                  img2dataset's counts
    part_1/.download/                        ours: plan.json, report.json, work/; records/, journals/: one a shard
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pyarrow as pa
import pyarrow.parquet as pq

from ...utils.errors import ConfigError, EnvironmentProblem, OutputError
from ...utils.files import RemotePath, fsync_dir, read_json, remove_path, write_json
from ...utils.text import one_line
from ..block_list import NOTHING, BlockList
from .failures import CLASSES_VERSION
from .fetch import Bounds, install
from .in_flight import WatchedResizer
from .network import Outcome, find_network_fault, without_password
from .resize import Resizer
from .shard_journal import Journal, JournalingWriter
from .shard_rows import parquet_source, write_rows

OUTPUT_FORMATS = ("files", "webdataset", "parquet")
OOM_SHARD_COUNT = 5  # digits of a shard's number in names and keys, as img2dataset has it
_MAX_STATUSES = 100  # different messages in img2dataset's stats, as there
_MAX_EXAMPLE_LENGTH = 200  # characters of a message, and of a URL
RETRY_COLUMNS = ("retry_of", "retried_after")


@dataclass(frozen=True)
class ShardSettings:
    """How a shard is fetched and kept. `columns` are those of the metadata kept beside url and caption."""

    resizer: Resizer
    output_format: str
    columns: tuple[str, ...]
    samples_per_shard: int
    thread_count: int
    timeout: float
    retries: int
    bounds: Bounds
    shard_seconds: float
    user_agent_token: str | None
    disallowed_header_directives: tuple[str, ...]
    check_certificates: bool = True
    refuse_private: bool = True
    requests_per_host: int = 0
    blocked: BlockList = NOTHING

    def __post_init__(self):
        if self.output_format not in OUTPUT_FORMATS:
            raise ConfigError(f"--output-format {self.output_format!r} is unknown; use {', '.join(OUTPUT_FORMATS)}")
        for flag, value, least in (
            ("number-sample-per-shard", self.samples_per_shard, 1),
            ("thread-count", self.thread_count, 1),
            ("retries", self.retries, 0),
            ("requests-per-host", self.requests_per_host, 0),
        ):
            if value < least:
                raise ConfigError(f"--{flag} is {value}; it must be at least {least}")
        for flag, value in (
            ("timeout", self.timeout),
            ("url-seconds", self.bounds.url_seconds),
            ("shard-seconds", self.shard_seconds),
            ("max-bytes", self.bounds.max_bytes),
        ):
            if not value > 0:
                raise ConfigError(f"--{flag} is {value}; it must be more than 0")


@dataclass(frozen=True)
class ShardTask:
    """Shard `number` of a part's folder. `rows_file` is an Arrow file of the columns, caption and url."""

    part_folder: Path | RemotePath
    number: int
    rows_file: Path | RemotePath
    num_rows: int
    is_retry: bool = False


def shard_name(number: int) -> str:
    return f"{number:0{OOM_SHARD_COUNT}}"


def work_folder(part_folder: Path | RemotePath) -> Path:
    return part_folder / ".download" / "work"


def record_path(part_folder: Path | RemotePath, number: int) -> Path:
    return part_folder / ".download" / "records" / f"{shard_name(number)}.json"


def journal_path(part_folder: Path | RemotePath, number: int) -> Path:
    return part_folder / ".download" / "journals" / shard_name(number)


def in_flight_path(part_folder: Path | RemotePath, number: int) -> Path:
    return part_folder / ".download" / "journals" / f"{shard_name(number)}.decoding"


def stats_path(part_folder: Path | RemotePath, number: int) -> Path:
    return part_folder / f"{shard_name(number)}_stats.json"


def download_shard(task: ShardTask, settings: ShardSettings, on_fetch: Callable[[], None] = lambda: None) -> dict:
    """Download a shard to its place and return its record (see `make_record`). `on_fetch`: see fetch.install.

    Where the network turns out to fail, and for an incomplete shard, nothing is kept but the journal. Raises
    EnvironmentProblem, OutputError.
    """
    started = time.time()
    work = work_folder(task.part_folder) / shard_name(task.number)
    shutil.rmtree(work, ignore_errors=True)
    try:
        work.mkdir(parents=True)
        journal = Journal(journal_path(task.part_folder, task.number), _stamp(task, settings))
        with journal.opened():
            _fetch_missing_rows(task, settings, journal, work, on_fetch)
        record = make_record(work, task.number)
        if record["rows"] != task.num_rows:
            raise OutputError(
                f"{record['rows']} of the {task.num_rows} rows of shard {task.number} were written to "
                f"{task.part_folder}; the messages above say why; most likely the disk is full"
            )
        # What is tried again failed before, and may well do so for good.
        fault = None if task.is_retry else find_network_fault(read_outcomes(work, task.number))
        if fault:
            raise EnvironmentProblem(f"{fault}; shard {task.number} of {task.part_folder} was not kept")
        _move_into_place(work, task, record | {"seconds": round(time.time() - started, 3)})
    except (OSError, pa.ArrowException) as error:
        raise OutputError(f"cannot write shard {task.number} of {task.part_folder}: {error}; make room") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    journal.path.unlink(missing_ok=True)
    in_flight_path(task.part_folder, task.number).unlink(missing_ok=True)
    task.rows_file.unlink(missing_ok=True)
    return record


def _stamp(task: ShardTask, settings: ShardSettings) -> str:
    """Tells the rows of a shard, and the settings that decide what becomes of one, from any other."""
    decisive = (
        settings.resizer,
        settings.bounds.max_bytes,
        settings.user_agent_token,
        settings.disallowed_header_directives,
        settings.check_certificates,
        settings.refuse_private,
        CLASSES_VERSION,
        *settings.blocked.settings.values(),
    )
    return hashlib.sha256(task.rows_file.read_bytes() + repr(decisive).encode()).hexdigest()


def _fetch_missing_rows(
    task: ShardTask, settings: ShardSettings, journal: Journal, work: Path, on_fetch: Callable[[], None]
) -> None:
    """Write the shard into the folder `work`: the rows of the journal, and those that it lacks, which are fetched."""
    missing = [row for row in range(task.num_rows) if row not in journal.rows]
    # A copy, since img2dataset deletes its input: the rows must be there for another try.
    rows_file = work / "rows.arrow"
    with pa.ipc.open_file(str(task.rows_file)) as file:
        write_rows(file.read_all().take(pa.array(missing, pa.int64())), rows_file)
    for _ in journal.rows:
        on_fetch()
    columns = (*settings.columns, *(RETRY_COLUMNS if task.is_retry else ()))
    with closing(WatchedResizer(settings.resizer, in_flight_path(task.part_folder, task.number))) as resizer:
        downloader = _make_downloader(settings, columns, work, task.number, missing, journal, resizer)
        _install(settings, settings.shard_seconds, on_fetch)  # behind img2dataset's import, which takes seconds
        downloader.download_shard((task.number, str(rows_file)))
    if journal.rows:
        _correct_stats(work, task.number)


def _correct_stats(work: Path, number: int) -> None:
    """img2dataset has counted the rows that were missing; count all."""
    path, outcomes = stats_path(work, number), read_outcomes(work, number)
    statuses = Counter(outcome.status for outcome in outcomes)
    messages = Counter(outcome.message or outcome.status for outcome in outcomes)
    stats = read_json(path) | {
        "count": len(outcomes),
        "successes": statuses["success"],
        "failed_to_download": statuses["failed_to_download"],
        "failed_to_resize": statuses["failed_to_resize"],
        "status_dict": dict(messages.most_common(_MAX_STATUSES)),
    }
    write_json(path, stats)


def _install(settings: ShardSettings, seconds: float, on_fetch: Callable[[], None] = lambda: None) -> None:
    install(
        settings.bounds,
        time.monotonic() + seconds,
        on_fetch,
        settings.check_certificates,
        settings.refuse_private,
        settings.requests_per_host,
        settings.blocked,
    )


def fetch_samples(urls: Sequence[str], settings: ShardSettings, seconds: float) -> list[tuple[Outcome, int]]:
    """What becomes of each URL, fetched as a shard's are and kept nowhere, and how many bytes would be kept."""
    from concurrent.futures import ThreadPoolExecutor

    downloader = _import_downloader()
    _install(settings, seconds)

    def fetch(url: str) -> tuple[Outcome, int]:
        _, stream, message = downloader.download_image_with_retry(
            (0, url),
            settings.timeout,
            settings.retries,
            settings.user_agent_token,
            list(settings.disallowed_header_directives),
        )
        if stream is None:
            return Outcome(url, "failed_to_download", message), 0
        encoded, *_, message = settings.resizer(stream)
        if encoded is None:
            return Outcome(url, "failed_to_resize", message), 0
        return Outcome(url, "success", None), len(encoded)

    with ThreadPoolExecutor(settings.thread_count) as executor:
        return list(executor.map(fetch, urls))


def read_outcomes(folder: Path | RemotePath, number: int) -> list[Outcome]:
    """What became of each row of a shard, in the order of its table."""
    source = parquet_source(folder / f"{shard_name(number)}.parquet")
    table = pq.read_table(source, columns=["url", "status", "error_message"], partitioning=None)
    return [Outcome(*row) for row in zip(*(column.to_pylist() for column in table.columns), strict=True)]


def make_record(folder: Path | RemotePath, number: int) -> dict:
    """What became of a shard's rows, from its parquet file and the files in `folder`.

    rows = success + the sum of `failed` (by class). `retried` counts the rows of a retry by the class of their last
    failure. `bytes` are those of all files.
    """
    outcomes = read_outcomes(folder, number)
    counts, examples = Counter(outcome.name for outcome in outcomes), {}
    for outcome in outcomes:
        if outcome.name != "success":
            message, url = outcome.message or "", without_password(outcome.url or "no URL")
            examples.setdefault(
                outcome.name, f"{one_line(message, _MAX_EXAMPLE_LENGTH)} ({one_line(url, _MAX_EXAMPLE_LENGTH)})"
            )
    path = folder / f"{shard_name(number)}.parquet"
    retried = Counter()
    if "retried_after" in pq.read_schema(parquet_source(path)).names:
        retried.update(
            pq.read_table(parquet_source(path), columns=["retried_after"], partitioning=None)[
                "retried_after"
            ].to_pylist()
        )
    success = counts.pop("success", 0)
    return {
        "classes_version": CLASSES_VERSION,
        "rows": len(outcomes),
        "success": success,
        "failed": dict(sorted(counts.items())),
        "retried": dict(sorted(retried.items())),
        "examples": dict(sorted(examples.items())),
        "bytes": sum(map(_count_bytes, find_pieces(folder, number))),
    }


def remove_shard(part_folder: Path | RemotePath, number: int) -> None:
    """Remove what there is of an unfinished shard."""
    for path in (*find_pieces(part_folder, number), record_path(part_folder, number)):
        remove_path(path)


def find_pieces(folder: Path | RemotePath, number: int) -> list[Path | RemotePath]:
    """The files and the folder of a shard that are there, without its stats."""
    paths = (folder / f"{shard_name(number)}{suffix}" for suffix in ("", ".tar", ".parquet"))
    return [path for path in paths if path.exists()]


def _count_bytes(piece: Path | RemotePath) -> int:
    if isinstance(piece, RemotePath):
        return piece.count_bytes()
    if not piece.is_dir():
        return piece.stat().st_size
    with os.scandir(piece) as entries:
        return sum(entry.stat().st_size for entry in entries)


def _move_into_place(work: Path, task: ShardTask, record: dict) -> None:
    os.sync()  # the shard's files are many, and one call for each would take minutes
    remove_shard(task.part_folder, task.number)
    for piece in find_pieces(work, task.number):
        os.replace(piece, task.part_folder / piece.name)
    record_file = record_path(task.part_folder, task.number)
    record_file.parent.mkdir(parents=True, exist_ok=True)
    write_json(record_file, record)
    fsync_dir(task.part_folder)
    os.replace(stats_path(work, task.number), stats_path(task.part_folder, task.number))
    fsync_dir(task.part_folder)


def _import_downloader():
    """img2dataset's module `downloader`. Raises EnvironmentProblem.

    It imports wandb, for reports that are not asked for here, and albumentations, for the resizer that ours replaces:
    empty modules stand in for them during the import. webdataset, which it imports, does without PyTorch.
    """
    idle = [name for name in ("wandb", "albumentations", "torch") if name not in sys.modules]
    sys.modules.update({name: ModuleType(name) if name != "torch" else None for name in idle})  # type: ignore[misc]
    try:
        from img2dataset import downloader
    except ImportError as error:
        from ...utils.machine.environment import PIP

        raise EnvironmentProblem(
            f"img2dataset cannot be imported ({error}); {PIP} install 'img2dataset>=1.47,<2'"
        ) from error
    finally:
        for name in idle:
            del sys.modules[name]
    return downloader


def _make_downloader(
    settings: ShardSettings,
    columns: Sequence[str],
    folder: Path,
    number: int,
    rows: Sequence[int],
    journal: Journal,
    resizer: WatchedResizer,
):
    """img2dataset's Downloader for some rows of shard `number`, which takes the others from the journal."""
    downloader = _import_downloader()
    from img2dataset import writer

    writers = {
        "files": writer.FilesSampleWriter,
        "webdataset": writer.WebDatasetSampleWriter,
        "parquet": writer.ParquetSampleWriter,
    }
    digits = math.ceil(math.log10(settings.samples_per_shard))  # of a row's number in keys, as img2dataset has it

    def make_writer(*args, **kwargs) -> JournalingWriter:
        return JournalingWriter(
            writers[settings.output_format](*args, **kwargs),
            journal,
            lambda key: rows[int(key) - number * 10**digits],
            lambda row: downloader.compute_key(row, number, digits, OOM_SHARD_COUNT),
        )

    return downloader.Downloader(
        sample_writer_class=make_writer,
        resizer=resizer,
        blurring_bbox_col="url",  # that is, `resizer` is called with it
        thread_count=settings.thread_count,
        save_caption=True,
        extract_exif=True,
        output_folder=str(folder),
        column_list=[*columns, "caption", "url"],
        timeout=settings.timeout,
        number_sample_per_shard=settings.samples_per_shard,
        oom_shard_count=OOM_SHARD_COUNT,
        compute_hash="sha256",
        verify_hash_type=None,
        encode_format="jpg",
        retries=settings.retries,
        user_agent_token=settings.user_agent_token,
        disallowed_header_directives=list(settings.disallowed_header_directives) or None,
    )

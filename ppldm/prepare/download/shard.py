"""One shard of a download, from a file of rows to the files that img2dataset's writers make; its Downloader fetches
without bounds (`fetch`) and loses a row over which it stumbles.

Laws. Rows in = rows in the shard's parquet file, in their order, each with its picture or the reason why not; the same
content makes the same shard. A shard is moved to its place when it is whole, `NNNNN_stats.json` last: where that file
is, the shard is finished. What a killed run had fetched is in a journal, and is not fetched again. After
`shard_seconds` what has not been fetched fails as "deadline".

    part_1/00000/000000000.jpg .txt .json    or 00000.tar; in the parquet format, the pictures are in 00000.parquet
    part_1/00000.parquet                     a line for each row
    part_1/00000_stats.json                  img2dataset's counts
    part_1/.download/                        ours: plan.json, report.json, work/; records/, journals/: one a shard
"""

from __future__ import annotations

import errno
import faulthandler
import hashlib
import io
import json
import math
import os
import re
import shutil
import struct
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pyarrow as pa

from ...utils.errors import ConfigError, EnvironmentProblem, OutputError, RowError
from ...utils.files import RemotePath, fsync_dir, remove_path, write_json
from ...utils.text import one_line
from ..convert.reencode import Resizer
from ..metadata import open_parquet
from .failures import CLASSES_VERSION, TEMPORARY, Outcome, classify, find_network_fault, without_password
from .fetch import Fetcher, FetchError, FetchSettings, require

_WRITERS = {"files": "Files", "webdataset": "WebDataset", "parquet": "Parquet"}  # img2dataset's names of them
OOM_SHARD_COUNT = 5  # digits of a shard's number in names and keys, as img2dataset has it
_MAX_EXAMPLE_LENGTH = 200  # characters of a message, and of a URL
_HEADER = struct.Struct("<II")  # length and CRC-32 of what follows
_DECODE_SECONDS = 120.0  # of a picture, after which its process is ended
_DECODING, _MAX_LEFT = re.compile(rb"decoding (\d+)\n(.*)", re.DOTALL), 1024  # bytes that are looked at
RETRY_COLUMNS = ("retry_of", "retried_after")
# What img2dataset's tables say of a row besides its metadata, in their order.
_SIZES = ("width", "height", "original_width", "original_height")
FACTS = {name: pa.string() for name in ("key", "status", "error_message")}
FACTS |= dict.fromkeys(_SIZES, pa.int32()) | {"exif": pa.string()}
HASHES = ("md5", "sha256", "sha512")  # further columns, of which one may be asked for
EXPECTED = "expected_"  # and the hash: the column of what a file must have to be kept


@dataclass(frozen=True)
class ShardSettings:
    """How a shard is fetched and kept. `columns` are those of the metadata kept beside url and caption. `compute_hash`:
    of HASHES, or "none"."""

    fetch: FetchSettings
    resizer: Resizer
    output_format: str
    columns: tuple[str, ...]
    number_sample_per_shard: int
    thread_count: int
    shard_seconds: float
    compute_hash: str = "sha256"

    def __post_init__(self):
        if self.output_format not in _WRITERS:
            raise ConfigError(f"--output-format {self.output_format!r} is unknown; use {', '.join(_WRITERS)}")
        if self.compute_hash not in (*HASHES, "none"):
            raise ConfigError(f"--compute-hash {self.compute_hash!r} is unknown; use {', '.join(HASHES)} or none")
        require("number-sample-per-shard", self.number_sample_per_shard, 1)
        require("thread-count", self.thread_count, 1)
        require("shard-seconds", self.shard_seconds)

    @property
    def facts(self) -> dict[str, pa.DataType]:
        """FACTS, and the hash that is asked for."""
        return FACTS | ({} if self.compute_hash == "none" else {self.compute_hash: pa.string()})


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


def stats_path(part_folder: Path | RemotePath, number: int) -> Path:
    return part_folder / f"{shard_name(number)}_stats.json"


def download_shard(task: ShardTask, settings: ShardSettings, on_fetch: Callable[[], None] = lambda: None) -> dict:
    """Download a shard to its place and return its record (see `make_record`). `on_fetch` is called for each row. Where
    the network turns out to fail nothing is kept but the journal. Raises EnvironmentProblem, OutputError."""
    started = time.time()
    work = work_folder(task.part_folder) / shard_name(task.number)
    shutil.rmtree(work, ignore_errors=True)
    try:
        work.mkdir(parents=True)
        journal = Journal(journal_path(task.part_folder, task.number), _stamp(task, settings))
        with journal.opened():
            _make_shard(task, settings, journal, work, on_fetch)
        record = make_record(work, task.number)
        # What is tried again failed before, and may well do so for good.
        fault = None if task.is_retry else find_network_fault(read_outcomes(work, task.number))
        if fault:
            raise EnvironmentProblem(f"{fault}; shard {task.number} of {task.part_folder} was not kept")
        os.sync()  # the shard's files are many, and one call for each would take minutes
        remove_shard(task.part_folder, task.number)
        for piece in find_pieces(work, task.number):
            os.replace(piece, task.part_folder / piece.name)
        record_file = record_path(task.part_folder, task.number)
        record_file.parent.mkdir(parents=True, exist_ok=True)
        write_json(record_file, record | {"seconds": round(time.time() - started, 3)})
        fsync_dir(task.part_folder)
        os.replace(stats_path(work, task.number), stats_path(task.part_folder, task.number))
        fsync_dir(task.part_folder)
    except (OSError, pa.ArrowException) as error:
        raise OutputError(f"cannot write shard {task.number} of {task.part_folder}: {error}; make room") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    journal.path.unlink(missing_ok=True)
    task.rows_file.unlink(missing_ok=True)
    return record


def _stamp(task: ShardTask, settings: ShardSettings) -> str:
    """Tells the rows of a shard, and the settings that decide what becomes of one, from any other."""
    fetch = settings.fetch
    allowed = fetch.user_agent_token, fetch.disallowed_header_directives, fetch.check_certificates, fetch.refuse_private
    kept = settings.resizer, settings.compute_hash
    decisive = *kept, fetch.max_bytes, *allowed, CLASSES_VERSION, *fetch.blocked.settings.values()
    return hashlib.sha256(task.rows_file.read_bytes() + repr(decisive).encode()).hexdigest()


def _make_shard(
    task: ShardTask, settings: ShardSettings, journal: Journal, work: Path, on_fetch: Callable[[], None]
) -> None:
    """Write the shard into the folder `work`: the rows of the journal, and those that it lacks, which are fetched."""
    started = time.time()
    img2dataset = import_img2dataset()
    with pa.ipc.open_file(str(task.rows_file)) as file:
        table = file.read_all()
    rows = table.to_pylist()
    digits = math.ceil(math.log10(settings.number_sample_per_shard))  # of a row's number in keys, as img2dataset has it
    for _ in journal.rows:
        on_fetch()
    fetcher, unrecorded = Fetcher(settings.fetch, time.monotonic() + settings.shard_seconds), {}
    missing = {number: row["url"] for number, row in enumerate(rows) if number not in journal.rows}
    with closing(fetcher.fetch_all(missing, settings.thread_count)) as arriving:
        for number, fetched in arriving:
            key = f"{task.number * 10**digits + number:0{OOM_SHARD_COUNT + digits}}"
            facts, image = _examine(fetched, settings, journal.decoding(number), rows[number])
            meta = rows[number] | {"key": key} | facts
            if not journal.add(number, meta, image):
                unrecorded[number] = meta
            on_fetch()
    schema = pa.schema([*table.schema, *settings.facts.items()], table.schema.metadata)
    make_writer = getattr(img2dataset.writer, f"{_WRITERS[settings.output_format]}SampleWriter")
    writer = make_writer(task.number, str(work), True, OOM_SHARD_COUNT, schema, settings.resizer.encode_format)
    statuses, messages = Counter(), Counter()
    for number in range(len(rows)):
        meta, image = (unrecorded[number], None) if number in unrecorded else journal.read(number)
        statuses[meta["status"]] += 1
        messages[meta["error_message"] or meta["status"]] += 1
        writer.write(image, meta["key"], meta["caption"], meta)
    writer.close()
    counts = [len(rows), *(statuses[name] for name in ("success", "failed_to_download", "failed_to_resize"))]
    found = img2dataset.logger.CappedCounter.load(messages)
    img2dataset.logger.write_stats(str(work), task.number, *counts, started, time.time(), found, OOM_SHARD_COUNT)


def _examine(
    fetched: bytes | FetchError, settings: ShardSettings, decoding: AbstractContextManager, row: Mapping
) -> tuple[dict, bytes | None]:
    """(what img2dataset's tables say of a row, from its status on; its picture as kept, or None). `row`: its columns,
    of which those that begin with EXPECTED must be true of the file."""
    facts = dict.fromkeys(name for name in settings.facts if name != "key")
    for kind in HASHES if isinstance(fetched, bytes) else ():
        if EXPECTED + kind in row and hashlib.new(kind, fetched).hexdigest() != str(row[EXPECTED + kind]).lower():
            return facts | {"status": "failed_to_download", "error_message": "hash mismatch"}, None
    if isinstance(fetched, FetchError):
        return facts | {"status": "failed_to_download", "error_message": str(fetched)}, None
    try:
        with decoding:
            image, *sizes = settings.resizer.fit(fetched)
    except RowError as error:
        return facts | {"status": "failed_to_resize", "error_message": str(error)}, None
    facts |= {"status": "success"} | dict(zip(_SIZES, sizes, strict=True))
    hashes = {kind: hashlib.new(kind, fetched).hexdigest() for kind in HASHES if kind in facts}
    return facts | {"exif": _read_exif(fetched)} | hashes, image


def _read_exif(image: bytes) -> str | None:
    """What img2dataset says of a picture's EXIF data, as JSON; None where they are damaged."""
    import exifread

    try:
        tags = exifread.process_file(io.BytesIO(image), details=False)
        return json.dumps({name: str(value).strip() for name, value in tags.items() if value is not None})
    except Exception:  # what damaged data can make exifread raise is not a list
        return None


def fetch_samples(urls: Sequence[str], settings: ShardSettings, seconds: float) -> list[tuple[Outcome, int]]:
    """What becomes of each URL, fetched as a shard's are and kept nowhere, and how many bytes would be kept."""
    import_img2dataset()  # that it is there is known before anything is done
    samples: list = [None] * len(urls)
    fetcher = Fetcher(settings.fetch, time.monotonic() + seconds)
    for number, fetched in fetcher.fetch_all(dict(enumerate(urls)), settings.thread_count):
        facts, image = _examine(fetched, settings, nullcontext(), {})
        samples[number] = Outcome(urls[number], facts["status"], facts["error_message"]), len(image or b"")
    return samples


def read_outcomes(folder: Path | RemotePath, number: int) -> list[Outcome]:
    """What became of each row of a shard, in the order of its table."""
    rows = read_columns(folder, number, ["url", "status", "error_message"]).to_pylist()
    return [Outcome(row["url"], row["status"], row["error_message"]) for row in rows]


def read_columns(folder: Path | RemotePath, number: int, columns: Sequence[str]) -> pa.Table:
    """Those of the columns that the table of a shard has."""
    return open_parquet(folder / f"{shard_name(number)}.parquet").read(columns)


def make_record(folder: Path | RemotePath, number: int) -> dict:
    """What became of a shard's rows, by its files in `folder`: rows = success + the sum of `failed` (by class).
    `retried` counts the rows of a retry by the class of their last failure."""
    outcomes = read_outcomes(folder, number)
    counts, examples = Counter(outcome.name for outcome in outcomes), {}
    for outcome in outcomes:
        if outcome.name not in ("success", *examples):
            told = outcome.message or "", without_password(outcome.url or "no URL")
            message, url = (one_line(text, _MAX_EXAMPLE_LENGTH) for text in told)
            examples[outcome.name] = f"{message} ({url})"
    of_retry = read_columns(folder, number, ["retried_after"])
    retried = Counter(of_retry["retried_after"].to_pylist() if of_retry.column_names else ())
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
    return sum(file.stat().st_size for file in (os.scandir(piece) if piece.is_dir() else [piece]))


def import_img2dataset() -> SimpleNamespace:
    """img2dataset's modules `logger` and `writer`. Empty modules stand in during the import for wandb and
    albumentations, whose work is not asked for here; webdataset does without PyTorch. Raises EnvironmentProblem."""
    idle = [name for name in ("wandb", "albumentations", "torch") if name not in sys.modules]
    sys.modules.update({name: ModuleType(name) if name != "torch" else None for name in idle})  # type: ignore[misc]
    try:
        from img2dataset import logger, writer
    except ImportError as error:
        from ...utils.machine.environment import PIP

        raise EnvironmentProblem(
            f"img2dataset cannot be imported ({error}); {PIP} install 'img2dataset>=1.47,<2'"
        ) from error
    finally:
        for name in idle:
            del sys.modules[name]
    return SimpleNamespace(logger=logger, writer=writer)


@dataclass
class Journal:
    """What a running shard has of its rows so far, so that a kill loses only what was on its way.

    The file is a JSON line with `stamp`, which tells the shard's rows and settings, then a record a row: length,
    CRC-32, a JSON line of its number and what is known of it, its picture. `rows`: (place, bytes) of each. Laws. A torn
    record, the last at the moment of a kill, is cut off. Rows whose failure another try may mend (`failures.TEMPORARY`)
    are not recorded. A journal of another stamp is not read.

    Decoding cannot be interrupted. So meanwhile `decoding ROW` stands behind the records. After `_DECODE_SECONDS`
    Python's own watchdog ends the process and says so behind it; where it crashed or was killed, the one that started
    it knows (`find_blamed`). From then on the row is one of `blamed`, with a record without facts, and its picture is
    not decoded again. After a kill of the whole download nobody says anything, and the picture is tried again.
    """

    path: Path
    stamp: str
    rows: dict[int, tuple[int, int]] = field(default_factory=dict)
    blamed: set[int] = field(default_factory=set)

    @contextmanager
    def opened(self, has_ended: bool = False) -> Iterator[None]:
        """Find what an earlier run, whose process may have ended by itself, has left, and be ready for more inside."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a+b", buffering=0) as self._file:
            self._end = 0
            for place, body in self._scan():
                self._end = place + len(body)
                row, meta, _ = _split(body)
                if meta:
                    self.rows[row] = place, len(body)
                else:
                    self.blamed.add(row)
            self._file.seek(self._end)
            left = _DECODING.match(self._file.read(_MAX_LEFT))
            self._file.truncate(self._end)
            if not self._end:
                self._append(json.dumps(self.stamp).encode() + b"\n")
            if left and (has_ended or left[2]):
                self._record(int(left[1]), {})
                self.blamed.add(int(left[1]))
            yield

    def add(self, row: int, meta: dict, image: bytes | None) -> bool:
        """Record a row, unless another try may mend its failure; whether it was."""
        if classify(meta["status"], meta["error_message"]) in TEMPORARY:
            return False
        self.rows[row] = self._record(row, meta, image)
        return True

    @contextmanager
    def decoding(self, row: int) -> Iterator[None]:
        """Decode the picture of a row in the block. Raises RowError where that has ended a process before."""
        if row in self.blamed:
            raise RowError("deadline", "deadline: decoding it took too long, or ended the process")
        self._file.write(b"decoding %d\n" % row)
        faulthandler.dump_traceback_later(_DECODE_SECONDS, file=self._file, exit=True)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            self._file.truncate(self._end)

    def read(self, row: int) -> tuple[dict, bytes | None]:
        """(what is known of a recorded row, its picture or None)."""
        place, length = self.rows[row]
        return _split(os.pread(self._file.fileno(), length, place))[1:]

    def _record(self, row: int, meta: dict, image: bytes | None = None) -> tuple[int, int]:
        """(place, bytes) of the new record."""
        body = json.dumps([row, meta]).encode() + b"\n" + (image or b"")
        self._append(_HEADER.pack(len(body), zlib.crc32(body)) + body)
        return self._end - len(body), len(body)

    def _append(self, data: bytes) -> None:
        """All of it or, where the disk is full, nothing: what came after a torn record would not be found."""
        try:
            if self._file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        except OSError:
            self._file.truncate(self._end)
            raise
        self._end += len(data)

    def _scan(self) -> Iterator[tuple[int, bytes]]:
        """(place in the file, content) of the records before the first that is torn."""
        total = self.path.stat().st_size
        with open(self.path, "rb") as file:
            if file.readline() != json.dumps(self.stamp).encode() + b"\n":
                return
            self._end = file.tell()
            while len(header := file.read(_HEADER.size)) == _HEADER.size:
                length, checksum = _HEADER.unpack(header)
                if length > total - file.tell() or zlib.crc32(body := file.read(length)) != checksum:
                    return
                yield file.tell() - length, body


def find_blamed(task: ShardTask, settings: ShardSettings) -> list[str]:
    """The URLs that have ended processes of a shard, the last of which has just ended by itself."""
    journal = Journal(journal_path(task.part_folder, task.number), _stamp(task, settings))
    with journal.opened(has_ended=True), pa.ipc.open_file(str(task.rows_file)) as file:
        return file.read_all()["url"].take(pa.array(sorted(journal.blamed), pa.int64())).to_pylist()


def _split(body: bytes) -> tuple[int, dict, bytes | None]:
    text, _, image = body.partition(b"\n")
    return *json.loads(text), image or None

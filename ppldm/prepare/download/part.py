"""The download of one part, a parquet file of URLs and captions: its plan, its shards, and the account of its rows.

Laws. A part's rows = those with a picture + those failed, by class, whatever the number of runs and retries. A shard is
finished or absent; the same command does the absent ones. Retried rows go to new shards, with the columns `retry_of`
(the key of the row's first try) and `retried_after` (the class it had failed with); finished shards are never touched,
but where the metadata or a setting that decides what is kept has changed and `--redo` says so (`ppldm.utils.jobs`).

Shard k of a part is its rows [k n, (k + 1) n), in the order of the file: a row's key tells its line in the metadata.
Rows are read forward, a few thousand at a time, however large the file.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from json import loads
from math import isfinite
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ...utils.errors import ConfigError, DataError
from ...utils.files import RemotePath, make_output_dir, read_json, remove_path, write_json
from ...utils.jobs import JobFolder
from ...utils.log import get_logger
from ..metadata import Columns
from ..place import fingerprint_of, natural_key, parquet_source
from .failures import CLASSES_VERSION, classify
from .shard import (
    RETRY_COLUMNS,
    ShardSettings,
    ShardTask,
    make_record,
    read_columns,
    record_path,
    remove_shard,
    shard_name,
    stats_path,
    work_folder,
)

# Kept beside url and caption where the metadata has them.
KEPT_COLUMNS = (
    "similarity", "hash", "punsafe", "pwatermark", "aesthetic", "AESTHETIC_SCORE", "LANGUAGE", "license", "LICENSE",
    "NSFW",
)  # fmt: skip
# img2dataset writes columns of these names itself.
_RESERVED = {
    "key", "caption", "url", "width", "height", "original_width", "original_height", "status", "error_message", "exif",
    "md5", "sha256", "sha512", "jpg", "txt", "retry_of", "retried_after",
}  # fmt: skip
_BATCH_ROWS = 8192


@dataclass(frozen=True)
class MetadataPart:
    """One parquet file and its number, which names the folder of its download."""

    number: int
    path: Path | RemotePath
    num_rows: int


@dataclass(frozen=True)
class RowColumns:
    """The names in the metadata of what is read: URL, caption, and what is kept beside them, as {name that it is kept
    under: name in the metadata}."""

    url: str
    caption: str
    kept: dict[str, str]

    def under_names(self, names: Iterable[str]) -> RowColumns | None:
        """The same columns kept under the names that another file has for them; None where it has other columns."""
        columns = Columns(dict.fromkeys(self.kept, ""))
        found = {name: columns.find(name) for name in names}
        if {*found.values()} != {*self.kept} or len(found) != len(self.kept):
            return None
        return replace(self, kept={name: self.kept[own] for name, own in found.items()})


@dataclass(frozen=True)
class PartDownload:
    """A part of the metadata, the folder that its pictures go to, `OUT/part_1`, and what is to be done there: the
    shards that are missing, or those rows again that failed with one of `retry_classes`. With `redo`, a part that was
    made otherwise is made again."""

    part: MetadataPart
    folder: Path | RemotePath
    columns: RowColumns
    settings: ShardSettings
    retry_classes: tuple[str, ...] | None = None
    redo: bool = False

    @property
    def num_shards(self) -> int:
        """Without those of retries."""
        return count_shards(self.part.num_rows, self.settings.number_sample_per_shard)

    def finished_shards(self) -> list[int]:
        """Numbers of all finished shards, those of retries too, in order."""
        found = (re.fullmatch(r"(\d+)_stats\.json", path.name) for path in self.folder.glob("*_stats.json"))
        return sorted(int(match.group(1)) for match in found if match)

    def missing_shards(self) -> list[int]:
        return sorted(set(range(self.num_shards)) - set(self.finished_shards()))

    @property
    def job(self) -> JobFolder:
        """What is known of the folder."""
        return JobFolder(self.folder, ".download", "download")

    @cached_property
    def plan(self) -> tuple[dict, dict]:
        """(what the shards depend on, fingerprint of the metadata)."""
        settings, resizer, path = self.settings, self.settings.resizer, self.part.path
        plan = {
            "metadata": path.name,
            "rows": self.part.num_rows,
            "url_col": self.columns.url,
            "caption_col": self.columns.caption,
            "output_format": settings.output_format,
            "number_sample_per_shard": settings.number_sample_per_shard,
            "image_size": resizer.image_size,
            "encode_quality": resizer.encode_quality,
            "min_image_size": resizer.min_image_size,
            "max_image_area": resizer.max_image_area if isfinite(resizer.max_image_area) else None,
            "max_aspect_ratio": resizer.max_aspect_ratio if isfinite(resizer.max_aspect_ratio) else None,
            "disallowed_header_directives": sorted(settings.fetch.disallowed_header_directives),
            "columns": list(settings.columns),
        } | settings.fetch.blocked.settings
        return plan, fingerprint_of([path], (self.job.plan or {}).get("input"))

    @cached_property
    def is_stale(self) -> bool:
        """Whether the folder's shards were made otherwise. Raises ConfigError for such unless `redo`, OutputError."""
        plan, source = self.plan
        return bool(self.job.check(plan, self.redo, source))

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Hold the folder, made or of this very download, without what a killed run left; others hold other parts.

        With `redo`, the shards of another plan are removed. Raises ConfigError, OutputError.
        """
        plan, source = self.plan
        with self.job.claimed(plan, self.redo, source, self._remove_shards):
            remove_path(work_folder(self.folder), ignore_errors=True)
            make_output_dir(work_folder(self.folder))
            finished = set(self.finished_shards())
            for path in self.folder.glob("[0-9]*"):
                if (found := re.match(r"(\d+)", path.name)) and int(found.group(1)) not in finished:
                    remove_shard(self.folder, int(found.group(1)))
            yield

    def _remove_shards(self) -> None:
        for number in self.finished_shards():
            stats_path(self.folder, number).unlink()  # first: without it, a shard is not finished
            remove_shard(self.folder, number)

    def count_rows(self) -> int:
        """How many rows are to be fetched."""
        if self.is_stale:
            return self.part.num_rows
        if self.retry_classes is not None:
            return sum(count for name, count in self.report()["failed"].items() if name in self.retry_classes)
        size, total = self.settings.number_sample_per_shard, self.part.num_rows
        return sum(min(size, total - number * size) for number in self.missing_shards())

    def tasks(self) -> Iterator[ShardTask]:
        """The shards to be downloaded, new ones for a retry, their rows written when they are asked for."""
        size, finished = self.settings.number_sample_per_shard, self.finished_shards()
        is_retry = self.retry_classes is not None
        if is_retry:
            first = max(self.num_shards, max(finished, default=-1) + 1)
            shards = enumerate(regroup(self._failed_rows(finished), size), first)
        else:
            shards = read_shards(self.part, self.columns, size, set(self.missing_shards()))
        for number, table in shards:
            path = work_folder(self.folder) / f"{shard_name(number)}.arrow"
            write_rows(table, path)
            yield ShardTask(self.folder, number, path, table.num_rows, is_retry)

    def report(self) -> dict:
        """The account of the part: rows = success + failed (by class) + pending. Read from the shards' records."""
        finished = self.finished_shards()
        failed, examples = Counter(), {}
        totals = Counter()
        for number in finished:
            record = self._record(number)
            failed.update(record["failed"])
            failed.subtract(record["retried"])
            totals.update({"success": record["success"], "bytes": record["bytes"]})
            totals["seconds"] += record.get("seconds", 0)
            if number < self.num_shards:
                totals["tried"] += record["rows"]
            else:
                totals["retried"] += record["rows"]
            examples = record["examples"] | examples
        failed = {name: count for name, count in sorted(failed.items()) if count}
        return {
            "part": self.part.number,
            "rows": self.part.num_rows,
            "success": totals["success"],
            "failed": failed,
            "pending": self.part.num_rows - totals["tried"],
            "retried": totals["retried"],
            "examples": {name: examples[name] for name in failed if name in examples},
            "bytes": totals["bytes"],
            "shards": len(finished),
            "shard_seconds": round(totals["seconds"], 3),
            "unfinished_shards": len(self.missing_shards()),
        }

    def _record(self, number: int) -> dict:
        path = record_path(self.folder, number)
        record = read_json(path)
        if record is None or record.get("classes_version") != CLASSES_VERSION:  # deleted by hand, or of older classes
            path.parent.mkdir(parents=True, exist_ok=True)
            seconds = loads(stats_path(self.folder, number).read_text(encoding="utf-8"))["duration"]
            record = {"seconds": seconds, **(record or {})} | make_record(self.folder, number)
            write_json(path, record)
        return record

    def _failed_rows(self, finished: list[int]) -> Iterator[pa.Table]:
        """The rows whose last try failed with one of the classes, under the columns of a retry."""
        read, last_try = partial(read_columns, self.folder), {}
        for number in finished:
            if number >= self.num_shards:
                last_try |= dict.fromkeys(read(number, ["retry_of"])["retry_of"].to_pylist(), number)
        names = [*self.columns.kept, *RETRY_COLUMNS, "caption", "url"]
        for number in finished:
            key = "retry_of" if number >= self.num_shards else "key"
            table = read(number, [*self.columns.kept, "caption", "url", key, "status", "error_message"])
            outcomes = zip(table["status"].to_pylist(), table["error_message"].to_pylist(), strict=True)
            found = [classify(*outcome) for outcome in outcomes]
            is_last = (last_try.get(first, number) == number for first in table[key].to_pylist())
            chosen = [last and name in self.retry_classes for last, name in zip(is_last, found, strict=True)]
            columns = dict(zip(table.column_names, table.columns, strict=True))
            columns |= {"retry_of": table[key], "retried_after": pa.array(found, pa.string())}
            if any(chosen):
                yield pa.table({name: columns[name] for name in names}).filter(pa.array(chosen)).sort_by("retry_of")


def find_removed(metadata, out, downloads: Collection[PartDownload], redo: bool) -> list[Path | RemotePath]:
    """The folders in `out` of parts that a folder of metadata has no longer, which later stages would take for data.

    `downloads` are those of all its parts. Raises ConfigError unless `redo`.
    """
    wanted = {item.folder.name for item in downloads}
    folders = out.glob("part_*") if metadata.is_dir() else ()
    removed = sorted(path for path in folders if path.name not in wanted and (path / ".download/plan.json").exists())
    if removed and not redo:
        raise ConfigError(
            f"{removed[0]} was downloaded for a part that {metadata} has no longer; choose another --out, or remove "
            "such folders with --redo"
        )
    return removed


def find_parts(metadata: Path | RemotePath, part_id: int) -> list[MetadataPart]:
    """The parquet files of a folder, or the one file, in the order of their numbers; with part_id, only that one.

    The number is that of the name, `part_3.parquet` or `2B-en-4.5_3.parquet`: what follows the last underscore. Where
    a name has none, files are counted from 1 in the order of their names. Raises ConfigError, DataError.
    """
    if not metadata.exists():
        raise ConfigError(f"{metadata} does not exist; name a parquet file, or a folder of part_1.parquet, ...")
    paths = sorted(metadata.glob("[!._]*.parquet"), key=natural_key) if metadata.is_dir() else [metadata]
    if not paths:
        raise ConfigError(
            f"no parquet files in {metadata}; it should hold part_1.parquet, ... as `ppldm filter` writes"
        )
    names = [found for path in paths if (found := re.fullmatch(r".*_(\d+)", path.stem))]
    numbers = [int(found.group(1)) for found in names]
    if len(names) < len(paths):
        numbers = list(range(1, len(paths) + 1))
    if len(set(numbers)) < len(numbers):
        raise ConfigError(f"two parquet files in {metadata} have one number; name them part_1.parquet, part_2.parquet")
    named = dict(sorted(zip(numbers, paths, strict=True)))
    if part_id:
        if part_id not in named:
            has = f"{len(named)} part(s), {min(named)} to {max(named)}"
            raise ConfigError(f"--part-id {part_id} is not in {metadata}, which has {has}; 0 means all")
        named = {part_id: named[part_id]}
    return [MetadataPart(number, path, open_parquet(path).metadata.num_rows) for number, path in named.items()]


def open_parquet(path: Path | RemotePath) -> pq.ParquetFile:
    """Raises DataError."""
    try:
        return pq.ParquetFile(parquet_source(path))
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} is not a parquet file that can be read ({error}); fetch or make it again") from error


def _read_batches(path: Path, file: pq.ParquetFile, **options) -> Iterator[pa.RecordBatch]:
    """Raises DataError where the file's end, which tells of its rows, is sound and they are not."""
    try:
        yield from file.iter_batches(_BATCH_ROWS, **options)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} is damaged ({error}); fetch or make it again") from error


def find_columns(path: Path, url: str = "", caption: str = "", names: Sequence[str] = ()) -> RowColumns:
    """The columns of a parquet file: those named, by this or another name for the same thing, else those known by their
    names (`Columns`). Raises ConfigError."""
    schema = open_parquet(path).schema_arrow
    named = Columns(dict.fromkeys(schema.names, ""))
    kept = {name: named.find(name) or name for name in names or [name for name in KEPT_COLUMNS if name in schema.names]}
    found = RowColumns(
        _find_column(schema.names, path, url, "URL", "--url-col"),
        _find_column(schema.names, path, caption, "TEXT", "--caption-col"),
        kept,
    )
    for name, source in kept.items():
        if source not in schema.names:
            raise ConfigError(f"{path} has no column {name!r}; it has {', '.join(schema.names)}")
        if name in _RESERVED:
            raise ConfigError(f"column {name!r} cannot be kept: img2dataset writes one of that name; rename it")
        if not _is_plain(schema.field(source).type):
            raise ConfigError(
                f"column {name!r} of {path} is not of numbers, text or truth values; omit it from those kept"
            )
    return found


def count_shards(num_rows: int, samples_per_shard: int) -> int:
    return -(-num_rows // samples_per_shard)


def read_shards(part: MetadataPart, columns: RowColumns, size: int, wanted: Collection[int]) -> Iterator[tuple]:
    """(number, table) of each wanted shard, `size` rows each but the last. Columns: those kept, caption, url."""
    names = [*columns.kept.values(), columns.caption, columns.url]
    batches = _read_batches(part.path, open_parquet(part.path), columns=names)
    tables = (pa.Table.from_batches([batch]).select(names) for batch in batches)
    tables = (table.rename_columns([*columns.kept, "caption", "url"]) for table in tables)
    for number, table in enumerate(regroup(tables, size)):
        if number in wanted:
            yield number, table


def regroup(tables: Iterable[pa.Table], size: int) -> Iterator[pa.Table]:
    """The rows of tables of one schema as tables of `size` rows, the last one of fewer."""
    waiting, num_waiting = [], 0
    for table in tables:
        waiting.append(table)
        num_waiting += table.num_rows
        if num_waiting < size:
            continue
        joined = pa.concat_tables(waiting)
        whole = num_waiting - num_waiting % size
        yield from (joined.slice(start, size) for start in range(0, whole, size))
        waiting, num_waiting = [joined.slice(whole)], num_waiting - whole
    if num_waiting:
        yield pa.concat_tables(waiting)


def write_rows(table: pa.Table, path: Path | RemotePath) -> None:
    """An Arrow file, as img2dataset reads its shards. It is not kept beyond one run, so a torn one cannot be read."""
    is_remote = isinstance(path, RemotePath)
    with (
        pa.BufferOutputStream() if is_remote else pa.OSFile(str(path), "wb") as file,
        pa.ipc.new_file(file, table.schema) as writer,
    ):
        writer.write_table(table)
    if is_remote:
        path.write_bytes(file.getvalue().to_pybytes())


def sample_urls(part: MetadataPart, url_column: str, num_urls: int) -> list[str]:
    """At most `num_urls` URLs of a part, from up to 16 row groups, drawn at random but always the same."""
    file, rng = open_parquet(part.path), np.random.default_rng(part.num_rows)
    groups = sorted(int(group) for group in rng.permutation(file.num_row_groups)[:16])
    num_rows = sum(file.metadata.row_group(group).num_rows for group in groups)
    wanted = np.sort(rng.choice(num_rows, min(num_urls, num_rows), replace=False))
    urls, start = [], 0
    for batch in _read_batches(part.path, file, row_groups=groups, columns=[url_column]) if groups else ():
        here = wanted[(wanted >= start) & (wanted < start + batch.num_rows)] - start
        urls += batch[url_column].take(pa.array(here)).to_pylist()
        start += batch.num_rows
    return [url for url in urls if url]


def _find_column(names: Sequence[str], path: Path, named: str, published: str, flag: str) -> str:
    """The column that a flag names, also where a filter has renamed it, else that known to be `published`'s."""
    found = Columns(dict.fromkeys(names, "")).find(named or published)
    if found is None:
        raise ConfigError(
            f"{path} has no column {named or published}; it has {', '.join(names)}: name the one to take with {flag}"
        )
    if found != (named or published):
        get_logger().info("%s: %s is taken for %s", path.name, found, published)
    return found


def _is_plain(kind: pa.DataType) -> bool:
    tests = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_string, pa.types.is_null)
    return any(test(kind) for test in (*tests, pa.types.is_large_string))

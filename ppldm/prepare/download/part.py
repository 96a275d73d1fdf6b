"""The download of one part, a parquet file of URLs and captions: its plan, its shards, and the account of its rows.

Laws. A part's rows = those with a picture + those failed, by class, whatever the number of runs and retries. Shard k is
the part's rows [k n, (k + 1) n), finished or absent. Retried rows go to new shards, with the columns `retry_of` (the
key of the first try) and `retried_after` (the class it had failed with); finished shards are never touched, unless
metadata or settings have changed and `--redo` says so (`ppldm.utils.finished`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from json import loads
from math import inf
from pathlib import Path

import numpy as np
import pyarrow as pa

from ...utils.errors import ConfigError, DataError
from ...utils.files import RemotePath, make_output_dir, read_json, remove_path, write_json
from ...utils.finished import JobFolder
from ...utils.log import get_logger
from ..metadata import Columns, Table, open_parquet, read_table
from ..place import fingerprint_of
from ..tables import find_tables
from . import shard
from .failures import CLASSES_VERSION, classify
from .shard import ShardSettings, ShardTask

# Kept beside url and caption where the metadata has them.
KEPT_COLUMNS = (
    "similarity", "hash", "punsafe", "pwatermark", "aesthetic", "AESTHETIC_SCORE", "LANGUAGE", "license", "LICENSE",
    "NSFW",
)  # fmt: skip
# img2dataset writes columns of these names itself.
_RESERVED = {*shard.FACTS, *shard.RETRY_COLUMNS, *shard.HASHES, "caption", "url", "jpg", "png", "webp", "txt"}
_PLAIN = re.compile(r"u?int\d+|halffloat|float|double|bool|string|large_string|null")  # types of what can be kept
_BATCH_ROWS = 8192


@dataclass(frozen=True)
class RowColumns:
    """The names in the metadata of URL, caption, and what is kept beside them, as {name it is kept under: its own}."""

    url: str
    caption: str
    kept: dict[str, str]

    def under_names(self, names: Iterable[str]) -> RowColumns | None:
        """The same columns kept under the names that another file has for them; None where it has other columns."""
        columns = Columns(dict.fromkeys(self.kept, ""))
        found = {name: columns.find(name) for name in names}
        is_same = {*found.values()} == {*self.kept} and len(found) == len(self.kept)
        return replace(self, kept={name: self.kept[own] for name, own in found.items()}) if is_same else None


@dataclass(frozen=True)
class PartDownload:
    """A part of the metadata, the folder of its pictures, `OUT/part_1`, and what is to be done there: the shards that
    are missing, or, with `retry_classes`, rows again that failed so; with `redo`, all that was made otherwise."""

    part: Table
    folder: Path | RemotePath
    columns: RowColumns
    settings: ShardSettings
    retry_classes: tuple[str, ...] | None = None
    redo: bool = False

    @property
    def num_shards(self) -> int:
        """Without those of retries."""
        return -(-self.part.rows // self.settings.number_sample_per_shard)

    def finished_shards(self) -> list[int]:
        """Numbers of all finished shards, those of retries too, in order."""
        names = (path.name.removesuffix("_stats.json") for path in self.folder.glob("*_stats.json"))
        return sorted(int(name) for name in names if name.isdecimal())

    def missing_shards(self) -> list[int]:
        return sorted(set(range(self.num_shards)) - set(self.finished_shards()))

    @property
    def job(self) -> JobFolder:
        return JobFolder(self.folder, ".download", "download")

    @cached_property
    def plan(self) -> tuple[dict, dict]:
        """(what the shards depend on, fingerprint of the metadata)."""
        settings, path = self.settings, self.part.source
        plan = {
            "metadata": path.name,
            "rows": self.part.rows,
            "url_col": self.columns.url,
            "caption_col": self.columns.caption,
            "output_format": settings.output_format,
            "number_sample_per_shard": settings.number_sample_per_shard,
            **{name: None if value == inf else value for name, value in settings.resizer.settings().items()},
            "disallowed_header_directives": sorted(settings.fetch.disallowed_header_directives),
            "columns": list(settings.columns),
        } | settings.fetch.blocked.settings
        plan |= {"compute_hash": settings.compute_hash} if settings.compute_hash != "sha256" else {}
        return plan, fingerprint_of([path], (self.job.plan or {}).get("input"))

    @cached_property
    def is_stale(self) -> bool:
        """Whether the folder's shards were made otherwise. Raises ConfigError for such unless `redo`, OutputError."""
        plan, source = self.plan
        return bool(self.job.check(plan, self.redo, source))

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Hold the folder, without what a killed run left, and with `redo` without the shards of another plan."""

        def clear() -> None:
            for number in self.finished_shards():
                shard.stats_path(self.folder, number).unlink()  # first: without it, a shard is not finished
                shard.remove_shard(self.folder, number)

        plan, source = self.plan
        with self.job.claimed(plan, self.redo, source, clear):
            remove_path(shard.work_folder(self.folder), ignore_errors=True)
            make_output_dir(shard.work_folder(self.folder))
            finished = set(self.finished_shards())
            for path in self.folder.glob("[0-9]*"):
                if (found := re.match(r"(\d+)", path.name)) and int(found.group(1)) not in finished:
                    shard.remove_shard(self.folder, int(found.group(1)))
            yield

    def count_rows(self) -> int:
        if self.is_stale:
            return self.part.rows
        if self.retry_classes is not None:
            return sum(count for name, count in self.report()["failed"].items() if name in self.retry_classes)
        size, total = self.settings.number_sample_per_shard, self.part.rows
        return sum(min(size, total - number * size) for number in self.missing_shards())

    def tasks(self) -> Iterator[ShardTask]:
        """The shards to be downloaded, new ones for a retry, their rows written when they are asked for."""
        size, finished = self.settings.number_sample_per_shard, self.finished_shards()
        if is_retry := self.retry_classes is not None:
            first = max(self.num_shards, max(finished, default=-1) + 1)
            shards = enumerate(regroup(self._failed_rows(finished), size), first)
        else:
            shards = read_shards(self.part, self.columns, size, set(self.missing_shards()))
        for number, table in shards:
            path = shard.work_folder(self.folder) / f"{shard.shard_name(number)}.arrow"
            write_rows(table, path)
            yield ShardTask(self.folder, number, path, table.num_rows, is_retry)

    def report(self) -> dict:
        """The account of the part: rows = success + failed (by class) + pending. Read from the shards' records."""
        finished, failed, totals, examples = self.finished_shards(), Counter(), Counter(), {}
        for number in finished:
            record = self._record(number)
            failed.update(record["failed"])
            failed.subtract(record["retried"])
            totals.update({name: record.get(name, 0) for name in ("success", "bytes", "seconds")})
            totals["tried" if number < self.num_shards else "retried"] += record["rows"]
            examples = record["examples"] | examples
        failed = {name: count for name, count in sorted(failed.items()) if count}
        return {
            "part": self.part.number,
            "rows": self.part.rows,
            "success": totals["success"],
            "failed": failed,
            "pending": self.part.rows - totals["tried"],
            "retried": totals["retried"],
            "examples": {name: examples[name] for name in failed if name in examples},
            "bytes": totals["bytes"],
            "shards": len(finished),
            "shard_seconds": round(totals["seconds"], 3),
            "unfinished_shards": len(self.missing_shards()),
        }

    def _record(self, number: int) -> dict:
        path = shard.record_path(self.folder, number)
        record = read_json(path)
        if record is None or record.get("classes_version") != CLASSES_VERSION:  # deleted by hand, or of older classes
            path.parent.mkdir(parents=True, exist_ok=True)
            seconds = loads(shard.stats_path(self.folder, number).read_text(encoding="utf-8"))["duration"]
            record = {"seconds": seconds, **(record or {})} | shard.make_record(self.folder, number)
            write_json(path, record)
        return record

    def _failed_rows(self, finished: list[int]) -> Iterator[pa.Table]:
        """The rows whose last try failed with one of the classes, under the columns of a retry."""
        read, last_try = partial(shard.read_columns, self.folder), {}
        for number in finished:
            if number >= self.num_shards:
                last_try |= dict.fromkeys(read(number, ["retry_of"])["retry_of"].to_pylist(), number)
        names = [*self.columns.kept, *shard.RETRY_COLUMNS, "caption", "url"]
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
    """The folders in `out` of parts that the metadata has no longer, which later stages would take for data.
    `downloads` are those of all its parts. Raises ConfigError unless `redo`."""
    wanted = {item.folder.name for item in downloads}
    folders = out.glob("part_*") if metadata.is_dir() else ()
    removed = sorted(path for path in folders if path.name not in wanted and (path / ".download/plan.json").exists())
    if removed and not redo:
        raise ConfigError(
            f"{removed[0]} was downloaded for a part that {metadata} has no longer; choose another --out, or remove "
            "such folders with --redo"
        )
    return removed


def find_parts(metadata: Path | RemotePath, part_id: int, kind: str = "") -> list[Table]:
    """The tables of a folder, of one `kind` where it is named, or the one file, by the number at the end of their
    names, else their order; with part_id, only that one. Raises ConfigError, DataError."""
    if not metadata.exists():
        raise ConfigError(f"{metadata} does not exist; name a file, or a folder of part_1.parquet, ...")
    paths = find_tables(metadata, *([[kind]] if kind else [])) if metadata.is_dir() else [metadata]
    if not paths:
        raise ConfigError(
            f"no {kind or 'parquet'} files in {metadata}; it should hold part_1.parquet, ... as `ppldm filter` writes"
        )
    found = [re.search(r"_(\d+)\.\w+(\.gz)?$", path.name) for path in paths]
    numbers = [int(one[1]) for one in found] if all(found) else list(range(1, len(paths) + 1))
    if len(set(numbers)) < len(numbers):
        raise ConfigError(f"two files in {metadata} have one number; name them part_1.parquet, part_2.parquet")
    named = dict(sorted(zip(numbers, paths, strict=True)))
    if part_id:
        if part_id not in named:
            has = f"{len(named)} part(s), {min(named)} to {max(named)}"
            raise ConfigError(f"--part-id {part_id} is not in {metadata}, which has {has}; 0 means all")
        named = {part_id: named[part_id]}
    return [read_table(path, number) for number, path in named.items()]


def _read_batches(path: Path | RemotePath, **options) -> Iterator[pa.RecordBatch]:
    """Raises DataError where the file's end, which tells of its rows, is sound and they are not."""
    try:
        yield from open_parquet(path).iter_batches(_BATCH_ROWS, **options)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} is damaged ({error}); fetch or make it again") from error


def find_columns(
    path: Path, url: str = "", caption: str = "", names: Sequence[str] = (), verify: Sequence[str] = ()
) -> RowColumns:
    """The columns of a parquet file: those named, else those known by their names. `verify`: the column that holds the
    files' hashes, and which hash it is, if its name does not say it. Raises ConfigError."""
    schema = open_parquet(path).schema_arrow
    columns, taken = Columns(dict.fromkeys(schema.names, "")), []
    for wanted, flag in ((url or "URL", "--url-col"), (caption or "TEXT", "--caption-col")):
        if (found := columns.find(wanted)) is None:
            has = f"{path} has no column {wanted}; it has {', '.join(schema.names)}"
            raise ConfigError(f"{has}: name the one to take with {flag}")
        if found != wanted:
            get_logger().info("%s: %s is taken for %s", path.name, found, wanted)
        taken.append(found)
    names = names or [name for name in KEPT_COLUMNS if name in schema.names]
    kept = {name: columns.find(name) or name for name in names}
    if verify:
        if len(verify) > 2 or verify[-1] not in shard.HASHES:
            forms = ", ".join(f"COLUMN,{kind}" for kind in shard.HASHES)
            raise ConfigError(f"--verify-hash {','.join(verify)} does not say which hash it is; write one of {forms}")
        kept[shard.EXPECTED + verify[-1]] = verify[0]
    for name, source in kept.items():
        if source not in schema.names:
            raise ConfigError(f"{path} has no column {source!r}; it has {', '.join(schema.names)}")
        if name.startswith(shard.EXPECTED) and "string" not in (kind := str(schema.field(source).type)):
            raise ConfigError(f"column {source!r} of {path} is {kind} and no text of a hash; correct --verify-hash")
        if name in _RESERVED:
            raise ConfigError(f"column {name!r} cannot be kept: img2dataset writes one of that name; rename it")
        if not _PLAIN.fullmatch(str(schema.field(source).type)):
            raise ConfigError(
                f"column {name!r} of {path} is not of numbers, text or truth values; omit it from those kept"
            )
    return RowColumns(taken[0], taken[1], kept)


def read_shards(part: Table, columns: RowColumns, size: int, wanted: Collection[int]) -> Iterator[tuple]:
    """(number, table) of each wanted shard, `size` rows each but the last. Columns: those kept, caption, url."""
    names = [*columns.kept.values(), columns.caption, columns.url]
    tables = (pa.Table.from_batches([batch]).select(names) for batch in _read_batches(part.path, columns=names))
    tables = (table.rename_columns([*columns.kept, "caption", "url"]) for table in tables)
    return ((number, table) for number, table in enumerate(regroup(tables, size)) if number in wanted)


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
    """An Arrow file. It is not kept beyond one run, so a torn one cannot be read."""
    buffer = pa.BufferOutputStream()
    with pa.ipc.new_file(buffer, table.schema) as writer:
        writer.write_table(table)
    path.write_bytes(buffer.getvalue().to_pybytes())


def sample_urls(part: Table, url_column: str, num_urls: int) -> list[str]:
    """At most `num_urls` URLs of a part, from up to 16 row groups, drawn at random but always the same."""
    metadata, rng = open_parquet(part.path).metadata, np.random.default_rng(part.rows)
    groups = sorted(int(group) for group in rng.permutation(metadata.num_row_groups)[:16])
    num_rows = sum(metadata.row_group(group).num_rows for group in groups)
    wanted = np.sort(rng.choice(num_rows, min(num_urls, num_rows), replace=False))
    urls, start = [], 0
    for batch in _read_batches(part.path, row_groups=groups, columns=[url_column]) if groups else ():
        here = wanted[(wanted >= start) & (wanted < start + batch.num_rows)] - start
        urls += batch[url_column].take(pa.array(here)).to_pylist()
        start += batch.num_rows
    return [url for url in urls if url]

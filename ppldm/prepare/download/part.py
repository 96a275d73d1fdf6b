"""The download of one part: its plan, its shards, and the account of its rows.

Laws. A part's rows = those with a picture + those failed, by class, whatever the number of runs and retries. A shard is
finished or absent; the same command does the absent ones. Retried rows go to new shards, with the columns `retry_of`
(the key of the row's first try) and `retried_after` (the class it had failed with); finished shards are never touched,
but where the metadata or a setting that decides what is kept has changed and `--redo` says so (`ppldm.utils.jobs`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from json import loads
from math import isfinite
from pathlib import Path

import pyarrow as pa

from ...utils.errors import ConfigError
from ...utils.files import RemotePath, make_output_dir, read_json, remove_path, write_json
from ...utils.jobs import JobFolder, Piece, take_fingerprint
from ..address_path import AddressPath
from ..hadoop import fingerprint_at
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
from .shard_rows import MetadataPart, RowColumns, count_shards, read_shards, regroup, write_rows


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
        if isinstance(path, AddressPath):
            return plan, fingerprint_at(path.hadoop, [path.address])
        return plan, take_fingerprint([Piece(path, path.name)], (self.job.plan or {}).get("input"))

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

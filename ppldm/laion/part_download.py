"""The download of one part: its plan, its shards, and the account of its rows.

Laws. A part's rows = those with a picture + those failed, by class, whatever the number of runs and retries. A shard is
finished or absent; the same command does the absent ones. Retried rows go to new shards, with the columns `retry_of`
(the key of the row's first try) and `retried_after` (the class it had failed with); finished shards are never touched.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from json import loads
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ..utils.errors import ConfigError
from ..utils.files import lock_folder, make_output_dir, read_json, write_json
from .failures import CLASSES_VERSION, classify
from .shard import RETRY_COLUMNS, ShardTask, make_record, record_path, remove_shard, shard_name, stats_path, work_folder
from .shard_rows import MetadataPart, RowColumns, count_shards, read_shards, regroup, write_rows


@dataclass(frozen=True)
class PartDownload:
    """A part of the metadata and the folder that its pictures go to, `OUT/part_1`."""

    part: MetadataPart
    folder: Path
    columns: RowColumns
    samples_per_shard: int

    @property
    def num_shards(self) -> int:
        """Without those of retries."""
        return count_shards(self.part.num_rows, self.samples_per_shard)

    def finished_shards(self) -> list[int]:
        """Numbers of all finished shards, those of retries too, in order."""
        found = (re.fullmatch(r"(\d+)_stats\.json", path.name) for path in self.folder.glob("*_stats.json"))
        return sorted(int(match.group(1)) for match in found if match)

    def missing_shards(self) -> list[int]:
        return sorted(set(range(self.num_shards)) - set(self.finished_shards()))

    def count_missing_rows(self) -> int:
        """Rows of the shards that are missing."""
        size, total = self.samples_per_shard, self.part.num_rows
        return sum(min(size, total - number * size) for number in self.missing_shards())

    @contextmanager
    def claimed(self, plan: dict) -> Iterator[None]:
        """Hold the folder, made or of this very download, without what a killed run left; others hold other parts.

        `plan` are the settings that shards depend on. Raises ConfigError, OutputError.
        """
        plan_path = self.folder / ".download" / "plan.json"
        plan = {"metadata": self.part.path.name, "rows": self.part.num_rows, **plan}
        self._check_plan(plan_path, plan)
        make_output_dir(self.folder / ".download")
        lock = lock_folder(self.folder / ".download")
        try:
            write_json(plan_path, plan)
            shutil.rmtree(work_folder(self.folder), ignore_errors=True)
            make_output_dir(work_folder(self.folder))
            finished = set(self.finished_shards())
            for path in self.folder.glob("[0-9]*"):
                if (found := re.match(r"(\d+)", path.name)) and int(found.group(1)) not in finished:
                    remove_shard(self.folder, int(found.group(1)))
            yield
        finally:
            lock.close()

    def _check_plan(self, plan_path: Path, plan: dict) -> None:
        remedy = "choose another --out, or delete that folder"
        if plan_path.is_file():
            earlier = loads(plan_path.read_text(encoding="utf-8"))
            changed = [
                f"{name} was {earlier.get(name)!r} and is {value!r}"
                for name, value in plan.items()
                if earlier.get(name) != value
            ]
            if changed:
                raise ConfigError(f"{self.folder} holds another download ({'; '.join(changed)}); {remedy}")
        elif self.folder.is_dir() and any(self.folder.iterdir()):
            raise ConfigError(f"{self.folder} holds files of unknown origin; {remedy}")

    def tasks(self, numbers: Collection[int]) -> Iterator[ShardTask]:
        """The shards of these numbers, their rows written when they are asked for."""
        for number, table in read_shards(self.part, self.columns, self.samples_per_shard, set(numbers)):
            yield self._task(number, table)

    def retry_tasks(self, classes: Collection[str]) -> Iterator[ShardTask]:
        """The rows whose last try failed with one of these classes, as new shards."""
        finished = self.finished_shards()
        first = max(self.num_shards, max(finished, default=-1) + 1)
        tables = self._failed_rows(finished, set(classes))
        for number, table in enumerate(regroup(tables, self.samples_per_shard), first):
            yield self._task(number, table, is_retry=True)

    def count_retries(self, classes: Collection[str]) -> int:
        """How many rows `retry_tasks` would try again."""
        failed = self.report()["failed"]
        return sum(count for name, count in failed.items() if name in set(classes))

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

    def _task(self, number: int, table: pa.Table, is_retry: bool = False) -> ShardTask:
        path = work_folder(self.folder) / f"{shard_name(number)}.arrow"
        write_rows(table, path)
        return ShardTask(self.folder, number, path, table.num_rows, is_retry)

    def _record(self, number: int) -> dict:
        path = record_path(self.folder, number)
        record = read_json(path)
        if record is None or record.get("classes_version") != CLASSES_VERSION:  # deleted by hand, or of older classes
            path.parent.mkdir(parents=True, exist_ok=True)
            seconds = loads(stats_path(self.folder, number).read_text(encoding="utf-8"))["duration"]
            record = {"seconds": seconds, **(record or {})} | make_record(self.folder, number)
            write_json(path, record)
        return record

    def _failed_rows(self, finished: list[int], classes: set[str]) -> Iterator[pa.Table]:
        last_try = {}
        for number in finished:
            if number >= self.num_shards:
                path = self.folder / f"{shard_name(number)}.parquet"
                last_try.update(
                    dict.fromkeys(pq.read_table(path, columns=["retry_of"])["retry_of"].to_pylist(), number)
                )
        kept = [*self.columns.kept, "caption", "url"]
        for number in finished:
            is_retry = number >= self.num_shards
            key = "retry_of" if is_retry else "key"
            path = self.folder / f"{shard_name(number)}.parquet"
            table = pq.read_table(path, columns=[*kept, key, "status", "error_message"])
            keys = table[key].to_pylist()
            found = [
                classify(*row)
                for row in zip(table["status"].to_pylist(), table["error_message"].to_pylist(), strict=True)
            ]
            rows = [
                row
                for row, (name, first_key) in enumerate(zip(found, keys, strict=True))
                if name in classes and last_try.get(first_key, number) == number
            ]
            if not rows:
                continue
            rows.sort(key=lambda row: keys[row])
            chosen = table.take(rows)
            columns = [chosen[name] for name in self.columns.kept]
            columns += [pa.array([keys[row] for row in rows], pa.string())]
            columns += [pa.array([found[row] for row in rows], pa.string())]
            columns += [chosen["caption"], chosen["url"]]
            yield pa.table(columns, [*self.columns.kept, *RETRY_COLUMNS, "caption", "url"])

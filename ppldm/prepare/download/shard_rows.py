"""Parquet files of URLs and captions: which parts there are, which columns hold what, and their rows cut into shards.

Shard k of a part is its rows [k n, (k + 1) n), in the order of the file: a row's key tells its line in the metadata.
Rows are read forward, a few thousand at a time, however large the file.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ...utils.errors import ConfigError, DataError
from ...utils.files import RemotePath
from ...utils.log import get_logger
from ..filter.columns import Columns
from ..metadata import natural_key

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
            raise ConfigError(f"--part-id {part_id} is not in {metadata}, which has {_ranges(named)}; 0 means all")
        named = {part_id: named[part_id]}
    return [MetadataPart(number, path, open_parquet(path).metadata.num_rows) for number, path in named.items()]


def open_parquet(path: Path | RemotePath) -> pq.ParquetFile:
    """Raises DataError."""
    try:
        return pq.ParquetFile(parquet_source(path))
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} is not a parquet file that can be read ({error}); fetch or make it again") from error


def parquet_source(path: Path | RemotePath):
    """A parquet file as pyarrow's readers take it."""
    return path.open("rb") if isinstance(path, RemotePath) else path


def _read_batches(path: Path, file: pq.ParquetFile, **options) -> Iterator[pa.RecordBatch]:
    """Raises DataError where the file's end, which tells of its rows, is sound and they are not."""
    try:
        yield from file.iter_batches(_BATCH_ROWS, **options)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} is damaged ({error}); fetch or make it again") from error


def find_columns(path: Path, url: str = "", caption: str = "", names: Sequence[str] = ()) -> RowColumns:
    """The columns of a parquet file: those named, by this or another name for the same thing, else those known by their
    names (`columns`). Raises ConfigError."""
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


def _ranges(numbers: Collection[int]) -> str:
    return f"{len(numbers)} part(s), {min(numbers)} to {max(numbers)}"

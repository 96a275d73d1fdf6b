"""What is done with each file of a data set, by processes or on Spark: fetched, and where it is to be, extracted.

Extracting makes a tar of samples, `KEY.jpg` + `KEY.txt` + `KEY.json`, which `ppldm convert` reads. An archive of
pictures gets its captions from the table of `captions`; a table or tar of samples whose columns have names of their own
is read by these. Pictures stay as they are, to the byte. Rows in = rows out + rows skipped, by reason: `no_caption`,
`no_image`, and what the table's `reason` says. A tar is a function of its file, the captions and the columns: the same
to the byte, whoever makes it.
"""

import io
import json
import tarfile
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, islice
from pathlib import Path, PurePosixPath

import numpy as np

from ...data.formats.csv_table import IMAGE_COLUMNS as NAMING_COLUMNS
from ...data.formats.mds.packed import open_samples
from ...data.formats.mds.shard import MdsLayout
from ...data.formats.parquet_table import CAPTION_COLUMNS, IMAGE_COLUMNS
from ...data.formats.sample_files import IMAGE_SUFFIXES, decode_meta
from ...utils.checksums import file_sha256
from ...utils.errors import DataError, RowError
from ...utils.files import atomic_write, make_output_dir
from ...utils.jobs import find_finished, finish, list_pieces, take_state
from ...utils.log import progress
from ...utils.processes.workers import check_workers, map_unordered
from .captions import find_captions, read_members
from .fetch import RemoteFile, fetch

_LOOK_UP_ROWS = 256
_IMAGE_COLUMNS = (*IMAGE_COLUMNS, *NAMING_COLUMNS, "file_name")
_STARTS = {b"\xff\xd8\xff": "jpg", b"\x89PNG": "png", b"RIFF": "webp"}


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
        from ...utils.machine.spark import spark_session
        from ..convert.on_spark import DRIVER_MEMORY_GB, run_tasks

        with spark_session(master, DRIVER_MEMORY_GB) as spark:
            return [account for _, account in run_tasks(spark, "fetch", tasks, function)]
    done = {}
    with progress(total=len(tasks), desc="files", unit="file") as bar:
        for task, account in map_unordered(function, tasks, check_workers(num_workers)):
            done[task.file.name] = account
            bar.update()
    return [done[task.file.name] for task in tasks]


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
    path = fetch(task.file, task.source)
    account = extract(path, task.tar, task.captions, dict(task.columns), task.most_rows)
    return account | {"bytes": path.stat().st_size, "output": take_state(list_pieces(task.tar))}


def _is_whole(task: FileTask, record: dict) -> bool:
    if record["output"] == take_state(list_pieces(task.tar)):
        return True
    return (file_sha256(task.tar) if task.tar.is_file() else None) == record["sha256"]


@dataclass(frozen=True)
class Sample:
    """One row of a file. reason: why it cannot be used; "" where it can."""

    key: str
    image: bytes
    caption: str
    meta: dict = field(default_factory=dict)
    reason: str = ""


def extract(file: Path, tar: Path, captions: Path | None, columns: dict, most_rows: int = 0) -> dict:
    """Write the tar of a file; its account. captions: their table, for an archive. columns: `image` and `caption` of a
    table or a tar of samples. most_rows: 0 for all. Raises DataError."""
    make_output_dir(tar.parent)
    rows_in, skipped, seen = 0, Counter(), Counter()
    read = _read_archive(file, captions) if captions else _read_columns(file, columns)
    with atomic_write(tar) as out, tarfile.open(fileobj=out, mode="w") as archive, closing(read):
        for sample in islice(read, most_rows or None):
            rows_in += 1
            suffix = next((name for start, name in _STARTS.items() if sample.image.startswith(start)), "")
            reason = sample.reason or ("" if suffix else "no_image") or ("" if sample.caption else "no_caption")
            if reason:
                skipped[reason] += 1
                continue
            key = sample.key.replace(".", "_").replace("/", "_")
            seen[key] += 1
            key += f"_{seen[key]}" if seen[key] > 1 else ""
            _add(archive, f"{key}.{suffix}", sample.image)
            _add(archive, f"{key}.txt", sample.caption.encode("utf-8", "replace"))
            if sample.meta:
                _add(archive, f"{key}.json", json.dumps(sample.meta, default=str).encode())
    rows_out = rows_in - skipped.total()
    if not rows_out:
        tar.unlink()
    return {
        "rows_in": rows_in,
        "rows_out": rows_out,
        "skipped": dict(sorted(skipped.items())),
        "sha256": file_sha256(tar) if rows_out else None,
    }


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))


def _read_archive(path: Path, table: Path) -> Generator[Sample, None, None]:
    """Pictures with the captions of their names."""
    import duckdb

    pictures = _read_pictures(path)
    with duckdb.connect() as connection:
        while batch := list(islice(pictures, _LOOK_UP_ROWS)):
            found = find_captions(connection, table, [key for key, _ in batch])
            for key, image in batch:
                row = found.get(key, {})
                meta = {name: value for name, value in row.items() if name not in ("key", "caption", "reason")}
                yield Sample(key, image, row.get("caption", ""), meta, row.get("reason", ""))


def _read_pictures(path: Path) -> Iterator[tuple[str, bytes]]:
    for name, opening in read_members(path):
        place = PurePosixPath(name)
        if place.suffix[1:].lower() in IMAGE_SUFFIXES and not place.name.startswith("."):
            with opening() as member:
                yield place.stem, member.read()


def _read_columns(path: Path, columns: dict) -> Generator[Sample, None, None]:
    """Rows of a table or a tar of samples by the names of their columns."""
    if path.suffix == ".mds":
        yield from _read_mds(path, columns)
        return
    image, caption = columns.get("image", ""), columns.get("caption", "")
    for number, record in enumerate(_read_tar(path) if path.suffix == ".tar" else _read_table(path)):
        image = image or next((name for name in _IMAGE_COLUMNS if name in record), "")
        caption = caption or next((name for name in CAPTION_COLUMNS if name in record), "")
        missing = [name for name in (image, caption) if name not in record]
        if not number and missing:
            raise DataError(f"{path} has no column {missing[0] or 'of the kind'}; it has {', '.join(record)}")
        picture = record.pop(image, None)
        picture = picture.get("bytes") if isinstance(picture, dict) else picture
        if isinstance(picture, str):
            picture = _read_beside(path, picture)
        text = record.pop(caption, "")
        text = text[0] if isinstance(text, list) and text else text
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        meta = {name: value for name, value in record.items() if isinstance(value, str | int | float)}
        key = str(record.get("__key__") or f"{path.stem}-{number:09}")
        yield Sample(key, picture or b"", " ".join(text.split()) if isinstance(text, str) else "", meta)


def _read_beside(table: Path, name: str) -> bytes:
    """A picture that a table names, from the table's folder; b"" where it is not there, or elsewhere."""
    place = (table.parent / name.replace("\0", "")).resolve()
    return place.read_bytes() if place.is_relative_to(table.parent.resolve()) and place.is_file() else b""


def _read_table(path: Path) -> Iterator[dict]:
    import duckdb
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if path.suffix == ".parquet":
            with pq.ParquetFile(path) as table:
                for batch in table.iter_batches(64):
                    yield from batch.to_pylist()
            return
        reader = "read_csv" if path.suffix == ".csv" else "read_json"
        with duckdb.connect() as connection:
            for batch in connection.execute(f"SELECT * FROM {reader}('{path}')").fetch_record_batch(1024):
                yield from batch.to_pylist()
    except (pa.ArrowException, OSError, duckdb.Error) as error:
        raise DataError(f"{path} is damaged ({error}); delete it and give the same command again") from error


def _read_tar(path: Path) -> Iterator[dict]:
    """Of the files of one base name: their contents by suffix, and the values of .json."""
    members = ((name, opening().read()) for name, opening in read_members(path))
    for key, files in groupby(members, key=lambda one: one[0].rpartition("/")[2].partition(".")[0]):
        record = {"__key__": key}
        for name, content in files:
            suffix = name.rpartition("/")[2].partition(".")[2]
            record[suffix] = content
            if suffix == "json":
                with suppress(RowError):  # then it has no caption, and is counted as such
                    record = decode_meta(content, name) | record
        yield record


def _read_mds(path: Path, columns: dict) -> Iterator[Sample]:
    layout = MdsLayout(path, image=columns.get("image", ""), caption=columns.get("caption", ""))
    with open_samples(path) as file:
        file.seek(int(layout.starts[0]))
        for number, length in enumerate(np.diff(layout.starts).tolist()):
            key = f"{path.stem}-{number:09}"
            try:
                row = layout.decode(file.read(length), f"{path} row {number}")
                yield Sample(key, row.image, row.caption, row.meta)
            except RowError as error:
                yield Sample(key, b"", "", reason=error.reason)

"""What a data set's files become before they are converted: tars of samples, with captions that may lie apart.

Captions that lie apart become one table by the pictures' names: key, caption, reason, metadata. Their files are
unpacked beside each other, and an entry's query reads them in DuckDB: a JSON object of lists as a .jsonl of each list,
with the `place` of each value; the text files of an archive as texts.jsonl, `key` and `caption`; all else as it is. Of
several rows with a key, the query says which is taken, else the first caption in the order of letters.

A tar has samples `KEY.jpg` + `KEY.txt` + `KEY.json`, which `ppldm convert` reads. Rows in = rows out + rows skipped, by
reason: `no_caption`, `no_image`, and what the table's `reason` says. A tar is a function of its file, the captions and
the columns, to the byte.
"""

import io
import json
import shutil
import tarfile
import zipfile
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import closing, suppress
from itertools import groupby, islice
from pathlib import Path, PurePosixPath

import numpy as np

from ...data.formats.csv_table import IMAGE_COLUMNS as NAMING_COLUMNS
from ...data.formats.folder import IMAGE_SUFFIXES, decode_meta
from ...data.formats.mds import MdsLayout, open_samples
from ...data.formats.parquet_table import CAPTION_COLUMNS, IMAGE_COLUMNS
from ...data.formats.row import Row
from ...utils.checksums import hash_file
from ...utils.errors import DataError, RowError
from ...utils.files import atomic_write, finish_file, link_or_copy, make_output_dir, remove_path
from ...utils.machine.duckdb import connect, escape_glob, execute, load_duckdb, parquet_sql, quote_text
from ...utils.machine.resources import usable_memory_bytes
from ..convert.units import or_error

_ARCHIVES = (".zip", ".tar", ".tgz", ".tar.gz")
_LOOK_UP_ROWS = 256
_IMAGE_COLUMNS = (*IMAGE_COLUMNS, *NAMING_COLUMNS, "file_name")
Samples = Generator[tuple[str, Row | RowError], None, None]  # (key, row), or why it cannot be used
_STARTS = {b"\xff\xd8\xff": "jpg", b"\x89PNG": "png", b"RIFF": "webp"}


def read_members(path: Path) -> Iterator[tuple[str, object]]:
    """(name, how to open it) of the files of an archive, in order; to be opened before the next. Raises DataError."""
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                for info in archive.infolist():
                    if not info.is_dir():
                        yield info.filename, lambda info=info: archive.open(info)
        else:
            with tarfile.open(path, "r|*") as archive:
                for info in archive:
                    if info.isfile():
                        yield info.name, lambda info=info: archive.extractfile(info)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError) as error:
        raise DataError(f"{path} is damaged ({error}); delete it and give the same command again") from error


def make_captions(files: list[Path], query: str, table: Path) -> dict:
    """Write the table of captions, and return {"captions": their number}. Raises DataError."""
    duckdb = load_duckdb()
    folder, temporary = table.with_name("unpacked"), table.with_name(f".{table.name}.tmp")
    remove_path(folder)
    folder.mkdir()
    for file in files:
        _unpack(file, folder)
    wanted = f"SELECT * FROM ({query.format(folder=quote_text(escape_glob(folder))[1:-1])}) WHERE key IS NOT NULL"
    one_each = f"{wanted} QUALIFY row_number() OVER (PARTITION BY key ORDER BY caption) = 1 ORDER BY key"
    try:
        with connect(max(1, (usable_memory_bytes() or 4 << 30) >> 31), folder) as connection:
            ((count,),) = execute(connection, f"COPY ({one_each}) TO {quote_text(str(temporary))} (FORMAT parquet)")
    except duckdb.Error as error:
        raise DataError(
            f"the captions of {files[0].name} are not as they were published ({error}); delete it and try again"
        ) from error
    finish_file(temporary, table)
    remove_path(folder)
    return {"captions": count}


def find_captions(connection, table: Path, keys: list[str]) -> dict[str, dict]:
    """The rows of the table that have these keys, null values left out. connection: of DuckDB."""
    question = f"SELECT * FROM {parquet_sql([table])} WHERE key IN (SELECT unnest(?))"
    rows = connection.execute(question, [keys]).to_arrow_table().to_pylist()
    return {row["key"]: {name: value for name, value in row.items() if value is not None} for row in rows}


def _unpack(file: Path, folder: Path) -> None:
    if not file.name.lower().endswith(_ARCHIVES):
        link_or_copy(file, folder / file.name)
        _unpack_lists(folder / file.name)
        return
    with open(folder / "texts.jsonl", "a", encoding="utf-8") as texts:
        for name, opening in read_members(file):
            place = PurePosixPath(name)
            with opening() as member:
                if place.suffix == ".txt":
                    caption = member.read().decode("utf-8", "replace").strip()
                    texts.write(json.dumps({"key": place.stem, "caption": caption}, ensure_ascii=False) + "\n")
                elif place.suffix in (".json", ".jsonl"):
                    with open(folder / place.name, "wb") as out:
                        shutil.copyfileobj(member, out)
                    _unpack_lists(folder / place.name)


def _unpack_lists(file: Path) -> None:
    """A JSON object of lists as a file of lines for each list."""
    if file.suffix != ".json":
        return
    try:
        lists = json.loads(file.read_bytes())
    except ValueError as error:
        raise DataError(f"{file.name} is damaged ({error}); delete it and give the same command again") from error
    for name, values in lists.items() if isinstance(lists, dict) else ():
        if isinstance(values, list) and all(isinstance(value, dict) for value in values):
            with open(file.with_name(f"{file.stem}.{name}.jsonl"), "w", encoding="utf-8") as out:
                out.writelines(json.dumps({"place": place, **value}) + "\n" for place, value in enumerate(values))


def extract(file: Path, tar: Path, captions: Path | None, columns: dict, most_rows: int = 0) -> dict:
    """Write the tar of a file; its account. captions: their table, for an archive. columns: `image` and `caption` of a
    table or a tar of samples. most_rows: 0 for all. Raises DataError."""
    make_output_dir(tar.parent)
    rows_in, skipped, seen = 0, Counter(), Counter()
    reader = _read_archive if captions else _read_mds if file.suffix == ".mds" else _read_columns
    read = reader(file, captions or columns)
    with atomic_write(tar) as out, tarfile.open(fileobj=out, mode="w") as archive, closing(read):
        for key, row in islice(read, most_rows or None):
            rows_in += 1
            image = b"" if isinstance(row, RowError) else row.image
            suffix = next((name for start, name in _STARTS.items() if image.startswith(start)), "")
            if not (suffix and row.caption):
                skipped[row.reason if isinstance(row, RowError) else "no_caption" if suffix else "no_image"] += 1
                continue
            key = key.replace(".", "_").replace("/", "_")
            seen[key] += 1
            key += f"_{seen[key]}" if seen[key] > 1 else ""
            _add(archive, f"{key}.{suffix}", image)
            _add(archive, f"{key}.txt", row.caption.encode("utf-8", "replace"))
            if row.meta:
                _add(archive, f"{key}.json", json.dumps(row.meta, default=str).encode())
    rows_out = rows_in - skipped.total()
    if not rows_out:
        tar.unlink()
    return {
        "rows_in": rows_in,
        "rows_out": rows_out,
        "skipped": dict(sorted(skipped.items())),
        "sha256": hash_file(tar) if rows_out else None,
    }


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))


def _read_archive(path: Path, table: Path) -> Samples:
    """Pictures with the captions of their names."""
    import duckdb

    pictures = _read_pictures(path)
    with duckdb.connect() as connection:
        while batch := list(islice(pictures, _LOOK_UP_ROWS)):
            found = find_captions(connection, table, [key for key, _ in batch])
            for key, image in batch:
                meta = {"caption": "", "reason": ""} | found.get(key, {})
                meta.pop("key", None)
                caption, reason = meta.pop("caption"), meta.pop("reason")
                yield key, RowError(reason, key) if reason else Row(caption, image, meta)


def _read_pictures(path: Path) -> Iterator[tuple[str, bytes]]:
    for name, opening in read_members(path):
        place = PurePosixPath(name)
        if place.suffix[1:].lower() in IMAGE_SUFFIXES and not place.name.startswith("."):
            with opening() as member:
                yield place.stem, member.read()


def _read_columns(path: Path, columns: dict) -> Samples:
    """Rows of a table or a tar of samples by the names of their columns."""
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
        yield key, Row(" ".join(text.split()) if isinstance(text, str) else "", picture or b"", meta)


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


def _read_mds(path: Path, columns: dict) -> Samples:
    layout = MdsLayout(path, image=columns.get("image", ""), caption=columns.get("caption", ""))
    with open_samples(path) as file:
        file.seek(int(layout.starts[0]))
        for number, length in enumerate(np.diff(layout.starts).tolist()):
            row = or_error(layout.decode, file.read(length), f"{path} row {number}")
            yield f"{path.stem}-{number:09}", row

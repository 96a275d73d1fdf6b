"""Captions that lie apart from their pictures, as one table by the pictures' names: key, caption, reason, metadata.

The files are unpacked beside each other, and an entry's query reads them, in DuckDB: a .jsonl of an archive as it is; a
JSON object of lists as a .jsonl each, by the name of the list, with the `place` of each value; the text files of an
archive as texts.jsonl with their `key` and `caption`; all else as it is. Of several rows with a key, the query says
which is taken; else the first caption in the order of letters.
"""

import json
import shutil
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from ...utils.errors import DataError
from ...utils.files import finish_file, link_or_copy, remove_path
from ...utils.machine.duckdb import connect, escape_glob, execute, load_duckdb, parquet_sql, quote_text
from ...utils.machine.resources import usable_memory_bytes

_ARCHIVES = (".zip", ".tar", ".tgz", ".tar.gz")


def is_archive(name: str) -> bool:
    """Whether a name is of a zip or a tar, gzipped or not."""
    return name.lower().endswith(_ARCHIVES)


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
    found = connection.execute(question, [keys])
    names = [column[0] for column in found.description]
    rows = (dict(zip(names, values, strict=True)) for values in found.fetchall())
    return {row["key"]: {name: value for name, value in row.items() if value is not None} for row in rows}


def _unpack(file: Path, folder: Path) -> None:
    if not is_archive(file.name):
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

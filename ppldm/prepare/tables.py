"""Metadata that is not parquet, made parquet once: csv and tsv with a header, json (a list of objects, or columns by
name), jsonl, each also as .gz; and txt, a URL a line without caption. The formats that img2dataset reads.

Laws. A row is a record, an object, or a line that is not blank, in their order; nothing else is read or left out. The
parquet file depends on the content alone and is kept in PPLDM_CACHE_DIR/tables, under its SHA-256. A column of csv or
tsv is text to the letter, or of numbers where each value is one; an empty one is then null. A table is read whole, so
that what is larger than the memory should be parquet.
"""

import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..utils.checksums import hash_file
from ..utils.errors import ConfigError, DataError
from ..utils.files import RemotePath, atomic_write, cache_dir, make_output_dir
from ..utils.log import get_logger
from ..utils.text import one_line

FORMATS = ("parquet", *(f"{name}{gz}" for name in ("csv", "tsv", "jsonl", "json", "txt") for gz in ("", ".gz")))
WITH_COLUMNS = tuple(kind for kind in FORMATS if not kind.startswith("txt"))
_SOUGHT = tuple(
    kind for kind in WITH_COLUMNS if kind not in ("json", "json.gz")
)  # of a folder, where json may be all else
_ROW_GROUP_ROWS = 100_000
_VERSION = 1  # of what is made of a text
_NO_WHOLE_DOUBLE = r"^[+-]?\d{16}"  # digits that a float64 may not hold


def as_parquet(path: Path | RemotePath, kinds: Sequence[str] = FORMATS) -> Path | RemotePath:
    """The parquet file of a table: itself, unless its name ends as one of the other `kinds`. Raises DataError,
    ConfigError, OutputError."""
    kind = next((kind for kind in kinds if kind != "parquet" and path.name.lower().endswith(f".{kind}")), None)
    if kind is None:
        return path
    if isinstance(path, RemotePath):
        raise ConfigError(f"{path} is not parquet, which a table at an address must be; copy it here, or convert it")
    target = cache_dir() / "tables" / f"{hash_file(path)}-{_VERSION}" / f"{path.name}.parquet"
    if not target.exists():
        import pyarrow.parquet as pq

        get_logger().info("%s is made parquet, once", path)
        table = _read(path, kind)
        make_output_dir(target.parent)
        with atomic_write(target) as file:
            pq.write_table(table, file, row_group_size=_ROW_GROUP_ROWS)
    return target


def _read(path: Path, kind: str):
    """The pa.Table of a file. Raises DataError."""
    import pyarrow as pa

    name = kind.removesuffix(".gz")
    try:
        with gzip.open(path) if kind.endswith(".gz") else open(path, "rb") as file:
            if name in ("csv", "tsv"):
                return _read_delimited(file, "," if name == "csv" else "\t")
            if name == "txt":
                urls = [line.decode().strip() for line in file if line.strip()]
                return pa.table({"URL": pa.array(urls, pa.string()), "TEXT": pa.nulls(len(urls), pa.string())})
            lines = (json.loads(line) for line in file if line.strip())
            return _of_objects([*lines] if name == "jsonl" else json.load(file))
    except (OSError, EOFError, ValueError, TypeError, OverflowError, RecursionError, pa.ArrowException) as error:
        why = one_line(str(error), 200)
        raise DataError(f"{path} cannot be read as {kind} ({why}); mend it, or make it parquet") from error


def _read_delimited(file, delimiter: str):
    """A table with a header. In csv, a value in quotation marks may span lines."""
    import pyarrow as pa
    from pyarrow import csv

    parsing = csv.ParseOptions(delimiter=delimiter, newlines_in_values=delimiter == ",")
    data = pa.py_buffer(file.read())
    names = csv.open_csv(pa.BufferReader(data), parse_options=parsing).schema.names
    if len(set(names)) < len(names):
        raise ValueError(f"two columns have one name: {', '.join(names)}")
    as_text = csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()))
    table = csv.read_csv(pa.BufferReader(data), parse_options=parsing, convert_options=as_text)
    return pa.table({name: _numbers(table[name]) for name in names})


def _numbers(texts):
    """A column of text as int64, uint64 or float64 where each value is one and is written as one; else itself."""
    import pyarrow as pa
    import pyarrow.compute as pc

    given = pc.if_else(pc.equal(texts, ""), None, texts)
    if given.null_count == len(given):
        return texts
    for kind in (pa.int64(), pa.uint64()):
        try:
            numbers = given.cast(kind)
        except pa.ArrowInvalid:
            continue
        return numbers if numbers.cast(pa.string()).equals(given) else texts  # 007 is none
    try:
        numbers = given.cast(pa.float64())
    except pa.ArrowInvalid:
        return texts
    return texts if pc.any(pc.match_substring_regex(given, _NO_WHOLE_DOUBLE)).as_py() else numbers


def _of_objects(found):
    """A table of a list of objects, of which some may lack what others have; or of an object of columns."""
    import pyarrow as pa

    if isinstance(found, dict):
        columns = found.items()  # of values, or of these by the row's number, as pandas writes them
        return pa.table({name: [*one.values()] if isinstance(one, dict) else one for name, one in columns})
    names = dict.fromkeys(name for row in found for name in row)
    return pa.table({name: [row.get(name) for row in found] for name in names})


def find_tables(folder: Path | RemotePath, kinds: Iterable[str] = _SOUGHT) -> list:
    """The tables in a folder, not below it, of the first of `kinds` that is there, by the numbers in their names."""
    from .place import natural_key

    for kind in kinds:
        if found := [path for path in folder.glob(f"[!._]*.{kind}") if path.is_file()]:
            return sorted(found, key=natural_key)
    return []

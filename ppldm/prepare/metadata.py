"""Metadata tables as they lie on disk: parquet files of one schema, in the order of their numbers."""

import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..utils.errors import ConfigError, DataError
from ..utils.files import local_path
from ..utils.processes.workers import map_in_threads
from ..utils.store.client import is_address
from ..utils.store.inputs import input_path
from .filter.columns import INTEGER, NUMBER, OTHER, TEXT, TRUTH, Columns, check_names


@dataclass(frozen=True)
class Table:
    """A parquet file, by its path or, as text, its address. `schema`: the name and type of each column, as text."""

    path: Path | str
    rows: int
    bytes: int
    schema: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Tables:
    """Parquet files of the same columns, named as in the first. `names`: what they were asked for by, absolute paths.
    `spellings`: the other names that some files have for a column, but for case. `mixed`: a column that is wider in
    some files than in others, as int64 beside int32."""

    files: tuple[Table, ...]
    columns: Columns
    names: tuple[str, ...] = ()
    spellings: Mapping[str, frozenset[str]] = field(default_factory=dict)
    mixed: str | None = None

    @property
    def paths(self) -> list[Path]:
        """Of all files."""
        return [file.path for file in self.files]

    @property
    def addresses(self) -> list[str]:
        """Of all files."""
        return [file.path if isinstance(file.path, str) else f"file://{file.path}" for file in self.files]

    @property
    def rows(self) -> int:
        """Of all files."""
        return sum(file.rows for file in self.files)


def read_tables(inputs: Sequence[str]) -> Tables:
    """The parquet files that `--input` names, folders meaning all of theirs; only their footers are read.

    A column may have another name in each file (`columns`). Raises ConfigError for what is missing, empty or named
    twice, or files of different columns; DataError for one that is not a parquet file.
    """
    paths = [path for name in inputs for path in _list_files(input_path(name))]
    doubles = {path for path in paths if paths.count(path) > 1} if len(set(paths)) < len(paths) else set()
    if doubles:
        raise ConfigError(f"--input names {min(doubles)} twice; name it once")
    files = tuple(map_in_threads(_read_footer, paths, "reading footers"))
    first, spellings, mixed = files[0], defaultdict(set), None
    for file in files[1:]:
        if set(file.schema) != set(first.schema):
            for name, meant in _match_columns(file, first).items():
                if name.lower() != meant.lower():
                    spellings[meant].add(name)
                if dict(file.schema)[name] != dict(first.schema)[meant]:
                    mixed = meant
    check_names((name for name, _ in first.schema), first.path)
    names = tuple(name if is_address(name) else os.path.abspath(local_path(name)) for name in inputs)
    columns = Columns({name: _kind(type_name) for name, type_name in first.schema})
    return Tables(files, columns, names, {name: frozenset(others) for name, others in spellings.items()}, mixed)


def _match_columns(file: Table, first: Table) -> dict[str, str]:
    """What each column of a file is called in the first: the same, or a name for the same thing. Raises ConfigError."""
    known = Columns(dict(first.schema))
    meant = {name: known.find(name) or name for name, _ in file.schema}
    schema = [(meant[name], kind) for name, kind in file.schema]
    ours, theirs = (sorted((name, _wide(kind)) for name, kind in columns) for columns in (first.schema, schema))
    if ours == theirs:
        return meant
    name = min(set(ours) ^ set(theirs) or schema)[0]
    kinds = [dict(columns).get(name, "missing") for columns in (first.schema, schema)]
    raise ConfigError(
        f"column {name!r} is {kinds[0]} in {first.path} and {kinds[1]} in {file.path}; filter them one by one"
    )


def natural_key(path) -> list:
    """Sorts names with numbers by the numbers: part_2 before part_10."""
    return [int(word) if word.isdigit() else word for word in re.split(r"(\d+)", str(path))]


def _list_files(path: Path) -> list[Path]:
    if path.is_file():
        return [Path(os.path.abspath(path))]
    if not path.is_dir():
        raise ConfigError(f"--input {path} is not there; name parquet files, or folders of them")
    found = [file for file in path.glob("*.parquet") if file.is_file() and not file.name.startswith((".", "_"))]
    if not found:
        raise ConfigError(
            f"no *.parquet files in --input {path} (subfolders are not searched); name the folder of them"
        )
    return sorted((Path(os.path.abspath(file)) for file in found), key=natural_key)


def _read_footer(path: Path) -> Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            schema = tuple((field.name, str(field.type)) for field in file.schema_arrow)
            return Table(path, file.metadata.num_rows, path.stat().st_size, schema)
    except (pa.ArrowException, OSError) as error:
        text = " ".join(str(error).split())[:200]
        raise DataError(f"{path} is not a parquet file, or is damaged ({text}); get it again") from error


def _wide(type_name: str) -> str:
    """The same for types of which one holds all that the other does."""
    return re.sub(r"^(u?int)\d+$", r"\1", type_name).replace("large_string", "string").replace("double", "float")


def _kind(type_name: str) -> str:
    """Of the name of an Arrow type."""
    if re.fullmatch(r"u?int\d+", type_name):
        return INTEGER
    if type_name in ("halffloat", "float", "double") or type_name.startswith("decimal"):
        return NUMBER
    if "string" in type_name and type_name.startswith(("string", "large_string", "dictionary")):
        return TEXT
    return TRUTH if type_name == "bool" else OTHER

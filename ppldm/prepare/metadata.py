"""Metadata tables as they lie on disk: files of one schema, in the order of their numbers; and their columns,
of which LAION's releases have several names for the same thing."""

import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from ..utils.errors import ConfigError, DataError
from ..utils.files import RemotePath, is_address, local_path
from ..utils.processes.workers import map_in_threads
from ..utils.store.cache import input_path
from ..utils.text import one_line
from .place import AddressPath, Hadoop, address_of, parquet_source
from .tables import FORMATS, WITH_COLUMNS, as_parquet, find_tables

# Of each column of the published LAION2B-en and LAION-Art tables: its other names, the likeliest first.
ALIASES = {
    "URL": ("url", "image_url", "img_url"),
    "TEXT": ("caption", "text", "alt_text", "alt"),
    "WIDTH": ("width", "original_width"),
    "HEIGHT": ("height", "original_height"),
    "LANGUAGE": ("language", "lang"),
    "AESTHETIC_SCORE": ("aesthetic", "aesthetic_score", "AESTHETIC"),
    "similarity": ("SIMILARITY", "clip_similarity"),
    "punsafe": ("PUNSAFE", "p_unsafe"),
    "pwatermark": ("PWATERMARK", "p_watermark"),
    "hash": ("HASH",),
}
_BOTH_PUBLISHED = {"aesthetic"}  # LAION2B-en and LAION-Art differ in it; a table keeps the name it has

INTEGER, NUMBER, TEXT, TRUTH, OTHER = "integer", "number", "text", "truth", "other"


@dataclass(frozen=True)
class Columns:
    """The columns of a table. `kinds`: by name, in their order, one of INTEGER, NUMBER, TEXT, TRUTH, OTHER."""

    kinds: dict[str, str]

    def find(self, name: str) -> str | None:
        """The column that `name` means: the one of that name, else of a name for the same thing; None if none is."""
        if name in self.kinds:
            return name
        names = {other.lower(): other for other in self.kinds}
        candidates = (candidate.lower() for candidate in (name, *_same_thing(name)))
        return next((names[candidate] for candidate in candidates if candidate in names), None)

    def need(self, name: str) -> str:
        """As `find`. Raises ConfigError where there is none."""
        found = self.find(name)
        if found is None:
            raise ConfigError(
                f"no column is {name!r} (known by the names {', '.join(dict.fromkeys([name, *_same_thing(name)]))}); "
                f"the table has {', '.join(self.kinds)}"
            )
        return found

    def report(self) -> tuple[dict[str, str], list[str]]:
        """(the column of each published name that was found, the published names that were not)."""
        found = {name: self.find(name) for name in ALIASES}
        return {name: column for name, column in found.items() if column}, [n for n, c in found.items() if not c]

    def published_names(self) -> dict[str, str]:
        """The name that each column is written under: the published one where it is known, else its own."""
        new_names = {self.find(name): name for name in ALIASES if self.find(name) not in (None, *_BOTH_PUBLISHED)}
        taken = {name.lower(): name for name in self.kinds}
        return {
            name: new_names[name] if taken.get(new_names.get(name, "").lower(), name) == name in new_names else name
            for name in self.kinds
        }


def _same_thing(name: str) -> tuple[str, ...]:
    """All names of what `name` is a name of, in any case."""
    things = ((published, *aliases) for published, aliases in ALIASES.items())
    return next((names for names in things if name.lower() in {other.lower() for other in names}), ())


@dataclass(frozen=True)
class Table:
    """A parquet file. `schema`: the name and type of each column, as text. `number`: of a part to be downloaded.
    `source`: the file that was given, of which it was made where that is another."""

    path: Path | RemotePath
    rows: int
    bytes: int = 0
    schema: tuple[tuple[str, str], ...] = ()
    number: int = 0
    source: Path | RemotePath | None = None


@dataclass(frozen=True)
class Tables:
    """Parquet files of the same columns, named as in the first. `names`: what they were asked for by, absolute.
    `spellings`: other names of a column in some files. `mixed`: a column that is wider in some files."""

    files: tuple[Table, ...]
    columns: Columns
    names: tuple[str, ...] = ()
    spellings: Mapping[str, frozenset[str]] = field(default_factory=dict)
    mixed: str | None = None

    @property
    def paths(self) -> list[Path | AddressPath]:
        return [file.path for file in self.files]

    @property
    def sources(self) -> list[Path | AddressPath]:
        return [file.source for file in self.files]

    @property
    def addresses(self) -> list[str]:
        return [f"file://{path}" if isinstance(path, Path) else str(path) for path in self.paths]

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)


def read_tables(inputs: Sequence[str], hadoop: Hadoop | None = None) -> Tables:
    """The tables that `--input` names, folders meaning all of theirs; of parquet only footers are read, with `hadoop`
    through it. A column may have another name in each file (`Columns`). Raises ConfigError, DataError."""
    places = [AddressPath(address_of(name).rstrip("/"), hadoop) if hadoop else input_path(name) for name in inputs]
    paths = [path for place in places for path in _list_files(place)]
    if len(set(paths)) < len(paths):
        raise ConfigError(f"--input names {min(path for path in paths if paths.count(path) > 1)} twice; name it once")
    files = tuple(map_in_threads(partial(read_table, kinds=WITH_COLUMNS), paths, "reading footers"))
    first, spellings, mixed = files[0], defaultdict(set), None
    for file in files[1:]:
        if set(file.schema) != set(first.schema):
            for name, meant in _match_columns(file, first).items():
                if name.lower() != meant.lower():
                    spellings[meant].add(name)
                if dict(file.schema)[name] != dict(first.schema)[meant]:
                    mixed = meant
    seen: dict[str, str] = {}
    for name, _ in first.schema:  # engines take names for one that differ only in case
        if (other := seen.setdefault(name.lower(), name)) != name:
            raise ConfigError(
                f"{first.path} has columns {other!r} and {name!r}, alike but for case; rename one of them"
            )
    own_name = address_of if hadoop else lambda name: name if is_address(name) else os.path.abspath(local_path(name))
    columns = Columns({name: _kind(type_name) for name, type_name in first.schema})
    others = {name: frozenset(found) for name, found in spellings.items()}
    return Tables(files, columns, tuple(map(own_name, inputs)), others, mixed)


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


def _list_files(named: Path | AddressPath) -> list[Path | AddressPath]:
    path = Path(os.path.abspath(named)) if isinstance(named, Path) else named
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ConfigError(f"--input {named} is not there; name parquet files, or folders of them")
    if found := find_tables(path):
        return found
    raise ConfigError(f"no *.parquet files in --input {named} (subfolders are not searched); name the folder of them")


def open_parquet(path: Path | RemotePath):
    """The pq.ParquetFile. Raises DataError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(parquet_source(path))
    except (pa.ArrowException, OSError) as error:
        why = one_line(str(error), 200)
        raise DataError(f"{path} is not a parquet file, or is damaged ({why}); get it again") from error


def read_table(path: Path | RemotePath, number: int = 0, kinds: Sequence[str] = FORMATS) -> Table:
    """A table of one of `kinds`. Raises DataError, ConfigError, OutputError."""
    return replace(read_footer(as_parquet(path, kinds), number), source=path)


def read_footer(path: Path | RemotePath, number: int = 0) -> Table:
    """What the end of a parquet file says of it. Raises DataError."""
    with open_parquet(path) as file:
        schema = tuple((field.name, str(field.type)) for field in file.schema_arrow)
        return Table(path, file.metadata.num_rows, path.stat().st_size, schema, number)


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

"""What is known of a data set: one YAML file each in `entries/`, and `hf:OWNER/NAME` for any other of the hub.

title, licence (name, page), gate (the page of terms to accept, where there is one), withdrawn (since when, why, what to
take instead), rows and gigabytes as published, filtered_rows (published, of `pipeline`'s filter), checked (the day on
which the facts were looked up), facts (where) and unsure (what could not be looked up), and of the data themselves:

pictures        sources, see Source: archives of pictures, tars of samples, tables with pictures, or tables of URLs
captions        sources of captions that lie apart, and `query`: SQL of DuckDB, {folder} being where they are, that
                gives key (a picture's name without folder and suffix), caption, reason (why the row is not wanted, or
                null), and metadata
columns         of tables and samples whose columns have other names: image, caption, url
pipeline        of tables of URLs: settings of `ppldm pipeline`
training_flags  what the published recipe trains with
"""

import re
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path

import yaml

from ...utils.errors import ConfigError
from ...utils.text import did_you_mean

_FOLDER = Path(__file__).parent / "entries"
SIZES = ("small", "all")
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_HUB_NAME = re.compile(r"hf:([\w.-]+/[\w.-]+)")
# Of a data set of the hub without an entry; those whose names say that they are for something else are left out.
_HUB_FILES = ("*.parquet", "*.tar", "*.jsonl", "*.csv", "*.mds")


@dataclass(frozen=True)
class Source:
    """Files of one place: of a repository `hub`, at addresses (the patterns themselves), or in a list of `links` (lines
    of name and address, as the user has it). all, small: patterns of names, with {0001..0200} and *; small is about
    1 %, the same files where it is empty."""

    all: tuple[str, ...]
    small: tuple[str, ...] = ()
    hub: str = ""
    revision: str = "main"
    links: bool = False

    def patterns(self, size: str) -> tuple[str, ...]:
        """Of `size`, small or all."""
        return (self.small if size == "small" else ()) or self.all


@dataclass(frozen=True)
class Entry:
    """As the module says. small_rows: pictures taken of each archive for `small`, where archives are few."""

    name: str
    title: str
    licence: dict
    pictures: tuple[Source, ...]
    checked: str = ""
    facts: tuple[str, ...] = ()
    unsure: str = ""
    gate: str = ""
    withdrawn: str = ""
    rows: int | None = None
    filtered_rows: int | None = None
    gigabytes: float | None = None
    captions: tuple[Source, ...] = ()
    query: str = ""
    columns: dict = field(default_factory=dict)
    pipeline: dict = field(default_factory=dict)
    small_rows: int = 0
    training_flags: str = ""

    @property
    def page(self) -> str:
        """Where a person finds terms, files and news of it."""
        return self.gate or self.licence["page"]


@cache
def list_entries() -> dict[str, Entry]:
    """All of the registry, by name."""
    return {path.stem: _read(path) for path in sorted(_FOLDER.glob("*.yaml"))}


def find_entry(name: str, files: list[str] = (), columns: dict | None = None) -> Entry:
    """The entry of a name, or of `hf:OWNER/NAME`, whose files (patterns; by default all tables and tars) and columns
    may be said. Raises ConfigError."""
    columns = {key: value for key, value in (columns or {}).items() if value}
    if found := _HUB_NAME.fullmatch(name):
        page = f"https://huggingface.co/datasets/{found[1]}"
        source = Source(tuple(files) or _HUB_FILES, hub=found[1])
        pipeline = {}
        if "url" in columns:
            names = {"url_col": columns["url"], "caption_col": columns.get("caption", "")}
            # A shuffle needs columns of the usual names.
            pipeline = {"filter": {"no_shuffle": True}, "download": {key: one for key, one in names.items() if one}}
            pipeline |= {"convert": {"min_size": 256}}
        licence = {"name": "see its page", "page": page}
        return Entry(name, found[1], licence, (source,), gate=page, columns=columns, pipeline=pipeline)
    if files or columns:
        raise ConfigError("--files and the columns are for hf:OWNER/NAME; the sets of `ppldm dataset list` have theirs")
    entries = list_entries()
    if name not in entries:
        raise ConfigError(f"no data set {name!r}; {did_you_mean(name, entries)} or hf:OWNER/NAME for one of the hub")
    return entries[name]


def expand(pattern: str) -> list[str]:
    """The names of a pattern's ranges: `{08..10}` is 08, 09, 10."""
    found = _RANGE.search(pattern)
    if not found:
        return [pattern]
    numbers = range(int(found[1]), int(found[2]) + 1)
    heads = (pattern[: found.start()] + str(number).zfill(len(found[1])) for number in numbers)
    tails = expand(pattern[found.end() :])
    return [head + tail for head in heads for tail in tails]


def _read(path: Path) -> Entry:
    stated = yaml.safe_load(path.read_text(encoding="utf-8"))
    captions = stated.pop("captions", {})
    sources = {"pictures": stated.pop("pictures"), "captions": captions.get("sources", [])}
    unknown = stated.keys() - {one.name for one in fields(Entry)}
    if unknown:
        raise ConfigError(f"{path}: {', '.join(sorted(unknown))} is not known")
    stated |= {name: tuple(map(_source, given)) for name, given in sources.items()}
    stated |= {"facts": tuple(stated.get("facts", ())), "checked": str(stated.get("checked", ""))}
    return Entry(path.stem, query=captions.get("query", ""), **stated)


def _source(stated: dict) -> Source:
    return Source(**{key: tuple(value) if isinstance(value, list) else value for key, value in stated.items()})

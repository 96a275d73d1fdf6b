"""`ppldm dataset list | show`: what is known of data sets, each in a YAML file of `entries/`, else as hf:OWNER/NAME.

title, licence (name, page), gate (the page of terms to accept), withdrawn (since when, why, what to take instead), rows
and gigabytes as published, filtered_rows (published, of `pipeline`'s filter), checked (when the facts were looked up),
facts (where), unsure (what could not be looked up), training_flags (of the published recipe), and of the data:

pictures    sources, see Source: archives of pictures, tars of samples, tables with pictures, or tables of URLs
captions    sources of captions that lie apart, and `query`: SQL of DuckDB over {folder} that gives key (a picture's
            name without folder and suffix), caption, reason (why the row is not wanted, or null), and metadata
columns     of tables and samples whose columns have other names: image, caption, url
pipeline    of tables of URLs: settings of `ppldm pipeline`
"""

import re
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from pathlib import Path

import yaml

from ...utils.errors import ConfigError
from ...utils.text import did_you_mean, print_report

_FOLDER = Path(__file__).parent / "entries"
SIZES = ("small", "all")
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_HUB_NAME = re.compile(r"hf:([\w.-]+/[\w.-]+)")
# Of a data set of the hub without an entry; those whose names say that they are for something else are left out.
_HUB_FILES = ("*.parquet", "*.tar", "*.jsonl", "*.csv", "*.mds")


@dataclass(frozen=True)
class Source:
    """Files of a repository `hub`, at addresses (the patterns themselves), or in a list of `links` that the user has.
    all, small: patterns of names, with {0001..0200} and *; small is about 1 %."""

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
    """The entry of a name, or of `hf:OWNER/NAME`, whose files and columns may be said. Raises ConfigError."""
    columns = {key: value for key, value in (columns or {}).items() if value}
    if found := _HUB_NAME.fullmatch(name):
        page = f"https://huggingface.co/datasets/{found[1]}"
        source = Source(tuple(files) or _HUB_FILES, hub=found[1])
        pipeline = {}
        if "url" in columns:
            names = {"url_col": columns["url"]} | ({"caption_col": columns["caption"]} if "caption" in columns else {})
            # A shuffle needs columns of the usual names.
            pipeline = {"filter": {"no_shuffle": True}, "download": names, "convert": {"min_size": 256}}
        licence = {"name": "see its page", "page": page}
        return Entry(name, found[1], licence, (source,), gate=page, columns=columns, pipeline=pipeline)
    if columns:
        raise ConfigError("the columns are for hf:OWNER/NAME; the sets of `ppldm dataset list` have theirs")
    entries = list_entries()
    if name not in entries:
        raise ConfigError(f"no data set {name!r}; {did_you_mean(name, entries)} or hf:OWNER/NAME for one of the hub")
    entry = entries[name]
    if files and (len(entry.pictures) > 1 or not entry.pictures[0].hub):
        raise ConfigError(f"--files is not for {name}, which is not of one repository of the hub; omit it")
    return replace(entry, pictures=(replace(entry.pictures[0], all=tuple(files), small=()),)) if files else entry


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
    if unknown := stated.keys() - {one.name for one in fields(Entry)}:
        raise ConfigError(f"{path}: {', '.join(sorted(unknown))} is not known")
    for kind, given in sources.items():
        patterns = [{name: tuple(one.get(name, ())) for name in ("all", "small")} for one in given]
        stated[kind] = tuple(Source(**one | own) for one, own in zip(given, patterns, strict=True))
    stated |= {"facts": tuple(stated.get("facts", ())), "checked": str(stated.get("checked", ""))}
    return Entry(path.stem, query=captions.get("query", ""), **stated)


def list_datasets(
    json: bool = False,  # print {name: facts} as JSON
):
    """List the data sets that are known by name."""
    entries = {name: asdict(entry) for name, entry in list_entries().items()}
    print_report(entries, _describe_list, json)


def show(
    name: str,  # of a data set
    json: bool = False,  # print the facts as JSON
):
    """Show what is known of a data set: licence, terms, size, filters, and when that was checked."""
    print_report(asdict(find_entry(name)), _describe_entry, json)


def _describe_list(entries: dict) -> str:
    lines = [f"{'name':<24}{'rows':>14}{'GB':>8}  what"]
    for name, entry in entries.items():
        size = f"{entry['gigabytes']:,.0f}" if entry["gigabytes"] else ""
        rows = f"{entry['rows']:,}" if entry["rows"] else ""
        lines.append(f"{name:<24}{rows:>14}{size:>8}  {entry['title']}{' (withdrawn)' if entry['withdrawn'] else ''}")
    more = "No number: not published. `ppldm dataset show NAME` says more; hf:OWNER/NAME is any data set of the hub"
    return "\n".join([*lines, more])


def _settings(given) -> str:
    """Of a step of a pipeline: flags."""
    if not isinstance(given, dict):
        return str(given)
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in given.items())


def _describe_entry(entry: dict) -> str:
    hubs = {source["hub"] for source in entry["pictures"] if source["hub"]}
    facts = {
        "what": entry["title"],
        "licence": f"{entry['licence']['name']} ({entry['licence']['page']})",
        "terms to accept": "of each repository under files" if entry["gate"] and len(hubs) > 1 else entry["gate"],
        "withdrawn": entry["withdrawn"],
        "rows": f"{entry['rows']:,}" if entry["rows"] else "",
        "rows after the filter": f"{entry['filtered_rows']:,} published" if entry["filtered_rows"] else "",
        "GB": entry["gigabytes"],
        "made by": "; ".join(
            f"ppldm {step} with {_settings(given)}" for step, given in entry["pipeline"].items() if step != "small"
        ),
        "train with": entry["training_flags"],
        "not looked up": entry["unsure"],
        "checked": f"{entry['checked']}, by {'; '.join(entry['facts'])}" if entry["checked"] else "",
    }
    lines = [entry["name"], *(f"{name:<22}{value}" for name, value in facts.items() if value), "files"]
    for source in (*entry["pictures"], *entry["captions"]):
        place = source["hub"] and f"hf:{source['hub']} at {source['revision']}: "
        small = f" (small: {', '.join(source['small'])})" if source["small"] else ""
        lines.append(f"  {place}{', '.join(source['all'])}{small}")
    return "\n".join(lines)

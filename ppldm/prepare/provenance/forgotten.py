"""Rows that `ppldm convert` has written, found by URLs, domains, keys or files; which of them must not be there."""

import re
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from ipaddress import IPv6Address
from json import JSONDecodeError, loads
from pathlib import Path

from ...data.formats.part import Part
from ...utils.errors import ConfigError, DataError, OutputError, RowError
from ...utils.files import read_json_object, write_json
from ...utils.log import progress
from ...utils.processes.workers import map_unordered
from ..block_list import read_block_list, read_lines
from ..download.fetch import host_of

FORGOTTEN = "forgotten"  # the reason under which such rows are counted
PACKED = "*"  # in place of the source of a part whose rows have several
_KINDS = ("url", "domain", "key")
_DIGEST = "sha256:"
_NO_DOMAIN = re.compile(r"[\s/:@?#*\\]|^$")  # what no name of a host has, and URLs and patterns do


@dataclass(frozen=True)
class Forgotten:
    """`urls`: as they are, or as `_digest_of` has them. `domains`: in lower case, with their subdomains. `keys`:
    `part_1/000010002` is the one of that folder, `000010002` all. `hashes`: SHA-256 of pictures."""

    urls: frozenset[str] = frozenset()
    domains: frozenset[str] = frozenset()
    keys: frozenset[str] = frozenset()
    hashes: frozenset[str] = frozenset()

    def covers(self, meta: dict, source: str) -> list[str]:
        """Which entries a row of this metadata is named by. `source`: what it was made from, such as part_1/00000."""
        url, key = meta.get("url"), meta.get("key")
        found = [url] if isinstance(url, str) and {url, _digest_of(url)} & self.urls else []
        if self.domains and isinstance(url, str):
            labels = host_of(url).split(".")
            parents = {".".join(labels[start:]) for start in range(len(labels))}
            found += sorted(self.domains & parents)
        if self.keys and isinstance(key, str):
            folders = place_of(meta, source).split("/")
            # The key itself, and in each folder that holds it: part_1/KEY, part_1/00000/KEY.
            names = [key, *("/".join((*folders[:depth], key)) for depth in range(1, len(folders) + 1))]
            found += [name for name in names if name in self.keys]
        found += [digest for digest in (meta.get("sha256"),) if isinstance(digest, str) and digest in self.hashes]
        return found

    def __or__(self, other: "Forgotten") -> "Forgotten":
        return Forgotten(**{name: entries | getattr(other, name) for name, entries in vars(self).items()})

    @property
    def entries(self) -> list[str]:
        return sorted(frozenset.union(*vars(self).values()))

    def lists(self) -> dict[str, list[str]]:
        """As JSON has it."""
        return {name: sorted(entries) for name, entries in vars(self).items()}

    @classmethod
    def parse(cls, lists: dict[str, list[str]]) -> "Forgotten":
        """The other direction; lists of older versions have no hashes. Raises KeyError or TypeError for else."""
        return cls(*(frozenset(({"hashes": []} | lists)[name]) for name in ("urls", "domains", "keys", "hashes")))

    @classmethod
    def read(cls, out: Path) -> "Forgotten":
        """What was forgotten in the folder `out` of a conversion. Raises OutputError where its list is damaged."""
        path = out / "forgotten.json"
        try:
            return cls.parse(loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return cls()
        except (JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
            raise OutputError(
                f"{path} is damaged ({error}); write it anew by `ppldm forget`, after deleting it"
            ) from error

    def write(self, out: Path) -> None:
        """The other direction. A URL is there as its digest: the list need not say what it keeps out."""
        urls = frozenset(url if url.startswith(_DIGEST) else _digest_of(url) for url in self.urls)
        write_json(out / "forgotten.json", replace(self, urls=urls).lists())


def place_of(meta: dict, source: str) -> str:
    """What a row was made from: `source`, that of its part, or its own folder where the part was packed."""
    return str(meta.get("folder", "")) if source == PACKED else source


def read_entries(
    url: str | None,
    domain: str | None,
    key: str | None,
    entries: str | None = None,
    block_list: Sequence[str] | None = None,
) -> Forgotten:
    """What files name: of three each line is an entry, of `entries` a JSON object. Raises ConfigError, StoreError."""
    named: dict[str, set[str]] = {}
    for kind, path in {"url": url, "domain": domain, "key": key}.items():
        lines = read_lines(f"--{kind}", path) if path is not None else ()
        named[kind] = {line.strip() for line in lines if line.strip() and not line.startswith("#")}
    for kind, entry in _read_objects(entries) if entries is not None else ():
        named[kind].add(entry)
    blocked, domains = read_block_list(block_list), frozenset(map(_check_domain, named["domain"]))
    forgotten = Forgotten(blocked.urls | named["url"], domains, frozenset(named["key"]), blocked.hashes)
    if forgotten.entries:
        return forgotten
    if files := " ".join(str(one) for one in (url, domain, key, entries, *(block_list or ())) if one):
        raise ConfigError(f"nothing to forget; nothing stands in {files}")
    raise ConfigError("nothing to forget; name a file by --url, --domain, --key, --entries or --block-list")


def _check_domain(entry: str) -> str:
    """In lower case, without dots around it. Raises ConfigError for what no host of a URL is part of."""
    domain = entry.lower().strip(".")
    with suppress(ValueError):
        if not _NO_DOMAIN.search(domain) or IPv6Address(domain):
            return domain
    host, remedy = host_of(entry if "//" in entry else f"//{entry}").removeprefix("*."), "write example.com"
    if host and not _NO_DOMAIN.search(host):
        remedy = f"write {host}, which covers its subdomains"
    raise ConfigError(f"--domain: {entry!r} is not a domain; {remedy}, or name URLs by --url")


def read_manifest(data: Path) -> dict:
    """The manifest of a finished conversion. Raises ConfigError, DataError."""
    if not (data / "manifest.json").is_file():
        raise ConfigError(f"no manifest.json in {data}; name a folder that `ppldm convert` has finished")
    return read_json_object(data / "manifest.json", DataError, "run `ppldm convert` again")


def find_rows(data: Path, manifest: dict, wanted: Forgotten, num_workers: int) -> dict[str, dict]:
    """{path of a part: {row: (entries that name it, its metadata)}} of the parts of a manifest with such rows."""
    parts = [(part["path"], part.get("source", "")) for part in manifest["parts"]]
    found = map_unordered(partial(_search, data=data, wanted=wanted), parts, num_workers)
    return {path: rows for (path, _), rows in progress(found, total=len(parts), desc="searching", unit="part") if rows}


def _search(named: tuple[str, str], data: Path, wanted: Forgotten) -> dict[int, tuple[list[str], dict]]:
    found, (path, source) = {}, named
    if not (data / path).exists():  # a killed `ppldm forget` has taken the whole part out
        return found
    with closing(Part(data / path)) as part:
        for row in range(len(part)):
            try:
                _, meta = part.read_fields(row)
            except RowError:
                continue  # `ppldm verify` counts these
            if entries := wanted.covers(meta, source):
                found[row] = entries, meta
    return found


def _digest_of(url: str) -> str:
    return _DIGEST + sha256(url.encode("utf-8", "surrogatepass")).hexdigest()


def _read_objects(path: str) -> Iterator[tuple[str, str]]:
    """(kind, entry) of JSON lines such as {"key": "part_1/000010002"}: for entries that hold line breaks."""
    for number, line in enumerate(read_lines("--entries", path), 1):
        if not line.strip():
            continue
        try:
            [(kind, entry)] = loads(line).items()
        except (ValueError, AttributeError):
            kind = entry = None
        if kind not in _KINDS or not isinstance(entry, str) or not entry:
            raise ConfigError(
                f'--entries: line {number} of {path} is not like {{"url": "http://..."}}, {{"key": "..."}}'
            )
        yield kind, entry

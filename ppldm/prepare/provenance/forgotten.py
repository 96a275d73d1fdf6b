"""The rows of a folder that `ppldm convert` has written, found by URLs, domains, keys or files; and which of them must
not be there."""

import re
from collections.abc import Iterator, Sequence
from contextlib import closing
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
from ..download.hosts import host_of

# The reason under which such rows are counted.
FORGOTTEN = "forgotten"
# In place of the source of a part whose rows have several.
PACKED = "*"
_KINDS = ("url", "domain", "key")
_DIGEST = "sha256:"
# What no name of a host has, and URLs and patterns do.
_NO_DOMAIN = re.compile(r"[\s/:@?#*\\]|^$")


@dataclass(frozen=True)
class Forgotten:
    """`urls`: as they are, or as `_digest_of` has them. `domains` cover their subdomains, and are in lower case. Keys
    repeat from part to part of a download: in `keys`, `part_1/000010002` is the one of that folder, `000010002` all.
    `hashes`: SHA-256 of pictures, as their metadata have it."""

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
            found += [name for name in _names_of(key, place_of(meta, source)) if name in self.keys]
        found += [digest for digest in (meta.get("sha256"),) if isinstance(digest, str) and digest in self.hashes]
        return found

    def __or__(self, other: "Forgotten") -> "Forgotten":
        return Forgotten(*(mine | others for mine, others in zip(_lists(self), _lists(other), strict=True)))

    @property
    def entries(self) -> list[str]:
        """Everything named, sorted."""
        return sorted(frozenset.union(*_lists(self)))


def _lists(forgotten: Forgotten) -> tuple[frozenset[str], ...]:
    return tuple(vars(forgotten).values())


def _names_of(key: str, source: str) -> list[str]:
    """The key itself, and in each folder that holds it: part_1/KEY, part_1/00000/KEY."""
    folders = source.split("/")
    return [key, *("/".join((*folders[:depth], key)) for depth in range(1, len(folders) + 1))]


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
    """What files name; None for no file. Of three files each line is an entry, of `entries` a JSON object;
    `block_list`: as `read_block_list` has it. Raises ConfigError, StoreError."""
    named: dict[str, set[str]] = {}
    for kind, path in {"url": url, "domain": domain, "key": key}.items():
        lines = read_lines(f"--{kind}", path) if path is not None else ()
        named[kind] = {line.strip() for line in lines if line.strip() and not line.startswith("#")}
    for kind, entry in _read_objects(entries) if entries is not None else ():
        named[kind].add(entry)
    blocked, domains = read_block_list(block_list), frozenset(map(_check_domain, named["domain"]))
    forgotten = Forgotten(blocked.urls | named["url"], domains, frozenset(named["key"]), blocked.hashes)
    if not forgotten.entries:
        files = " ".join(str(one) for one in (url, domain, key, entries, *(block_list or ())) if one)
        what = (
            f"nothing stands in {files}"
            if files
            else "name a file by --url, --domain, --key, --entries or --block-list"
        )
        raise ConfigError(f"nothing to forget; {what}")
    return forgotten


def _check_domain(entry: str) -> str:
    """In lower case, without dots around it. Raises ConfigError for what no host of a URL is part of."""
    domain = entry.lower().strip(".")
    if not _NO_DOMAIN.search(domain) or _is_ipv6(domain):
        return domain
    host = host_of(entry if "//" in entry else f"//{entry}").removeprefix("*.")
    remedy = (
        f"write {host}, which covers its subdomains" if host and not _NO_DOMAIN.search(host) else "write example.com"
    )
    raise ConfigError(f"--domain: {entry!r} is not a domain; {remedy}, or name URLs by --url")


def _is_ipv6(text: str) -> bool:
    try:
        return bool(IPv6Address(text))
    except ValueError:
        return False


def read_manifest(data: Path) -> dict:
    """The manifest of a finished conversion. Raises ConfigError, DataError."""
    if not (data / "manifest.json").is_file():
        raise ConfigError(f"no manifest.json in {data}; name a folder that `ppldm convert` has finished")
    return read_json_object(data / "manifest.json", DataError, "run `ppldm convert` again")


def find_rows(data: Path, manifest: dict, wanted: Forgotten, num_workers: int) -> Iterator[tuple[str, dict]]:
    """(path of a part, {row: (entries that name it, its metadata)}) of each part of a manifest."""
    parts = [(part["path"], part.get("source", "")) for part in manifest["parts"]]
    with progress(total=len(parts), desc="searching", unit="part") as bar:
        for (path, _), found in map_unordered(partial(_search, data=data, wanted=wanted), parts, num_workers):
            yield path, found
            bar.update()


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


def read_forgotten(out: Path) -> Forgotten:
    """What was forgotten in the folder `out` of a conversion. Raises OutputError where its list is damaged."""
    path = out / "forgotten.json"
    try:
        return parse_forgotten(loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return Forgotten()
    except (JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise OutputError(f"{path} is damaged ({error}); write it anew by `ppldm forget`, after deleting it") from error


def write_forgotten(out: Path, forgotten: Forgotten) -> None:
    """The other direction. A URL is there as its digest: the list need not say what it keeps out."""
    urls = frozenset(url if url.startswith(_DIGEST) else _digest_of(url) for url in forgotten.urls)
    write_json(out / "forgotten.json", list_forgotten(replace(forgotten, urls=urls)))


def _digest_of(url: str) -> str:
    return _DIGEST + sha256(url.encode("utf-8", "surrogatepass")).hexdigest()


def list_forgotten(forgotten: Forgotten) -> dict[str, list[str]]:
    """As JSON has it."""
    return {name: sorted(entries) for name, entries in vars(forgotten).items()}


def parse_forgotten(lists: dict[str, list[str]]) -> Forgotten:
    """The other direction. Raises KeyError or TypeError for anything else."""
    older = {"hashes": []}  # lists of older versions have none
    return Forgotten(**{name: frozenset((older | lists)[name]) for name in ("urls", "domains", "keys", "hashes")})


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

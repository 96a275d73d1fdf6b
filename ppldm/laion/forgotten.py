"""Which rows of a converted folder must not be there: those of some URLs, domains or keys."""

from dataclasses import dataclass, field
from json import JSONDecodeError, loads
from pathlib import Path
from urllib.parse import urlsplit

from ..utils.errors import ConfigError, OutputError
from ..utils.files import write_json

# The reason under which such rows are counted.
FORGOTTEN = "forgotten"


@dataclass(frozen=True)
class Forgotten:
    """`domains` cover their subdomains, and are in lower case. Keys repeat from part to part of a download: in `keys`,
    `part_1/000010002` is the one of that folder, `000010002` all."""

    urls: frozenset[str] = field(default_factory=frozenset)
    domains: frozenset[str] = field(default_factory=frozenset)
    keys: frozenset[str] = field(default_factory=frozenset)

    def covers(self, meta: dict, source: str) -> list[str]:
        """Which entries a row of this metadata is named by. `source`: what it was made from, such as part_1/00000."""
        url, key = meta.get("url"), meta.get("key")
        found = [url] if isinstance(url, str) and url in self.urls else []
        if self.domains and isinstance(url, str):
            labels = host_of(url).split(".")
            parents = {".".join(labels[start:]) for start in range(len(labels))}
            found += sorted(self.domains & parents)
        if self.keys and isinstance(key, str):
            found += [name for name in _names_of(key, source) if name in self.keys]
        return found

    def __or__(self, other: "Forgotten") -> "Forgotten":
        return Forgotten(self.urls | other.urls, self.domains | other.domains, self.keys | other.keys)

    @property
    def entries(self) -> list[str]:
        """Everything named, sorted."""
        return sorted(self.urls | self.domains | self.keys)


def _names_of(key: str, source: str) -> list[str]:
    """The key alone, and in each folder that holds it: part_1/KEY, part_1/00000/KEY."""
    folders = source.split("/")
    return [key, *("/".join((*folders[:depth], key)) for depth in range(1, len(folders) + 1))]


def host_of(url: str) -> str:
    """The host of a URL in lower case; empty where it has none."""
    try:
        return (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:  # a damaged IPv6 address
        return ""


def read_entries(url: str | None, domain: str | None, key: str | None) -> Forgotten:
    """What three files name, an entry a line; None for no file. Raises ConfigError."""
    domains = {entry.lower().strip(".") for entry in _read_lines("--domain", domain)}
    forgotten = Forgotten(
        frozenset(_read_lines("--url", url)), frozenset(domains), frozenset(_read_lines("--key", key))
    )
    if not forgotten.entries:
        raise ConfigError("nothing to forget; name a file by --url, --domain or --key, with an entry a line")
    return forgotten


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
    """The other direction."""
    write_json(out / "forgotten.json", list_forgotten(forgotten))


def list_forgotten(forgotten: Forgotten) -> dict[str, list[str]]:
    """As JSON has it."""
    return {name: sorted(entries) for name, entries in vars(forgotten).items()}


def parse_forgotten(lists: dict[str, list[str]]) -> Forgotten:
    """The other direction. Raises KeyError or TypeError for what is no such thing."""
    return Forgotten(*(frozenset(lists[name]) for name in ("urls", "domains", "keys")))


def _read_lines(flag: str, path: str | None) -> set[str]:
    if path is None:
        return set()
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        problem = getattr(error, "strerror", None) or error
        raise ConfigError(f"{flag}: cannot read {path} ({problem}); name a text file with an entry a line") from error
    return {line.strip() for line in lines if line.strip() and not line.startswith("#")}

"""Work that knows what it was made from: the one rule by which every command keeps, makes again or refuses a result.

A unit of work (a part file, a part of a download, a filtered folder) has a key: the settings that decide its result,
and a fingerprint of its input's content. Its record, written last, holds the key.

- Same key: finished, and left alone.
- Other content: what is made from files of this machine follows them, and only that unit is made again. A download
  refuses it: what was fetched may be gone from where it was.
- Other settings: refused in one line that names them, since another command may own the folder. `--redo` makes again
  what they decide, and nothing else.
- A record without a key, of an older version, is of other content. A download is taken for one of today's, with a line
  that says so.

The fingerprint of content is a digest of the names, sizes and CRC-32s of all bytes, in their order: it tells accidents
apart, not forgers. Beside it the state is kept: sizes, times of change and inodes. Where the state is the same, nothing
is read; where only the state differs (a copied or touched file), the content is read again and decides.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from json import dumps
from pathlib import Path

from .checksums import measure
from .errors import ConfigError, OutputError
from .files import lock_folder, make_output_dir, read_json, write_json
from .log import get_logger
from .text import as_json, find_changes


@dataclass(frozen=True)
class Piece:
    """A file, or its bytes [start, stop), as a part of an input. `name`: what the result may depend on of its place."""

    path: Path
    name: str
    start: int = 0
    stop: int | None = None


def take_fingerprint(pieces: Iterable[Piece], earlier: Mapping | None = None) -> dict[str, str]:
    """{"state", "content"} of pieces in their order; the content of `earlier` where the state is still the same. A file
    that is not there, or cannot be read, is a fact like any other."""
    pieces = list(pieces)
    state = take_state(pieces)
    if earlier and earlier.get("state") == state:
        return {"state": state, "content": earlier["content"]}
    return {"state": state, "content": _digest([piece.name, *_read_checksum(piece)] for piece in pieces)}


def take_state(pieces: Iterable[Piece]) -> str:
    """The digest of sizes, times of change and inodes, by which a file that nobody has touched is known."""
    return _digest([piece.name, piece.start, piece.stop, _read_state(piece.path)] for piece in pieces)


def list_pieces(path: Path) -> Iterator[Piece]:
    """A file, or all files below a folder by their names in it, in a fixed order, hidden ones left out."""
    if not path.is_dir():
        yield Piece(path, path.name)
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        places = (Path(folder, name) for name in sorted(names) if not name.startswith("."))
        yield from (Piece(place, str(place.relative_to(path))) for place in places)


def make_key(settings: Mapping, pieces: Iterable[Piece], record_path: Path) -> dict:
    """The key of a unit; the record of an earlier run may spare reading its input."""
    earlier = ((read_json(record_path) or {}).get("key") or {}).get("input")
    return {"settings": as_json(settings), "input": take_fingerprint(pieces, earlier)}


def find_finished(record_path: Path, key: Mapping, is_whole: Callable[[dict], bool]) -> dict | None:
    """The record of a unit that was made by this key and whose result `is_whole`; None where it is to be made."""
    record = read_json(record_path) or {}
    earlier = record.get("key") or {}
    settings, content = as_json(key["settings"]), key["input"]["content"]
    has_key = earlier.get("settings") == settings and (earlier.get("input") or {}).get("content") == content
    return record if has_key and is_whole(record) else None


def finish(
    record_path: Path, key: Mapping, is_whole: Callable[[dict], bool], make: Callable[[], dict]
) -> tuple[dict, bool]:
    """(record of a unit, whether it was finished before); else made by `make`, which returns it without the key."""
    if record := find_finished(record_path, key, is_whole):
        if record["key"] != key:
            record |= {"key": key}
            write_json(record_path, record)
        return record, True
    record_path.unlink(missing_ok=True)
    record = make() | {"key": key}
    write_json(record_path, record)
    return record, False


@dataclass(frozen=True)
class JobFolder:
    """A folder of results, and inside it a hidden folder of what is known of them: `plan.json` and records. `holds`:
    what lies in it ("conversion"). `results`: the folder inside it of which no file is there before the first plan."""

    path: Path
    hidden: str
    holds: str
    results: str = ""

    @property
    def notes(self) -> Path:
        return self.path / self.hidden

    @property
    def plan(self) -> dict | None:
        """The plan that was claimed last; None before the first. Raises OutputError for a damaged one."""
        path = self.notes / "plan.json"
        plan = read_json(path)
        if plan is None and path.exists():
            raise OutputError(f"{path} is damaged; choose another --out, or delete the folder {self.path}")
        return plan

    def record_path(self, name: str) -> Path:
        """The file of the record of the unit `name`."""
        return self.notes / f"{name}.json"

    def check(self, settings: Mapping, redo: bool = False, source: Mapping | None = None) -> list[str]:
        """What differs from the plan, as words: settings, and the content of `source`, the fingerprint of an input on
        which all depends. Raises ConfigError for a difference unless `redo`, OutputError for files without a plan."""
        plan = self.plan
        if plan is None:
            place = self.path / self.results
            if not self.notes.exists() and any(place.glob("*")):
                raise OutputError(f"{place} holds files of unknown origin; choose another --out, or delete that folder")
            return []
        earlier = plan.pop("input", None)
        # A plan of an older version knows of no content, and of fewer settings.
        changes = find_changes(settings | plan if source and not earlier else plan, settings)
        if source and earlier and earlier["content"] != source["content"]:
            changes.append("it was made from other content")
        if changes and not redo:
            raise ConfigError(
                f"{self.path} holds another {self.holds} ({'; '.join(changes)}); choose another --out, or make it "
                "again with --redo"
            )
        return changes

    def is_new(self, settings: Mapping, source: Mapping | None = None) -> bool:
        return self.plan != as_json(settings | ({"input": source} if source else {}))

    @contextmanager
    def claimed(
        self,
        settings: Mapping,
        redo: bool = False,
        source: Mapping | None = None,
        clear: Callable[[], None] = lambda: None,
    ) -> Iterator[None]:
        """Hold the folder for this process, its plan written; `clear` is called first where `check` finds changes."""
        self.check(settings, redo, source)
        make_output_dir(self.path / self.results)
        make_output_dir(self.notes)
        with closing(lock_folder(self.path)):
            if self.plan is not None:
                if self.check(settings, redo, source):
                    clear()
                elif source and "input" not in self.plan:
                    get_logger().warning(
                        "%s does not say from what content it was made; it is taken for today's", self.path
                    )
            if self.is_new(settings, source):
                write_json(self.notes / "plan.json", settings | ({"input": source} if source else {}))
            yield


def _read_state(path: Path) -> list[int] | None:
    try:
        state = path.stat()
    except (OSError, ValueError):  # ValueError: a NUL in the name
        return None
    return [state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino]


def _read_checksum(piece: Piece) -> tuple[int, int] | tuple[None]:
    """(bytes, CRC-32) of a piece; (None,) where it cannot be read."""
    try:
        with open(piece.path, "rb", buffering=0) as file:
            file.seek(piece.start)
            return measure(file, None if piece.stop is None else piece.stop - piece.start)
    except (OSError, ValueError):
        return (None,)


def _digest(facts: Iterable[list]) -> str:
    digest = sha256()
    for fact in facts:
        digest.update(dumps(fact).encode() + b"\n")
    return digest.hexdigest()

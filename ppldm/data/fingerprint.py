"""What the rows of a run are: the contents of its parts in their order, and the options that say how to read them.

A part is known by its rows, its bytes and their CRC-32, as its index states them, and not by its name: files may be
renamed and moved, also from one machine to another. Of folders of pictures and CSV tables, which name pictures in files
of their own, the names are known and not the bytes of the pictures. `find_difference` says in which part or list the
data of two runs differ first.
"""

import gzip
import json
import zlib
from dataclasses import dataclass
from functools import cached_property

from ..utils.checksums import digest_of
from ..utils.hidden import hide
from .filelist import Source
from .formats.layouts import CONTROL_LAYOUT, FORMATS


@dataclass(frozen=True)
class PartPrint:
    """A part: its name, only for messages, its rows, and bytes and CRC-32 of the file with the rows."""

    name: str
    rows: int
    bytes: int
    crc32: int

    @property
    def content(self) -> tuple[int, int, int]:
        """What tells it from other parts."""
        return self.rows, self.bytes, self.crc32

    def __str__(self) -> str:
        return f"{self.name} ({self.rows} rows, {self.bytes} bytes, CRC-32 {self.crc32:08x})"


@dataclass(frozen=True)
class ListPrint:
    """A filelist: its path, only for messages, the options by which its parts are read, and the parts."""

    path: str
    options: dict[str, str | None]
    parts: tuple[PartPrint, ...]


@dataclass(frozen=True)
class Fingerprint:
    """All rows of a run."""

    lists: tuple[ListPrint, ...]

    @cached_property
    def digest(self) -> str:
        """32 hexadecimal digits that other data do not have; names and paths are no part of it."""
        known = [[one.options, [part.content for part in one.parts]] for one in self.lists]
        return digest_of(known)

    @cached_property
    def record(self) -> bytes:
        """What `from_record` takes, about 15 bytes a part; the same data under the same names give the same bytes."""
        lists = [
            [hide(one.path), one.options, [[hide(part.name), *part.content] for part in one.parts]]
            for one in self.lists
        ]
        return gzip.compress(json.dumps(lists).encode(), 6, mtime=0)

    @classmethod
    def from_record(cls, data: bytes) -> "Fingerprint":
        """The inverse of `record`."""
        lists = json.loads(gzip.decompress(data))
        return cls(
            tuple(ListPrint(path, options, tuple(PartPrint(*part) for part in parts)) for path, options, parts in lists)
        )


def take_fingerprint(sources: list[Source], rows: list[int], contents: list[tuple[int, int]]) -> Fingerprint:
    """The Fingerprint of sources, of whose parts, one after the other, `rows` and `contents` (bytes, CRC-32) are."""
    known, lists = zip(rows, contents, strict=True), []
    for source in sources:
        parts = []
        for path, (num_rows, content) in zip(source.parts, known, strict=False):
            parts.append(PartPrint(path.name, num_rows, *content))
        lists.append(ListPrint(str(source.path), read_options(source), tuple(parts)))
    return Fingerprint(tuple(lists))


def find_difference(then: Fingerprint, now: Fingerprint) -> str | None:
    """The first list or part in which `now` is not `then`, and how, in one clause; None where they are the same."""
    for number, (old, new) in enumerate(zip(then.lists, now.lists, strict=False), 1):
        for name in sorted(old.options.keys() | new.options.keys()):
            was, is_now = old.options.get(name), new.options.get(name)
            if was != is_now:
                return f"list {number}, {new.path}, was read with {name} {was} and is now with {is_now}"
        if (found := _find_part(old, new)) is not None:
            return f"in list {number}, {new.path}, {found}"
    if len(then.lists) != len(now.lists):
        longer, what = (now, "was added") if len(now.lists) > len(then.lists) else (then, "is gone")
        number = min(len(then.lists), len(now.lists))
        return f"list {number + 1}, {longer.lists[number].path}, {what}"
    return None


def find_same_part(one: Fingerprint, other: Fingerprint) -> tuple[str, str] | None:
    """The names of a part of each, of which the content is the same, whatever they are called; None without."""
    seen = {part.content: part.name for part in _parts_of_content(one)}
    return next(((seen[part.content], part.name) for part in _parts_of_content(other) if part.content in seen), None)


def _parts_of_content(fingerprint: Fingerprint):
    for one in fingerprint.lists:
        if FORMATS[one.options["format"]].holds_rows:
            yield from one.parts


def _find_part(old: ListPrint, new: ListPrint) -> str | None:
    before, after = ([part.content for part in one.parts] for one in (old, new))
    if before == after:
        return None
    place = next((i for i, (was, is_now) in enumerate(zip(before, after, strict=False)) if was != is_now), None)
    if place is None:
        place = min(len(before), len(after))
        return f"{new.parts[place]} was added" if len(after) > len(before) else f"{old.parts[place]} is gone"
    was, is_now = old.parts[place], new.parts[place]
    if sorted(before) == sorted(after):
        return f"the parts stand in another order: {is_now} is part {place + 1}, where {was} was"
    if was.content not in after and is_now.content not in before:
        return f"part {place + 1} was {was} and is now {is_now}"
    return f"{was} is gone" if was.content not in after else f"{is_now} was added"


def read_options(source: Source) -> dict[str, str | None]:
    """The options by which the parts of a source are read, as far as they decide captions and pictures."""
    prompts = None
    if source.idx_to_prompt is not None:
        from .formats.tar import read_class_prompts

        table = json.dumps(read_class_prompts(str(source.idx_to_prompt)), sort_keys=True)
        prompts = f"CRC-32 {zlib.crc32(table.encode()):08x}"
    layout = source.layout if source.format == "part" or source.layout == CONTROL_LAYOUT else None
    return {"format": source.format, "layout": layout, "idx_to_prompt": prompts}

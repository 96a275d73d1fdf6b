"""Filelists name part files, one a line; filelist lists name filelists, `path [weight] [key=value …]` a line.

A file whose name ends in `.list`, or all of whose lines name `.filelist` files, is a filelist list; every other file is
a filelist. A folder in their place stands for the one filelist list in it, or in its folder `data`, or else for what it
holds (`parts_of_folder`).

Blank lines and lines that start with # are skipped. `~` and environment variables are expanded, then `{000..012}` and
`{a,b}`, as WebDataset has them, then `*`, `?`, `[...]` and `**` to the names that are there, sorted, without indexes; a
path that is there as it is written is taken so. A relative path is taken from the folder of the file that names it,
else from the working directory. In `format=folder` a line names a folder with all below it that hold pictures and have
no line of their own. A line may be the address of a store (`utils.store`): its part has a path like others, and comes
here when it is opened.

Weights count only where every line has one. Options: `layout=`, of `formats.layouts`; `format=`, of FORMATS;
`latents=`, of LATENTS; `idx_to_prompt=` (or `class_mapping=`), for WebDataset shards of classes: a JSON file {class
number: caption}. Layout and latents are the caller's where a line does not say them.

A `Fingerprint` says what the rows of a run are: the contents of its parts in their order, and the options by which they
are read. A part is known by its rows, its bytes and their CRC-32, not by its name, so that files may be moved. Of
folders of pictures and CSV tables the names of pictures are known, and not their bytes.
"""

import glob
import gzip
import json
import math
import os
import re
import zlib
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from ..config.data import LATENTS
from ..utils.checksums import digest_of
from ..utils.errors import FilelistError, StoreError
from ..utils.files import check_address, is_address, meant_path, read_given_text, write_text
from ..utils.processes.workers import map_in_threads
from ..utils.store.cache import address_of, bring, in_store, place_of
from ..utils.text import hide
from .formats.layouts import CONTROL_LAYOUT, DEFAULT_LAYOUT, FORMATS, LAYOUTS, get_layout

_CHOICES = {"layout": LAYOUTS, "format": FORMATS, "latents": LATENTS}
# The ends of the names of files that describe a part, and are none.
BESIDE_PARTS = (".idx", ".columns", ".latents", ".embeddings")
_PARTS = "part files, one a line"
_MOST_PARTS = 1_000_000  # of a line
_BRACES = re.compile(r"(?<!\$)\{(?:(\d+)\.\.(\d+)|([^{}]*,[^{}]*))\}")
_OPTION = re.compile(r"(?P<key>[a-z_]+)=(?P<value>\S*)")


@dataclass(frozen=True)
class Source:
    """A filelist as a line of a list names it, and the parts that it names; with cached latents these need not exist.
    weight: None throughout a list without weights. latents_dir: where latents lie; None: beside their part."""

    path: Path
    parts: tuple[Path, ...] = ()
    weight: float | None = None
    layout: str = DEFAULT_LAYOUT
    format: str = "part"
    idx_to_prompt: Path | None = None
    latents: str = "off"
    latents_dir: Path | None = None

    def without_parts(self) -> "Source":
        """How to read any of the parts, small enough to go with each."""
        return replace(self, parts=())


def read_sources(
    path, layout: str = DEFAULT_LAYOUT, must_exist: bool = True, latents: str = "off", latents_dir: Path | None = None
) -> list[Source]:
    """What `--file_list` names: a filelist list, one filelist, or a folder (see the rules above). `layout`, `latents`:
    of lists that say none. Raises FilelistError for a file that is missing, empty or malformed, a part that is named
    twice, or missing and `must_exist`; ConfigError for an unknown `layout`."""
    path = place_of(path) if is_address(path) else Path(path)
    get_layout(layout)
    known = {"layout": layout, "latents": latents}
    if not in_store(path) and path.is_dir():
        path = list_of_folder(path) or path
    if not in_store(path) and path.is_dir():
        format = parts_of_folder(path)[0]
        lists = [Source(path, **known | {"layout": _layout_of(format, layout), "format": format})]
    else:
        is_list = path.suffix == ".list" or all(
            text.split()[0].endswith(".filelist") for _, text in _read_entries(path, _PARTS)
        )
        lists = read_filelist_list(path, **known) if is_list else [Source(path, **known)]
    named_by: dict[str, str] = {}
    parts = [list(_checked_parts(item, named_by, must_exist)) for item in lists]
    return [
        replace(item, parts=tuple(_below(own, named_by) if item.format == "folder" else own), latents_dir=latents_dir)
        for item, own in zip(lists, parts, strict=True)
    ]


def _layout_of(format: str, layout: str) -> str:
    """The caller's layout, where it is not an order of columns, which only parts have."""
    return layout if format == "part" or layout == CONTROL_LAYOUT else DEFAULT_LAYOUT


def _below(folders: list[Path], named: Collection[str]) -> list[Path]:
    """Folders, and those below them that hold pictures and have no line of their own. Raises FilelistError."""
    from .formats.folder import picture_folders

    found = []
    for folder in folders:
        try:
            own = picture_folders(folder, named) if folder.is_dir() else []
            is_empty = not own and not (folder.is_dir() and picture_folders(folder))
        except OSError as error:
            raise FilelistError(f"cannot read the folder {error.filename}: {error.strerror}; check it") from error
        found += [folder] if is_empty else own  # one without pictures says so where it is opened
    return found or folders


def list_of_folder(folder: Path) -> Path | None:
    """The filelist list in a folder, or in its folder `data`; None without one. Raises FilelistError for several."""
    found = sorted(folder.glob("*.filelist.list")) or sorted(folder.glob("data/*.filelist.list"))
    if len(found) > 1:
        raise FilelistError(
            f"{folder} holds {len(found)} lists, {found[0].name} and {found[1].name} among them; name one"
        )
    return found[0] if found else None


def parts_of_folder(folder: Path) -> tuple[str, list[Path]]:
    """(format, parts) of a folder without a list: files of the first of FORMATS that it has, or pictures with captions
    in files beside them, in another table or in their names. Raises FilelistError."""
    from .formats.folder import entries_of, picture_folders

    names = sorted(name for name, is_folder in entries_of(folder) if not is_folder and not name.endswith(BESIDE_PARTS))
    for format, kind in FORMATS.items():
        if found := [folder / name for name in names if kind.names and re.fullmatch(kind.names, name)]:
            return format, found
    if folders := picture_folders(folder):
        from .text.survey import has_captions_beside, write_table

        return ("folder", [folder]) if has_captions_beside(folders) else ("csv", [write_table(folder)])
    raise FilelistError(f"{folder} holds neither parts nor pictures; name another folder, or a text file of parts")


def read_filelist_list(path, **known: str) -> list[Source]:
    """The filelists of a filelist list; `known` options of lines that do not say them. Raises FilelistError."""
    path = Path(path)
    lines = [
        (number, text, item)
        for number, text in _read_entries(path, "filelists, one a line")
        for item in _parse_list_line(text, path, number, known)
    ]
    is_weighted = any(item.weight is not None for _, _, item in lines)
    for number, text, item in lines:
        if is_weighted and item.weight is None:
            raise FilelistError(
                f"{path} line {number}: {text!r} has no weight, while other lines have one; weigh every line or none"
            )
        if not (in_store(item.path) or item.path.is_file()):
            raise FilelistError(
                f"{path} line {number}: no such filelist {item.path}; correct the path (relative ones are taken from "
                f"{path.parent.resolve()}, then from {Path.cwd()})"
            )
    if is_weighted and not any(item.weight for _, _, item in lines):
        raise FilelistError(f"{path}: all weights are 0; give at least one line a positive weight")
    return [item for _, _, item in lines]


def write_filelist(path, names: Iterable) -> None:
    """Write one name a line, atomically. Raises FilelistError where there are none."""
    lines = [f"{name}\n" for name in names]
    if not lines:
        raise FilelistError(f"no part files to write to {path}; a filelist needs at least one")
    write_text(path, "".join(lines), names=True)


def list_parts(folder) -> list[str]:
    """The absolute paths of the files `part-*` in a folder, sorted, indexes left out. Raises FilelistError."""
    if not Path(folder).is_dir():
        raise FilelistError(f"no such folder {folder}; {meant_path(folder, 'name the one that holds the part files')}")
    paths = (os.path.abspath(path) for path in Path(folder).glob("part-*") if path.is_file())
    parts = sorted(path for path in paths if not path.endswith(BESIDE_PARTS))
    if not parts:
        raise FilelistError(f"no part files (part-*) in {folder}; name the folder that holds them")
    return parts


def _read_entries(path: Path, due: str) -> list[tuple[int, str]]:
    """(line number, text) of every line that says something."""
    try:
        if in_store(path):
            bring(path)
        text = read_given_text(path, "surrogateescape", 1 << 30)  # names of files are bytes
    except FileNotFoundError as error:
        raise FilelistError(f"no filelist {path}; {meant_path(path, f'give a text file that names {due}')}") from error
    except IsADirectoryError as error:
        raise FilelistError(f"{path} is a folder; name a text file in it that names {due}") from error
    except OSError as error:
        raise FilelistError(f"cannot read {path}: {error.strerror}; check its permissions") from error
    if "\0" in text or text.startswith(("\udcff\udcfe", "\udcfe\udcff")):  # the byte order marks of UTF-16
        raise FilelistError(f"{path} is not UTF-8 text; it should name {due}")
    numbered = ((number, line.strip()) for number, line in enumerate(text.split("\n"), start=1))
    entries = [(number, line) for number, line in numbered if line and not line.startswith("#")]
    if not entries:
        raise FilelistError(f"{path} is empty; it should name {due}")
    return entries


def _read_parts(path: Path) -> list[tuple[int, Path]]:
    """(line number, part) of all that a filelist names, or that a folder holds. Raises FilelistError."""
    if not in_store(path) and path.is_dir():
        return [*enumerate(parts_of_folder(path)[1], start=1)]
    entries = [(number, one) for number, text in _read_entries(path, _PARTS) for one in _unfold(text, path, number)]
    urls = [url for _, text in entries if (url := _address(text, path)) and "*" not in url]
    if urls:
        from ..utils.store.client import survey

        survey(urls)
    return [(number, part) for number, text in entries for part in _expand(text, path, number)]


def _unfold(text: str, named_in: Path, number: int) -> list[str]:
    """A line, or those that its braces stand for where nothing is named as it is written. Raises FilelistError."""
    where = f"{named_in} line {number}"
    if text.startswith("pipe:"):
        raise FilelistError(f"{where}: {text} is a command, and none is run here; name the file or address it copies")
    meant = os.path.expandvars(os.path.expanduser(text)) if "{" in text else text
    if not _BRACES.search(meant) or (named_in.parent / meant).exists() or Path(meant).exists():
        return [text]
    try:
        return expand_braces(meant)
    except ValueError as error:
        raise FilelistError(f"{where}: {text} {error}; name them in several lines") from error


def expand_braces(text: str) -> list[str]:
    """What a pattern such as a/{000..012}.tar or {a,b}.tar stands for, in order. Raises ValueError for too much."""
    if not (found := _BRACES.search(text)):
        return [text]
    first, last, words = found.groups()
    start, stop = int(first or 0), int(last or 0)
    middle = words.split(",") if words else range(start, stop + 1) or range(start, stop - 1, -1)
    rest = expand_braces(text[found.end() :])
    if len(middle) * len(rest) > _MOST_PARTS:
        raise ValueError(f"stands for more than {_MOST_PARTS:,} files")
    width = len(first or "")
    return [f"{text[: found.start()]}{one:0>{width}}{tail}" for one in middle for tail in rest]


def _address(text: str, named_in: Path) -> str | None:
    """The address that a line names; None for a path of this machine."""
    text = os.path.expandvars(os.path.expanduser(text))
    if is_address(text):
        return check_address(text)
    if in_store(named_in) and not os.path.isabs(text):
        return f"{address_of(named_in).rpartition('/')[0]}/{os.path.normpath(text)}"
    return None


def _expand(text: str, named_in: Path, number: int) -> list[Path]:
    """The path that a line names, or those that its pattern stands for. Raises FilelistError where there are none."""
    where = f"{named_in} line {number}"
    if url := _address(text, named_in):
        from ..utils.store import client

        try:
            urls = client.expand(url) if "*" in url else [url]
            places = [place_of(one) for one in urls if not one.endswith(BESIDE_PARTS)]
        except StoreError as error:
            raise FilelistError(f"{where}: {error}") from error
        if not places:
            raise FilelistError(f"{where}: nothing is named {url}; correct or delete the line")
        return places
    path = Path(os.path.expandvars(os.path.expanduser(text)))
    beside = named_in.parent / path
    if beside.exists() or not glob.has_magic(str(path)):
        return [path if not beside.exists() and path.exists() else beside]
    # An absolute path stays what it is.
    for pattern in (os.path.join(glob.escape(str(named_in.parent)), path), str(path)):
        found = sorted(name for name in glob.glob(pattern, recursive=True) if not name.endswith(BESIDE_PARTS))
        if found:
            return [Path(name) for name in found]
    raise FilelistError(f"{where}: nothing is named {beside}; correct or delete the line")


def _parse_list_line(text: str, path: Path, number: int, known: dict[str, str]) -> list[Source]:
    """Options, then the weight, are taken from the right; what remains is the path, spaces and all."""
    words, options, weight = text.split(), {}, None
    while len(words) > 1 and (option := _OPTION.fullmatch(words[-1])):
        options[option["key"]] = option["value"]
        text = text[: -len(words.pop())].rstrip()
    with suppress(ValueError):
        weight = float(words[-1]) if len(words) > 1 else None
    if weight is not None:
        text = text[: -len(words[-1])].rstrip()
        if not (math.isfinite(weight) and weight >= 0):
            raise FilelistError(f"{path} line {number}: the weight {words[-1]} is not a number of 0 or more")
    settings = known | _check_options(options, path, number)
    settings["layout"] = _layout_of(settings.get("format", "part"), settings.get("layout", DEFAULT_LAYOUT))
    return [Source(item, weight=weight, **settings) for item in _expand(text, path, number)]


def _check_options(options: dict[str, str], path: Path, number: int) -> dict:
    where, checked = f"{path} line {number}", {}
    for key, value in options.items():
        if key in ("idx_to_prompt", "class_mapping"):
            (checked["idx_to_prompt"],) = _expand(glob.escape(value), path, number)
            if in_store(checked["idx_to_prompt"]):
                bring(checked["idx_to_prompt"])
        elif key not in _CHOICES:
            raise FilelistError(f"{where}: unknown option {key!r}; known: {', '.join((*_CHOICES, 'idx_to_prompt'))}")
        elif value not in _CHOICES[key]:
            raise FilelistError(f"{where}: unknown {key} {value!r}; known: {', '.join(_CHOICES[key])}")
        else:
            checked[key] = value
    format = checked.get("format", "part")
    for key, needed in (("layout", "part"), ("idx_to_prompt", "webdataset")):
        if key in checked and format != needed and checked[key] != CONTROL_LAYOUT:
            raise FilelistError(f"{where}: {key} has a meaning only with format={needed}, not with format={format}")
    return checked


def _checked_parts(item: Source, named_by: dict[str, str], must_exist: bool):
    """The parts of a filelist; `named_by` remembers over several filelists who named which part."""
    filelist, named = item.path, _read_parts(item.path)
    what, look = "file", lambda path: in_store(path) or path.is_file()
    if item.format == "folder":
        what, look = "folder", Path.is_dir
    there = [True] * len(named)
    if must_exist and item.latents != "cached":
        there = map_in_threads(look, [part for _, part in named], "looking for parts")
    for (number, part), is_there in zip(named, there, strict=True):
        where = f"{filelist} line {number}"
        if not is_there:
            raise FilelistError(
                f"{where}: no such part {what} {part}; correct or delete the line (relative paths are taken from "
                f"{filelist.parent.resolve()}, then from {Path.cwd()})"
            )
        if in_store(part) and not FORMATS[item.format].in_store:
            names = ", ".join(name for name, kind in FORMATS.items() if kind.in_store)
            raise FilelistError(
                f"{where}: rows of format={item.format} are in several files, which are not read from a store; mount "
                f"it, or make parts of them with ppldm convert (a store may have format={names})"
            )
        first = named_by.setdefault(os.path.abspath(part), where)
        if first != where:
            raise FilelistError(f"{where}: {part} is named a second time, first in {first}; delete one of the lines")
        yield part


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
        own = zip(source.parts, known, strict=False)
        parts = tuple(PartPrint(path.name, num_rows, *content) for path, (num_rows, content) in own)
        lists.append(ListPrint(str(source.path), read_options(source), parts))
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

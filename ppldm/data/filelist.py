"""Filelists name part files, one a line; filelist lists name filelists, `path [weight] [key=value …]` a line.

Blank lines and lines that start with # are skipped. `~` and environment variables are expanded, then `*`, `?`, `[...]`
and `**` to the names that are there, sorted, without indexes; a path that is there as it is written is taken so. A
relative path is taken from the folder of the file that names it, or else, where nothing is there, from the working
directory.

A filelist may be at the address of a store, and any may name such addresses (`utils.store`); relative ones are taken
beside the file that names them, at its address. What is named so has a path like other parts, and comes to this machine
when it is opened.

In `format=folder` a line names a folder with all that are below it and hold pictures, but for those that have lines of
their own.

Weights count only where every line has one; a list in which some have is an error. Of a pattern, each filelist has the
weight and the options of the line. Known options: `layout=NAME`, the column order of part files, or `control` of any
format (`formats.layouts`); lists without it have the one that the caller says. `format=`, one of FORMATS. `latents=`,
one of LATENTS, whether rows are trained on as cached latents; lists without it as the caller says. `idx_to_prompt=`
(or `class_mapping=`), for WebDataset shards of classes: a JSON file {class number: caption}.

Which of the two a file is: a file whose name ends in `.list` is a filelist list, and so is one all of whose lines
name `.filelist` files. Every other file is a filelist. A folder in their place stands for the one filelist list in it,
or in its folder `data`, or else for what it holds (`parts_of_folder`).
"""

import glob
import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from ..config.data import LATENTS
from ..utils.errors import FilelistError, StoreError
from ..utils.files import read_given_text, write_text
from ..utils.processes.workers import map_in_threads
from ..utils.store import client
from ..utils.store.cache import address_of, bring, in_store, place_of
from .formats.folder_names import entries_of, picture_folders
from .formats.layouts import CONTROL_LAYOUT, DEFAULT_LAYOUT, FORMATS, LAYOUTS, get_layout

_CHOICES = {"layout": LAYOUTS, "format": FORMATS, "latents": LATENTS}
# The ends of the names of files that describe a part, and are none.
BESIDE_PARTS = (".idx", ".columns", ".latents", ".embeddings")
_PARTS = "part files, one a line"
_OPTION = re.compile(r"(?P<key>[a-z_]+)=(?P<value>\S*)")


@dataclass(frozen=True)
class WeightedFilelist:
    """One line of a filelist list. `weight` is None throughout a list without weights."""

    path: Path
    weight: float | None = None
    layout: str = DEFAULT_LAYOUT
    format: str = "part"
    idx_to_prompt: Path | None = None
    latents: str = "off"
    latents_dir: Path | None = None


@dataclass(frozen=True)
class Source:
    """A filelist with what it names: the existing part files, in the order of its lines. Of cached latents the parts
    need not exist. latents_dir: where latents lie; None: beside their part."""

    path: Path
    parts: tuple[Path, ...]
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
    path,
    layout: str = DEFAULT_LAYOUT,
    must_exist: bool = True,
    latents: str = "off",
    latents_dir: Path | None = None,
) -> list[Source]:
    """What `--file_list` names: a filelist list, one filelist, or a folder (see the rules above).

    `layout`, `latents`: of lists that say none.

    Raises FilelistError for a file that is missing, empty or malformed, a part that is named twice, or missing and
    `must_exist`; ConfigError for an unknown `layout`.
    """
    path = place_of(path) if client.is_address(path) else Path(path)
    get_layout(layout)
    known = {"layout": layout, "latents": latents}
    if not in_store(path) and path.is_dir():
        path = list_of_folder(path) or path
    if not in_store(path) and path.is_dir():
        format = parts_of_folder(path)[0]
        layout = layout if format == "part" or layout == CONTROL_LAYOUT else DEFAULT_LAYOUT
        lists = [WeightedFilelist(path, **known | {"layout": layout, "format": format})]
    else:
        lists = read_filelist_list(path, **known) if _is_filelist_list(path) else [WeightedFilelist(path, **known)]
    lists, named_by = [replace(item, latents_dir=latents_dir) for item in lists], {}
    parts = [list(_checked_parts(item, named_by, must_exist)) for item in lists]
    named = frozenset(named_by)
    return [
        Source(parts=tuple(_below(own, named) if item.format == "folder" else own), **vars(item))
        for item, own in zip(lists, parts, strict=True)
    ]


def _below(folders: list[Path], named: frozenset[str]) -> list[Path]:
    """Folders, and those below them that hold pictures and have no line of their own. Raises FilelistError."""
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
    """The filelist list in a folder, or in its folder `data`, as commands that make data leave it; None where there is
    none. Raises FilelistError where there are several."""
    found = sorted(folder.glob("*.filelist.list")) or sorted(folder.glob("data/*.filelist.list"))
    if len(found) > 1:
        raise FilelistError(
            f"{folder} holds {len(found)} lists, {found[0].name} and {found[1].name} among them; name one"
        )
    return found[0] if found else None


def parts_of_folder(folder: Path) -> tuple[str, list[Path]]:
    """(format, parts) of a folder without a list: part files, tars, parquet files, shards of MDS, metadata.csv, or
    pictures with captions in files beside them, in another table or in their names, the first of these that it has.
    Raises FilelistError."""
    names = sorted(name for name, is_folder in entries_of(folder) if not is_folder and not name.endswith(BESIDE_PARTS))
    for format, kind in FORMATS.items():
        if found := [folder / name for name in names if kind.is_name(name)]:
            return format, found
    if folders := picture_folders(folder):
        from .text.survey import has_captions_beside, write_table

        return ("folder", [folder]) if has_captions_beside(folders) else ("csv", [write_table(folder)])
    raise FilelistError(f"{folder} holds neither parts nor pictures; name another folder, or a text file of parts")


def read_filelist(path) -> list[Path]:
    """The parts that a filelist names, resolved but not checked for being there. Raises FilelistError."""
    path = Path(path)
    return [part for _, part in _read_parts(path)]


def read_filelist_list(path, **known: str) -> list[WeightedFilelist]:
    """The filelists that a filelist list names, with weights and options; `known` of lines that do not say them. Raises
    FilelistError."""
    path = Path(path)
    lines = [
        (number, text, item)
        for number, text in _read_entries(path, "filelists, one a line")
        for item in _parse_list_line(text, path, number, known)
    ]
    entries, items = [line[:2] for line in lines], [item for _, _, item in lines]
    weighted = [item.weight is not None for item in items]
    if any(weighted) and not all(weighted):
        number, text = entries[weighted.index(False)]
        raise FilelistError(
            f"{path} line {number}: {text!r} has no weight, while other lines have one; weigh every line or none"
        )
    if all(weighted) and sum(item.weight for item in items) <= 0:
        raise FilelistError(f"{path}: all weights are 0; give at least one line a positive weight")
    for (number, _), item in zip(entries, items, strict=True):
        if not (in_store(item.path) or item.path.is_file()):
            raise FilelistError(
                f"{path} line {number}: no such filelist {item.path}; correct the path (relative ones are taken from "
                f"{path.parent.resolve()}, then from {Path.cwd()})"
            )
    return items


def write_filelist(path, names: Iterable) -> None:
    """Write one name a line, atomically. Raises FilelistError where there are none."""
    lines = [f"{name}\n" for name in names]
    if not lines:
        raise FilelistError(f"no part files to write to {path}; a filelist needs at least one")
    write_text(path, "".join(lines), names=True)


def list_parts(folder) -> list[str]:
    """The absolute paths of the files `part-*` in a folder, sorted, indexes left out. Raises FilelistError."""
    if not Path(folder).is_dir():
        raise FilelistError(f"no such folder {folder}; name the one that holds the part files")
    paths = (os.path.abspath(path) for path in Path(folder).glob("part-*") if path.is_file())
    parts = sorted(path for path in paths if not path.endswith(BESIDE_PARTS))
    if not parts:
        raise FilelistError(f"no part files (part-*) in {folder}; name the folder that holds them")
    return parts


def number_parts(pattern: str, num_parts: int) -> list[str]:
    """`pattern`, with a field such as `{:05}`, for the numbers from 0 to num_parts - 1. Raises FilelistError."""
    try:
        names = [pattern.format(number) for number in range(num_parts)]
    except (IndexError, KeyError, ValueError) as error:
        raise FilelistError(
            f"cannot number the parts by {pattern!r} ({error}); write it as in part-{{:05}}.gz"
        ) from error
    if len(set(names)) < num_parts:
        raise FilelistError(f"{pattern!r} gives all parts the same name; give it a number field, as in part-{{:05}}.gz")
    return names


def _is_filelist_list(path: Path) -> bool:
    if path.suffix == ".list":
        return True
    entries = _read_entries(path, _PARTS)
    return all(text.split()[0].endswith(".filelist") for _, text in entries)


def _read_entries(path: Path, due: str) -> list[tuple[int, str]]:
    """(line number, text) of every line that says something."""
    try:
        if in_store(path):
            bring(path)
        text = read_given_text(path, "surrogateescape", 1 << 30)  # names of files are bytes
    except FileNotFoundError as error:
        raise FilelistError(f"no such filelist {path}; give a text file that names {due}") from error
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
    entries = _read_entries(path, _PARTS)
    urls = [url for _, text in entries if (url := _address(text, path)) and "*" not in url]
    client.survey(urls)
    return [(number, part) for number, text in entries for part in _expand(text, path, number)]


def _address(text: str, named_in: Path) -> str | None:
    """The address that a line names; None for a path of this machine."""
    text = os.path.expandvars(os.path.expanduser(text))
    if client.is_address(text):
        return client.check_address(text)
    if in_store(named_in) and not os.path.isabs(text):
        return f"{address_of(named_in).rpartition('/')[0]}/{os.path.normpath(text)}"
    return None


def _expand_address(url: str, where: str) -> list[Path]:
    try:
        urls = client.expand(url) if "*" in url else [url]
        places = [place_of(one) for one in urls if not one.endswith(BESIDE_PARTS)]
    except StoreError as error:
        raise FilelistError(f"{where}: {error}") from error
    if not places:
        raise FilelistError(f"{where}: nothing is named {url}; correct or delete the line")
    return places


def _expand(text: str, named_in: Path, number: int) -> list[Path]:
    """The path that a line names, or those that its pattern stands for. Raises FilelistError where there are none."""
    if url := _address(text, named_in):
        return _expand_address(url, f"{named_in} line {number}")
    path = Path(os.path.expandvars(os.path.expanduser(text)))
    beside = named_in.parent / path
    if beside.exists() or not glob.has_magic(str(path)):
        return [path if not beside.exists() and path.exists() else beside]
    # An absolute path stays what it is.
    for pattern in (os.path.join(glob.escape(str(named_in.parent)), path), str(path)):
        found = sorted(name for name in glob.glob(pattern, recursive=True) if not name.endswith(BESIDE_PARTS))
        if found:
            return [Path(name) for name in found]
    raise FilelistError(f"{named_in} line {number}: nothing is named {beside}; correct or delete the line")


def _parse_list_line(text: str, path: Path, number: int, known: dict[str, str]) -> list[WeightedFilelist]:
    """Options, then the weight, are taken from the right; what remains is the path, spaces and all."""
    options = {}
    while (word := _last_word(text)) and (option := _OPTION.fullmatch(word)):
        options[option["key"]] = option["value"]
        text = text[: -len(word)].rstrip()
    weight = None
    if (word := _last_word(text)) and _is_number(word):
        weight = float(word)
        text = text[: -len(word)].rstrip()
        if not (math.isfinite(weight) and weight >= 0):
            raise FilelistError(f"{path} line {number}: the weight {word} is not a number of 0 or more")
    settings = known | _check_options(options, path, number)
    if settings.get("format", "part") != "part" and settings.get("layout") != CONTROL_LAYOUT:
        settings["layout"] = DEFAULT_LAYOUT  # the caller's is an order of columns, which only parts have
    return [WeightedFilelist(item, weight, **settings) for item in _expand(text, path, number)]


def _is_file(path: Path) -> bool:
    return in_store(path) or path.is_file()


def _last_word(text: str) -> str | None:
    """The last of several words; None where there is but one, which is the path."""
    words = text.split()
    return words[-1] if len(words) > 1 else None


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


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


def _checked_parts(item: WeightedFilelist, named_by: dict[str, str], must_exist: bool):
    """The parts of a filelist; `named_by` remembers over several filelists who named which part."""
    filelist = item.path
    what, look = ("folder", Path.is_dir) if item.format == "folder" else ("file", _is_file)
    must_exist &= item.latents != "cached"
    named = _read_parts(filelist)
    there = (
        map_in_threads(look, [part for _, part in named], "looking for parts") if must_exist else [True] * len(named)
    )
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

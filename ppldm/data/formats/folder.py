"""`format=folder`: a folder of pictures with captions, `0000.jpg` + `0000.txt` (+ `0000.json`), one base name a row;
img2dataset calls it `files`. Each folder that holds pictures is a part.

The list of names is kept in the cache folder, one for each time of change of the folder, with an index; contents are
read from the folder. A million names take some 20 MB, as bytes.
"""

import json
import os
import time
from array import array
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import groupby
from pathlib import Path
from unicodedata import normalize

from ...utils.errors import OutputError, PartError, RowError
from ...utils.files import atomic_write, make_output_dir
from ...utils.log import get_logger
from .base import IndexedRows, gone, indexing, read_file, read_image_size, store_rows
from .index import FILE_NAMES, Index, IndexSpec, stat_part
from .row import Row
from .sample_files import (
    CAPTION_SUFFIXES,
    CONTROL_SUFFIXES,
    IMAGE_SUFFIXES,
    PICTURE_SUFFIXES,
    SUFFIXES,
    assemble_row,
    image_places,
)

# A folder that changed so short a time ago may change again within one tick of its time of change.
_SETTLED_SECONDS = 2.0


def split_name(name: str, has_control: bool = False) -> tuple[str, str]:
    """(base name, suffix in lower case without its dot) of a file's name; the suffix begins at the last dot. With
    `has_control` a second image has the base name of the first: 0000.control.png that of 0000.jpg."""
    dot = name.rfind(".")
    if has_control and (before := name.rfind(".", 0, dot)) > 0 and name[before + 1 :].lower() in CONTROL_SUFFIXES:
        dot = before
    base, suffix = (name[:dot], name[dot + 1 :].lower()) if 0 < dot < len(name) - 1 else (name, "")
    return normalize("NFC", base), suffix  # some systems write accents as letters of their own


def entries_of(folder: Path) -> Iterator[tuple[str, bool]]:
    """(name, whether a folder) of what a folder holds; neither hidden ones nor links to folders. Raises OSError."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name[0] == ".":
                continue
            if (is_folder := entry.is_dir()) and entry.is_symlink():
                get_logger().warning("%s is a link to a folder and is not followed; name it by itself", entry.path)
            else:
                yield entry.name, is_folder


def picture_folders(root: Path, besides: Collection[str] = ()) -> list[Path]:
    """A folder and those below it that hold pictures; not what is below `besides`, absolute paths. Raises OSError."""
    found, waiting = [], [root]
    while waiting:
        folder, inner, has_pictures = waiting.pop(), [], False
        for name, is_folder in entries_of(folder):
            if is_folder:
                inner.append(name)
            else:
                has_pictures |= split_name(name)[1] in PICTURE_SUFFIXES
        found += [folder] if has_pictures else []
        below = [folder / name for name in sorted(inner, reverse=True)]
        waiting += [one for one in below if os.path.abspath(one) not in besides]
    return found


def list_pictures(root: Path, suffixes: tuple[str, ...] = IMAGE_SUFFIXES) -> list[Path]:
    """The files with some suffixes in a folder of pictures and below it, sorted. Raises OSError."""
    folders = picture_folders(root)
    files = (folder / name for folder in folders for name, is_folder in entries_of(folder) if not is_folder)
    return sorted(path for path in files if split_name(path.name)[1] in suffixes)


def find_caption(picture: Path) -> Path | None:
    """The text file beside a picture, whichever way its name writes accents; None where none is there."""
    names = dict.fromkeys([picture.stem, *(normalize(form, picture.stem) for form in ("NFC", "NFD"))])
    texts = (picture.with_name(f"{name}.{suffix}") for suffix in CAPTION_SUFFIXES for name in names)
    return next((text for text in texts if text.is_file()), None)


class FolderNames:
    """The samples of a folder, sorted by base name: each the sorted names of its files of `SUFFIXES`, not hidden. A
    `.json` by itself is not a sample. `has_images`: whether any name is that of an image. Raises OSError."""

    def __init__(self, folder: Path, has_control: bool = False):
        split = partial(split_name, has_control=has_control)
        self.has_images = False
        self._names, self._starts = bytearray(), array("q")
        with os.scandir(folder) as entries:
            names = sorted(
                entry.name
                for entry in entries
                if entry.name[0] != "." and split_name(entry.name)[1] in SUFFIXES and not entry.is_dir()
            )
        names.sort(key=lambda name: split(name)[0])
        for _, group in groupby(names, key=lambda name: split(name)[0]):
            own = [*group]
            kinds = {split(name)[1] for name in own}
            self.has_images |= not kinds.isdisjoint(PICTURE_SUFFIXES)
            if kinds != {"json"}:
                self._starts.append(len(self._names))
                self._names += os.fsencode("\0".join(own))
        self._starts.append(len(self._names))

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, number: int) -> list[str]:
        if not 0 <= number < len(self):
            raise IndexError(f"there are {len(self)} samples, no number {number}")
        return os.fsdecode(bytes(self._names[self._starts[number] : self._starts[number + 1]])).split("\0")


class ImageFolder(IndexedRows):
    """The rows of a folder in the order of their base names."""

    spec = IndexSpec((FILE_NAMES,), copy_suffix=".files")

    def _build(self) -> tuple[Path, Index]:
        listing = self.spec.copy_path(self.path, stat_part(self.path, self.spec))
        samples, table, offset = list_samples(self.path, self._has_control), [], 0
        make_output_dir(listing.parent)
        with indexing(self.path, len(samples), "row") as bar, _writing(listing) as file:
            for names in samples:
                images = image_places([split_name(name, self._has_control)[1] for name in names])
                size = read_image_size(self.path / names[images[0]]) if len(images) == 1 else (0, 0)
                line = json.dumps(names) + "\n"
                file.write(line)
                table.append((offset, len(line), *size))
                offset += len(line)
                bar.update()
        return store_rows(listing, self.spec, table)

    def _decode(self, data: bytes, where: str) -> Row:
        try:
            return read_sample(self.path, json.loads(data), where, self._has_control)
        except RowError as error:
            if self.path.is_dir():
                raise
            raise gone(self.path) from error


def read_sample(folder: Path, names: list[str], where: str, has_control: bool = False) -> Row:
    """The row of a sample's files. Raises RowError "unreadable", and as `assemble_row`."""
    files = [(split_name(name, has_control)[1], read_file(folder, name, where)) for name in names]
    return assemble_row(split_name(names[0], has_control)[0], files, where, has_control=has_control)


@contextmanager
def _writing(listing: Path):
    try:
        with atomic_write(listing, "w", encoding="utf-8") as file:
            yield file
    except OSError as error:
        raise OutputError(f"cannot write {listing}: {error.strerror}; free some space") from error


def list_samples(folder: Path, has_control: bool = False) -> FolderNames:
    """The names of each sample, from memory while the folder does not change. Raises PartError without images."""
    try:
        changed = os.stat(folder).st_mtime_ns
        is_settled = time.time() - changed / 1e9 >= _SETTLED_SECONDS
        names = Path(os.path.abspath(folder)), has_control
        samples = _list_once(*names, changed) if is_settled else FolderNames(*names)
    except OSError as error:
        raise PartError(f"cannot read the folder {folder} ({error.strerror}); correct the filelist") from error
    if not samples.has_images:
        raise PartError(
            f"no images ({', '.join(IMAGE_SUFFIXES)}) in the folder {folder} or below it; correct the filelist"
        )
    return samples


@lru_cache(maxsize=2)
def _list_once(folder: Path, has_control: bool, changed: int) -> FolderNames:
    return FolderNames(folder, has_control)

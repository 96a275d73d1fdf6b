"""Where rows come from: each kind of source is a generator of `SourceRow`, sorted by key, that reads no image yet.

The converter takes any iterable of rows with `key`, `stamp()` and `load()`. A row can be pickled: a worker process
loads it. Every row that a source knows of comes out of its generator, the incomplete ones too: `load` says by a named
`RowError` why a row cannot be used, so that the converter can count it.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..data.row import Row
from ..data.sample import decode_caption, decode_meta
from ..utils.errors import ConfigError, DataError, RowError

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")


@dataclass(frozen=True)
class SourceRow:
    """One base name of a folder and the files that share it. `None`, or no image at all: there is no such file."""

    key: str
    images: tuple[Path, ...]
    caption: Path | None
    meta: Path | None

    def stamp(self) -> list:
        """What tells this state of the row from any other, without reading it: name, size, time of each file."""
        return [self.key, *map(_file_stamp, (*self.images, *filter(None, (self.caption, self.meta))))]

    def load(self) -> Row:
        """The row as the files say it, runs of white space in the caption as one space; the image is not looked into.

        Raises RowError "no_image", "two_images", "no_caption", "empty_caption", "encoding", "metadata", "unreadable".
        """
        if not self.images:
            raise RowError("no_image", f"{self.caption.name} has no image of its base name beside it")
        if len(self.images) > 1:
            raise RowError("two_images", f"{' and '.join(path.name for path in self.images)} share one base name")
        if self.caption is None:
            raise RowError("no_caption", f"{self.images[0].name} has no .txt of its base name beside it")
        caption = decode_caption(_read_bytes(self.caption), self.caption.name)
        return Row(
            caption,
            _read_bytes(self.images[0]),
            decode_meta(_read_bytes(self.meta), self.meta.name) if self.meta else {},
        )


def read_folder(folder) -> Iterator[SourceRow]:
    """The rows of a plain folder: `0000.jpg` + `0000.txt` (+ `0000.json`), files of one base name being one row.

    The base name is all before the last dot, suffixes are known in either case. Hidden files, subfolders and other
    suffixes are no part of the format; a `.json` alone is no row.

    Raises ConfigError for a folder that is missing, DataError for one without images.
    """
    folder = Path(folder)
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if entry.is_file() and not entry.name.startswith("."))
    except OSError as error:
        raise ConfigError(
            f"cannot read the folder {folder} ({error.strerror}); name one that holds 0000.jpg + 0000.txt, ..."
        ) from error
    images, captions, metas = defaultdict(list), {}, {}
    for path in map(folder.joinpath, names):
        suffix = path.suffix.lower()
        if suffix in IMAGE_SUFFIXES:
            images[path.stem].append(path)
        elif suffix == ".txt":
            captions[path.stem] = path
        elif suffix == ".json":
            metas[path.stem] = path
    if not images:
        raise DataError(
            f"no images in {folder}; it should hold {', '.join(IMAGE_SUFFIXES)} files, each with a caption in a .txt "
            "of the same base name (subfolders are not searched)"
        )
    for key in sorted(images.keys() | captions.keys()):
        yield SourceRow(key, tuple(images.get(key, ())), captions.get(key), metas.get(key))


def _file_stamp(path: Path) -> list:
    try:
        state = path.stat()
    except FileNotFoundError:
        return [path.name]
    return [path.name, state.st_size, state.st_mtime_ns]


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RowError("unreadable", f"{path.name}: {error.strerror}") from error

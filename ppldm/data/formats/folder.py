"""`format=folder`: a folder of pictures with captions, one base name a row; img2dataset calls it `files`. Each folder
that holds pictures is a part. WebDataset tars hold the same files:

0000.jpg (or .jpeg .png .webp)    the picture; where none of these is there .jfif .gif .bmp .tif .tiff .avif
0000.txt (or .caption)            the caption; runs of white space count as one space
0000.cls                          or else the number of a class, of which a table tells the caption
0000.json                         metadata, an object; may be missing; or else the caption is there, as CAPTION_KEYS say
0000.control.png (or .jpg …)      the second image, in `layout=control`, where every sample must have one

The list of names is kept in the cache folder, one for each time of change of the folder, with an index; contents are
read from the folder. A million names take some 20 MB, as bytes.
"""

import json
import math
import os
import time
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import groupby
from pathlib import Path
from unicodedata import normalize

from ...utils.errors import PartError, RowError
from ...utils.files import atomic_write, make_output_dir
from ...utils.log import get_logger
from .base import IndexedRows, gone, indexing, read_file, read_image_size, store_rows, writing
from .index import FILE_NAMES, Index, IndexSpec, stat_part
from .row import Row, decode_text, find_name

_USUAL, _OTHERS = ("jpg", "jpeg", "png", "webp"), ("jfif", "gif", "bmp", "tif", "tiff", "avif")
IMAGE_SUFFIXES = (*_USUAL, *_OTHERS)
# Of pictures that Pillow does not read, or not without more packages.
UNREAD_SUFFIXES = ("heic", "heif", "jxl", "jp2", "psd", "svg", "dng", "cr2", "cr3", "nef", "arw")
PICTURE_SUFFIXES = (*IMAGE_SUFFIXES, *UNREAD_SUFFIXES)
CONTROL_SUFFIXES = tuple(f"control.{suffix}" for suffix in IMAGE_SUFFIXES)
CAPTION_SUFFIXES = ("txt", "caption")
CAPTION_KEYS = ("text", "caption", "txt", "TEXT", "prompt")
SUFFIXES = (*PICTURE_SUFFIXES, *CAPTION_SUFFIXES, "json", "cls")
# In layout=control.
ALL_SUFFIXES = (*SUFFIXES, *CONTROL_SUFFIXES)
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
        with (
            indexing(self.path, len(samples), "row") as bar,
            writing(listing, "free some space or set PPLDM_CACHE_DIR"),
            atomic_write(listing, "w", encoding="utf-8") as file,
        ):
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


_list_once = lru_cache(maxsize=2)(lambda folder, has_control, changed: FolderNames(folder, has_control))


def assemble_row(
    key: str,
    files: Sequence[tuple[str, bytes]],
    where: str,
    prompts: Mapping[str, str] | None = None,
    has_control: bool = False,
) -> Row:
    """The row of base name `key`, `files` being (suffix, content). With `prompts`, the class tells the caption. Raises
    RowError "no_image", "format", "two_images", "no_control" where `has_control` asks for a second image, "no_caption",
    "empty_caption", "class", "encoding", "metadata"."""
    image = _find_image(files, IMAGE_SUFFIXES, "no_image", f"{where}: {key!r}")
    control = _find_image(files, CONTROL_SUFFIXES, "no_control", f"{where}: {key!r}") if has_control else b""
    contents = dict(files)
    meta = decode_meta(contents["json"], f"{where}: {key!r}.json") if "json" in contents else {}
    named = next((suffix for suffix in CAPTION_SUFFIXES if suffix in contents), "")
    if prompts is not None and "cls" in contents:
        number = contents["cls"].decode("ascii", "replace").strip()
        if number not in prompts:
            named = f"{where}: {key!r} is of class {number[:20]!r}"
            raise RowError("class", f"{named}, which the table of idx_to_prompt does not have")
        caption = prompts[number]
    elif named:
        caption = decode_caption(contents[named], f"{where}: {key!r}.{named}")
    elif text := find_name({name for name, value in meta.items() if isinstance(value, str)}, CAPTION_KEYS):
        if not (caption := " ".join(meta.pop(text).split())):
            raise RowError("empty_caption", f"{where}: {key!r}.json has an empty {text!r}")
    else:
        hint = " but a class: name its table by the filelist's option idx_to_prompt=" if "cls" in contents else ""
        hint = "; if it is the second image of another, say layout=control" if key.endswith(".control") else hint
        raise RowError("no_caption", f"{where}: {key!r} has no .txt, nor a caption in a .json{hint}")
    return Row(caption, image, {"key": key, **meta}, control=control)


def decode_caption(data: bytes, where: str) -> str:
    """The caption of a text file, UTF-8 or else GB18030. Raises RowError "encoding", "empty_caption"."""
    caption = " ".join(decode_text(data, where, "utf-8-sig").split())
    if not caption:
        raise RowError("empty_caption", f"{where} has no text in it")
    return caption


def decode_meta(data: bytes, where: str) -> dict:
    """The object of a JSON file; NaN and infinities become null. Raises RowError "encoding", "metadata"."""
    try:
        meta = json.loads(
            decode_text(data, where, "utf-8-sig"),
            parse_constant=lambda _: None,
            parse_float=lambda text: number if math.isfinite(number := float(text)) else None,
        )
    except (ValueError, RecursionError) as error:
        raise RowError("metadata", f"{where} is not JSON ({error})") from error
    if not isinstance(meta, dict):
        raise RowError("metadata", f"{where} holds a JSON {type(meta).__name__}, not an object")
    return meta


def image_places(own: Sequence[str], known: tuple[str, ...] = IMAGE_SUFFIXES) -> list[int]:
    """Where among the suffixes of a sample those of its picture are: the usual ones, or where none is there others."""
    usual = [place for place, suffix in enumerate(own) if suffix in known[: len(_USUAL)]]
    return usual or [place for place, suffix in enumerate(own) if suffix in known]


def _find_image(files: Sequence[tuple[str, bytes]], suffixes: tuple[str, ...], missing: str, where: str) -> bytes:
    """The content of the one file with one of the suffixes. Raises RowError `missing`, "format", "two_images"."""
    images = [files[place] for place in image_places([suffix for suffix, _ in files], suffixes)]
    if not images:
        if unread := [suffix for suffix, _ in files if suffix in UNREAD_SUFFIXES and suffixes is IMAGE_SUFFIXES]:
            raise RowError("format", f"{where} is a .{unread[0]}, which is not read; convert it to JPEG or PNG")
        what = "second image" if suffixes is CONTROL_SUFFIXES else "image"
        raise RowError(missing, f"{where} has no {what} ({', '.join(suffixes)}) of its base name")
    if len(images) > 1:
        names = ", ".join(suffix for suffix, _ in images)
        raise RowError("two_images", f"{where} has {len(images)} images ({names})")
    return images[0][1]

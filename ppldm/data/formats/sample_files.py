"""Samples whose picture, caption and metadata are files of one base name, as folders and WebDataset tars hold them.

0000.jpg (or .jpeg .png .webp)    the picture; where none of these is there .jfif .gif .bmp .tif .tiff .avif
0000.txt (or .caption)            the caption; runs of white space count as one space
0000.cls                          or else the number of a class, of which a table tells the caption
0000.json                         metadata, an object; may be missing; or else the caption is there, as CAPTION_KEYS say
0000.control.png (or .jpg …)      the second image, in `layout=control`, where every sample must have one
"""

import json
import math
from collections.abc import Mapping, Sequence

from ...utils.errors import RowError
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

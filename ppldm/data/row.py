"""The row format, known to this file alone.

A row is one line of text: caption TAB metadata TAB base64 of an encoded image, and whatever further columns a foreign
writer added. The second column is ignored by every reader of the published format; ours is a compact JSON object, or
empty. Text is UTF-8, else GB18030, in which no byte of a character can be a tab or a newline.
"""

import base64
import binascii
import json
import re
from dataclasses import dataclass, field

import pybase64

from ..utils.errors import RowError

_LINE_BREAKERS = re.compile(r"[\t\r\n]+")


@dataclass(frozen=True)
class Row:
    """One caption and one encoded image (JPEG, PNG, WebP bytes), with what else is known of it."""

    caption: str
    image: bytes
    meta: dict = field(default_factory=dict)


def encode_row(row: Row) -> bytes:
    """The row as one line with its newline. Tabs and line breaks in the caption become single spaces.

    Raises RowError "meta" where the metadata has no JSON form (NaN has none).
    """
    caption = _LINE_BREAKERS.sub(" ", row.caption)
    try:
        meta = _dump(row.meta) if row.meta else ""
    except (TypeError, ValueError) as error:
        raise RowError("meta", f"metadata without a JSON form ({error}); leave the field out") from error
    # A lone surrogate, as broken JSON sources have, becomes "?".
    return f"{caption}\t{meta}\t".encode("utf-8", "replace") + pybase64.b64encode(row.image) + b"\n"


def decode_row(line: bytes, where: str) -> Row:
    """The row of one line, with or without its newline. `where` (file and row number) goes into the error.

    Raises RowError "columns", "encoding" or "base64".
    """
    columns = line.rstrip(b"\r\n").split(b"\t", 3)
    if len(columns) < 3:
        raise RowError(
            "columns", f"{where}: {len(columns)} tab-separated column(s) where caption, metadata and image are due"
        )
    caption, meta = _decode_text(columns[0] + b"\t" + columns[1], where).split("\t")
    return Row(caption, _decode_image_column(columns[2].strip(), where), _load_meta(meta))


def _dump(meta: dict) -> str:
    return json.dumps(meta, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _load_meta(text: str) -> dict:
    """Foreign writers put anything here ("NONE", a number, nothing): all that is no JSON object means "unknown"."""
    if not text.startswith("{"):
        return {}
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {}


def _decode_text(data: bytes, where: str) -> str:
    for encoding in ("utf-8", "gb18030"):
        try:
            return data.decode(encoding)
        except UnicodeDecodeError:
            continue
    raise RowError("encoding", f"{where}: the text is neither UTF-8 nor GB18030; write the part again in UTF-8")


def _decode_image_column(data: bytes, where: str) -> bytes:
    try:
        image = _decode_base64(data)
    except binascii.Error as error:
        raise RowError("base64", f"{where}: the third column is not base64 ({error})") from error
    if not image:
        raise RowError("base64", f"{where}: the third column, the image, is empty")
    return image


def _decode_base64(data: bytes) -> bytes:
    """As the standard library, which forgives one "=" too many, where pybase64 does not."""
    try:
        return pybase64.b64decode(data, validate=True)
    except binascii.Error:
        return base64.b64decode(data, validate=True)

"""Rows: what one is, what a file of them offers, and the row format, known only to this file.

In it a row is one line of text: caption TAB metadata TAB base64 of an encoded image; TAB base64 of a control image,
where there is one; and whatever further columns a foreign writer added. The metadata, which other readers ignore, are a
compact JSON object, or empty. Other published column orders are read by a `Layout`. Text is UTF-8, else GB18030, in
which no byte of a character can be a tab or a newline.
"""

import base64
import binascii
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np
import pybase64

from ...utils.errors import DataError, RowError
from .layouts import DEFAULT_LAYOUT, LAYOUTS, Layout

GUESSED_ENCODING = "gb18030"
BOM = b"\xef\xbb\xbf"
_LINE_BREAKERS = re.compile(r"[\t\r\n]+")
T = TypeVar("T")
EXAMPLES_PER_REASON = 3  # of bad rows, in accounts


@dataclass(frozen=True)
class Row:
    """One caption and one encoded image (empty where there are only latents of it), with what else is known of it.
    `other_captions`: further ones, not written. `control`: a second encoded image of the same shape, or empty."""

    caption: str
    image: bytes
    meta: dict = field(default_factory=dict)
    other_captions: tuple[str, ...] = ()
    control: bytes = b""


class Rows:
    """What reads rows needs no more than this, whatever format they have. `widths`, `heights`: uint16 [rows], pixels as
    shown, 0 where unknown. `identity`: another one for other rows; it begins with bytes and CRC-32 of the file with the
    rows. `has_images`: where not, rows have latents in their place. Closed by `close()` or with the last reference."""

    path: Path
    widths: np.ndarray
    heights: np.ndarray
    identity: tuple[int, ...]
    has_images: bool = True

    def __len__(self) -> int:
        raise NotImplementedError

    def read(self, row: int) -> Row:
        """Row `row` of [0, len). Raises RowError, naming file and row, where it is damaged."""
        raise NotImplementedError

    def read_fields(self, row: int) -> tuple[str, dict]:
        """(caption, metadata) of row `row`, without its image where the format allows. Raises RowError."""
        read = self.read(row)
        return read.caption, read.meta

    def count_blank_lines(self, start: int, stop: int) -> int:
        """Lines before the rows [start, stop), and after the last row where `stop` is len, that hold only white space:
        they are not rows and have no numbers. Only parts have any. Raises RowError where they cannot be read."""
        return 0

    def close(self) -> None:
        """Give the files back."""
        raise NotImplementedError

    def _where(self, row: int) -> str:
        """What errors call a row. Raises IndexError for a row that is not there."""
        if not 0 <= row < len(self):
            raise IndexError(f"{self.path} has rows 0 to {len(self) - 1}, no row {row}")
        return f"{self.path} row {row}"


def encode_row(row: Row) -> bytes:
    """The row as one line. Tabs and line breaks in the caption become spaces. Raises RowError "meta" if not JSON."""
    control = b"\t" + pybase64.b64encode(row.control) if row.control else b""
    return encode_text_columns(row.caption, row.meta) + pybase64.b64encode(row.image) + control + b"\n"


def encode_text_columns(caption: str, meta: dict) -> bytes:
    """The line up to its image. Raises as `encode_row`."""
    caption = _LINE_BREAKERS.sub(" ", caption)
    try:
        text = json.dumps(meta, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RowError("meta", f"metadata without a JSON form ({error}); omit the field") from error
    # A lone surrogate, as broken JSON sources have, becomes "?".
    return f"{caption}\t{text if meta else ''}\t".encode("utf-8", "replace")


def decode_row(line: bytes, where: str, layout: Layout = LAYOUTS[DEFAULT_LAYOUT]) -> Row:
    """The row of one line. `where` goes into errors. Raises RowError "columns", "encoding", "caption" or "base64"."""
    columns = line.rstrip(b"\r\n").split(b"\t", layout.num_columns)
    if len(columns) < layout.num_columns:
        raise RowError(
            "columns", f"{where}: {len(columns)} tab-separated column(s) where the layout has {layout.num_columns}"
        )
    (caption, *others), meta = _decode_texts(columns, where, layout)
    image, control = (
        b"" if place is None else decode_base64(columns[place].strip(), f"{where}: column {place + 1}, {what},")
        for place, what in ((layout.image, "the image"), (layout.control, "the control image"))
    )
    return Row(caption, image, meta, tuple(others), control)


def decode_text_columns(head: bytes, where: str, layout: Layout) -> tuple[str, dict] | None:
    """(caption, metadata) of the beginning of a line; None where it ends before they do. Raises RowError."""
    columns = head.split(b"\t", layout.last_text_column + 1)
    if len(columns) < layout.last_text_column + 2:
        return None
    captions, meta = _decode_texts(columns, where, layout)
    return captions[0], meta


def _decode_texts(columns: list[bytes], where: str, layout: Layout) -> tuple[list[str], dict]:
    """(one caption or more, metadata)."""
    places = [layout.caption, *([] if layout.meta is None else [layout.meta])]
    texts = decode_text(b"\t".join(columns[place] for place in places), where).split("\t")
    meta = {}
    # Foreign writers put anything here ("NONE", a number, nothing): all that is not a JSON object means "unknown".
    if layout.meta is not None and texts[-1].startswith("{"):
        with suppress(ValueError, RecursionError):
            meta = json.loads(texts[-1])
    caption = texts[0]
    if layout.caption_keys:
        caption = next((meta[key] for key in layout.caption_keys if isinstance(meta.get(key), str) and meta[key]), "")
        if not meta:
            raise RowError("caption", f"{where}: no JSON object with the caption ({', '.join(layout.caption_keys)})")
    if layout.removed:
        caption = caption.replace(layout.removed, "")
    if layout.separator:
        return [text for text in caption.split(layout.separator) if text] or [""], meta
    return [caption], meta


@dataclass
class OtherText:
    """What text is taken for that is not UTF-8, and what came of it: `rows` that had any, and one of them."""

    encoding: str = GUESSED_ENCODING
    rows: int = 0
    example: str = ""
    found: list[str] = field(default_factory=list)

    def end_row(self, where: str = "") -> None:
        """Count the row that was read last, if it had any."""
        if self.found:
            self.rows += 1
            self.example = self.example or f"{where}{': ' * bool(where)}{self.found[0].split(chr(9))[0][:80]!r}"
            self.found.clear()

    @property
    def report(self) -> dict:
        """As JSON has it; empty where all was UTF-8."""
        facts = {"rows": self.rows, "encoding": self.encoding, "example": self.example}
        return {"not_utf8": facts} if self.rows else {}


_OTHER: ContextVar[OtherText | None] = ContextVar("other_text", default=None)


@contextmanager
def noting_other_text(encoding: str = GUESSED_ENCODING) -> Iterator[OtherText]:
    """Within it, text that is not UTF-8 is read as `encoding` and noted; the caller ends rows."""
    token = _OTHER.set(noted := OtherText(encoding))
    try:
        yield noted
    finally:
        _OTHER.reset(token)


def merge_other_text(reports: Iterable[dict]) -> dict:
    """One report of several, of one encoding."""
    found = [one["not_utf8"] for one in reports if "not_utf8" in one]
    return {"not_utf8": found[0] | {"rows": sum(one["rows"] for one in found)}} if found else {}


def describe_other_text(report: dict, remedy: str = "write them again in UTF-8") -> list[str]:
    """Lines for people."""
    if not (told := report.get("not_utf8")):
        return []
    example = f", for example {told['example']}" if told["example"] else ""
    return [f"  not UTF-8, read as {told['encoding']}: {told['rows']}{example}; if that is wrong, {remedy}"]


def decode_text(data: bytes, where: str, utf8: str = "utf-8") -> str:
    """Text of UTF-8, else as `noting_other_text` says. utf8: "utf-8-sig" for files. Raises RowError "encoding"."""
    try:
        return data.decode(utf8)
    except UnicodeDecodeError:
        noted = _OTHER.get() or OtherText()
    try:
        text = data.decode(noted.encoding)
    except UnicodeError as error:
        raise RowError(
            "encoding", f"{where} is neither UTF-8 nor {noted.encoding.upper()} text; write it again in UTF-8"
        ) from error
    noted.found.append(text)
    return text


def find_name(names: Collection[str], known: tuple[str, ...]) -> str | None:
    """The first of the known names that is among others, or else is there in another case; None where none is."""
    if exact := next((name for name in known if name in names), None):
        return exact
    folded = {name.casefold(): name for name in sorted(names, reverse=True)}
    return next((folded[name.casefold()] for name in known if name.casefold() in folded), None)


def decode_base64(data: bytes, where: str) -> bytes:
    """The bytes of a picture. Raises RowError "base64"."""
    try:
        try:
            image = pybase64.b64decode(data, validate=True)
        except binascii.Error:
            image = base64.b64decode(data, validate=True)  # which forgives one "=" too many
    except binascii.Error as error:
        raise RowError("base64", f"{where} is not base64 ({error})") from error
    if not image:
        raise RowError("base64", f"{where} is empty")
    return image


@dataclass(frozen=True)
class BadRows:
    """`on_error`: "raise" stops at the first bad row; "count" tries at most `limit` candidates."""

    on_error: str = "count"
    limit: int = 100

    def load(self, load: Callable[[int], T], candidates: Iterable[int]) -> tuple[T, int, list[str]]:
        """(`load` of the first good candidate, that one, the reasons of the bad ones before). Raises DataError."""
        errors: list[RowError] = []
        for candidate in islice(candidates, self.limit):
            try:
                return load(candidate), candidate, [error.reason for error in errors]
            except RowError as error:
                if self.on_error == "raise":
                    raise DataError(f"bad row ({error.reason}): {error}") from error
                errors.append(error)
        examples = "; ".join(str(error) for error in errors[:EXAMPLES_PER_REASON])
        raise DataError(f"{len(errors)} bad rows in a row, so the data or a flag must be wrong; the first: {examples}")

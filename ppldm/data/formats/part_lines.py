"""The rows of a part file, found by reading it once: plain text, a gzip member a row, or ordinary gzip.

What a part is, its first bytes say, not its name. A blank line, of only white space, is not a row and has no number.
"""

import gzip
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from ...utils.errors import PartError, RowError
from ..images.decode import image_size
from .base import MAX_ROW_BYTES, ROWS_TO_TRY, is_gzip
from .layouts import DEFAULT_LAYOUT, LAYOUTS, Layout
from .row import BOM, Row, decode_row

_CHUNK_BYTES = 1 << 17

# (offset, length, line): where a row is in its file, and its text with the newline.
Line = tuple[int, int, bytes]


class PackedRows(Exception):
    """A gzip member is not exactly one line."""


def row_size(row: Row) -> tuple[int, int]:
    """(width, height) in pixels: what the metadata state, else the image's own; (0, 0) where that is none."""
    width, height = row.meta.get("width"), row.meta.get("height")
    if type(width) is int and type(height) is int and 0 < width < 1 << 32 and 0 < height < 1 << 32:
        return width, height
    return image_size(row.image)


def measure_lines(
    lines_of: Callable[..., Iterator[Line]], path: Path, layout: Layout, bar
) -> Iterator[tuple[Line, tuple[int, int]]]:
    """The rows of a file with their image sizes. bar: of progress, over the file's bytes.

    Raises PartError where none of the first rows can be read: then the file is something else.
    """
    rows, readable, first_error = 0, 0, None
    with open(path, "rb") as file:
        for line in lines_of(file, path):
            if len(line[2]) > MAX_ROW_BYTES:
                raise PartError(f"{path} row {rows} is over {MAX_ROW_BYTES} bytes long; {_not_a_part(path, layout)}")
            try:
                text = line[2] if rows else line[2].removeprefix(BOM)
                size = row_size(decode_row(text, f"{path} row {rows}", layout))
                readable += 1
            except RowError as error:
                size = 0, 0
                first_error = first_error or error
            rows += 1
            if rows == ROWS_TO_TRY and not readable:
                break
            yield line, size
            bar.update(file.tell() - bar.n)
    if not rows:
        raise PartError(f"part file {path} holds no rows; get it again or delete its line in the filelist")
    if not readable:
        raise PartError(f"{_not_a_part(path, layout)} (none of the first {rows} rows can be read: {first_error})")


def _not_a_part(path: Path, layout: Layout) -> str:
    what = "a part that is not gzip" if path.suffix == ".gz" and not is_gzip(path) else "not a part file"
    rows = "caption, metadata, image" if layout is LAYOUTS[DEFAULT_LAYOUT] else "the layout that was named"
    return (
        f"{path} is {what}, and its text is not rows of {rows}; correct the filelist, or say what it is in a list of "
        "filelists (layout=, format=)"
    )


def plain_lines(file, path: Path) -> Iterator[Line]:
    """The rows of plain text."""
    offset = 0
    while line := file.readline(MAX_ROW_BYTES + 1):
        if line.strip():
            yield offset, len(line), line
        offset += len(line)


def packed_lines(write: Callable[[bytes], None], file, path: Path) -> Iterator[Line]:
    """The rows of ordinary gzip, with offsets in its text, all of which goes to `write`. Raises PartError."""
    offset = 0
    for line in gzip_lines(file, path):
        write(line)
        if line.strip():
            yield offset, len(line), line if line.endswith(b"\n") else line + b"\n"
        offset += len(line)


def gzip_lines(file, path: Path) -> Iterator[bytes]:
    """The lines of a file of gzip, each with its newline; the last may have none. Raises PartError where the file is
    damaged, after the lines before."""
    try:
        with gzip.open(file) as text:
            while line := text.readline(MAX_ROW_BYTES + 1):
                yield line
    except EOFError as error:
        raise PartError(f"part file {path} is truncated; get it again") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise PartError(f"part file {path} is damaged ({error}); get it again") from error


def member_lines(file, path: Path) -> Iterator[Line]:
    """Lines that are a gzip member each. Raises PackedRows at the first member that is something else."""
    offset, data = 0, b""
    while data := data or file.read(_CHUNK_BYTES):
        if data.startswith(b"\0"):  # the padding that RFC 1952 readers skip
            kept = data.lstrip(b"\0")
            offset, data = offset + len(data) - len(kept), kept
            continue
        inflate, line, length = zlib.decompressobj(31), b"", 0
        while not inflate.eof:
            data = data or file.read(_CHUNK_BYTES)
            if not data:
                raise PartError(f"part file {path} is truncated, at byte {offset + length}; get it again")
            try:
                line += inflate.decompress(data)
            except zlib.error as error:
                raise PartError(f"part file {path} is damaged after byte {offset} ({error}); get it again") from error
            if -1 < line.find(b"\n") < len(line) - 1 or len(line) > MAX_ROW_BYTES:
                raise PackedRows
            length, data = length + len(data), inflate.unused_data
        length -= len(data)
        if not line.endswith(b"\n"):
            raise PackedRows
        if line.strip():
            yield offset, length, line
        offset += length

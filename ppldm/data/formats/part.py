"""Part files: rows that any reader of the published format reads in order, and we at random.

`write_part` makes each row a gzip member of its own. RFC 1952 lets members follow one another and every gzip reader
joins them, so the file is ordinary gzip; but one row costs one read. `Part` opens any part: plain text and a member a
row are read where they lie, ordinary gzip from a copy of its text (`formats.base`). Image sizes depend on which column
is the image, so each layout with another one than the default has an index of its own, `<part>.<layout>.idx`.
"""

import gzip
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
from isal import isal_zlib

from ...utils.checksums import measure_file
from ...utils.errors import PartError, RowError
from ...utils.files import atomic_write
from ..images import image_size
from . import base
from .index import COLUMNS, GZIP_MEMBERS, PACKED_LINES, PLAIN_LINES, Index, IndexSpec, make_index, write_index
from .layouts import DEFAULT_LAYOUT, LAYOUTS, Layout, get_layout, index_layout
from .row import BOM, Row, decode_row, decode_text_columns, encode_row

_MEMBER_HEADER = base.GZIP_MAGIC + b"\x08\x00\x00\x00\x00\x00\x00\xff"  # deflate, no name, no time, any system
_COPY = ".txt"
_POINTS = IndexSpec((), ".points")  # of earlier versions, with pieces of the text
_CHUNK_BYTES = 1 << 17

# (offset, length, line): where a row is in its file, and its text with the newline.
Line = tuple[int, int, bytes]


def write_part(path, rows: Iterable[Row]) -> Index:
    """Write rows as a part with index and columns; the same rows give the same bytes. Raises PartError, OutputError."""
    return write_lines(Path(path), ((encode_row(row), row_size(row)) for row in rows))


def index_path(part) -> Path:
    """Where the index of a part is, if its folder can be written."""
    return Part.spec.index_path(Path(part))


def described_by(part) -> list[Path]:
    """The files that describe a part beside it: index and columns."""
    return [spec.index_path(Path(part)) for spec in (Part.spec, COLUMNS)]


def drop_indexes(part) -> None:
    """Remove what describes a part under any layout, beside it and in the cache folder: it holds what stood in it."""
    base.drop_copies(Path(part))
    for spec in (_POINTS, *(spec.of_layout(name) for name in LAYOUTS for spec in (Part.spec, COLUMNS))):
        for path in (spec.index_path(Path(part)), spec.cached_index_path(Path(part))):
            path.unlink(missing_ok=True)


class Part(base.LineRows):
    """A part file. Raises ConfigError for an unknown layout. `identity`: (bytes, CRC-32) of the file."""

    spec = IndexSpec((GZIP_MEMBERS, PLAIN_LINES, PACKED_LINES))

    def __init__(self, path, layout: str = DEFAULT_LAYOUT):
        self._layout, self._indexed_layout = get_layout(layout), get_layout(index_layout(layout, "part"))
        super().__init__(path, index_layout(layout, "part"))
        self._copy_kind = _COPY if self._index.kind == PACKED_LINES else ""

    def _build(self) -> tuple[Path, Index]:
        content, kind = measure_file(self.path), GZIP_MEMBERS if base.is_gzip(self.path) else PLAIN_LINES
        with base.indexing(self.path, content[0], "B") as bar:
            try:
                table = self._tabulate(member_lines if kind == GZIP_MEMBERS else plain_lines, bar)
            except PackedRows:
                kind = PACKED_LINES
                with base.making_copy(self.path, content, _COPY) as write:
                    table = self._tabulate(partial(packed_lines, write), bar)
        return base.store_rows(self.path, self.spec, table, content, kind)

    def _tabulate(self, lines_of: Callable[..., Iterator[Line]], bar) -> list[tuple[int, int, int, int]]:
        lines = measure_lines(lines_of, self.path, self._indexed_layout, bar)
        return [(offset, length, *size) for (offset, length, _), size in lines]

    def _decode(self, data: bytes, where: str) -> Row:
        return decode_row(data, where, self._layout)

    def read_line(self, row: int) -> bytes:
        """The text of row `row`, all columns and the newline, be it a good row or not. Raises RowError "gzip"."""
        return self._read_bytes(row, self._where(row))

    def count_blank_lines(self, start: int, stop: int) -> int:
        offsets = self._index.offsets[start:stop].astype(np.int64)
        ends = offsets + self._index.lengths[start:stop]
        first = int(self._index.offsets[start - 1]) + int(self._index.lengths[start - 1]) if start else 0
        gaps = [*zip([first, *ends[:-1].tolist()], offsets.tolist(), strict=True)]
        if stop == len(self):
            end = os.fstat(self._copy.fileno()).st_size if self._copy_kind else self._index.part_bytes
            gaps.append((int(ends[-1]), end))
        return sum(self._read_gap(gap).count(b"\n") for gap in gaps if gap[0] < gap[1])

    def _read_gap(self, gap: tuple[int, int]) -> bytes:
        """The text between two rows, every line of it with a newline."""
        start, stop = gap
        where = f"{self.path}, between rows"
        text = self._read_stored(start, stop - start, where)
        if self._index.kind == GZIP_MEMBERS:
            data, text = text, b""
            try:
                while data := data.lstrip(b"\0"):  # zeros between members
                    inflate = zlib.decompressobj(31)
                    text += inflate.decompress(data)
                    data = inflate.unused_data
            except zlib.error as error:
                raise RowError("gzip", f"{where}: damaged gzip data ({error}); get the part again") from error
        return text if text.endswith(b"\n") or not text else text + b"\n"

    def _read_bytes(self, row: int, where: str, limit: int | None = None) -> bytes:
        """The line of a row; or the part of it that its first `limit` stored bytes hold, and no more than that many."""
        line = super()._read_bytes(row, where, limit)
        if self._index.kind == GZIP_MEMBERS:
            try:
                whole = limit is None
                line = isal_zlib.decompress(line, 31) if whole else zlib.decompressobj(31).decompress(line, limit)
            except (isal_zlib.error, zlib.error) as error:
                raise RowError("gzip", f"{where}: damaged gzip data ({error}); get the part again") from error
        elif limit is None and not line.endswith(b"\n"):
            line += b"\n"
        return line if row else line.removeprefix(BOM)  # the mark that an editor puts before the first line of a file


def write_lines(path: Path, lines: Iterable[tuple[bytes, tuple[int, int]]]) -> Index:
    """Write (line, image size) pairs as members, columns and index. Raises PartError without lines, OutputError."""
    from ..select.columns import ColumnsWriter, columns_key

    table, offset, crc32 = [], 0, 0
    remedy = "make room or choose another folder, then run the same command again"
    with base.writing(path, remedy), atomic_write(COLUMNS.index_path(path)) as beside:
        columns = ColumnsWriter(beside)
        with atomic_write(path) as file:
            for line, size in lines:
                _note(line, columns)
                member = _compress(line)
                file.write(member)
                table.append((offset, len(member), *size))
                offset += len(member)
                crc32 = zlib.crc32(member, crc32)
            if not table:
                raise PartError(f"no rows to write to {path}; a part needs at least one")
            # An older index of the same name must not outlive the part that it described.
            drop_indexes(path)
        index = make_index(GZIP_MEMBERS, offset, crc32, table)
        write_index(index_path(path), index)
        columns.finish(columns_key((offset, crc32), len(table)))
    return index


def _note(line: bytes, columns) -> None:
    """Its caption and metadata go to `columns` as `Part.read_fields` will find them."""
    try:
        fields = decode_text_columns(line, "", LAYOUTS[DEFAULT_LAYOUT])
        if fields is None:
            row = decode_row(line, "")
            fields = row.caption, row.meta
        columns.add(*fields)
    except RowError as error:
        columns.add_bad(error.reason)


def _compress(line: bytes) -> bytes:
    """One gzip member. Base64 of compressed images has no repeats to find: isal at level 1 makes it as small as zlib's
    Huffman codes alone do, in a third of the time. Its bytes may be others on another kind of processor."""
    size = struct.pack("<II", isal_zlib.crc32(line), len(line) & 0xFFFFFFFF)
    return b"".join((_MEMBER_HEADER, isal_zlib.compress(line, 1, -15), size))


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
    """The rows of a file with their image sizes. Raises PartError where none of the first can be read."""
    rows, readable, first_error = 0, 0, None
    with open(path, "rb") as file:
        for line in lines_of(file, path):
            if len(line[2]) > base.MAX_ROW_BYTES:
                what = f"is over {base.MAX_ROW_BYTES} bytes long"
                raise PartError(f"{path} row {rows} {what}; {_not_a_part(path, layout)}")
            try:
                text = line[2] if rows else line[2].removeprefix(BOM)
                size = row_size(decode_row(text, f"{path} row {rows}", layout))
                readable += 1
            except RowError as error:
                size = 0, 0
                first_error = first_error or error
            rows += 1
            if rows == base.ROWS_TO_TRY and not readable:
                break
            yield line, size
            bar.update(file.tell() - bar.n)
    if not rows:
        raise PartError(f"part file {path} holds no rows; get it again or delete its line in the filelist")
    if not readable:
        raise PartError(f"{_not_a_part(path, layout)} (none of the first {rows} rows can be read: {first_error})")


def _not_a_part(path: Path, layout: Layout) -> str:
    what = "a part that is not gzip" if path.suffix == ".gz" and not base.is_gzip(path) else "not a part file"
    rows = "caption, metadata, image" if layout is LAYOUTS[DEFAULT_LAYOUT] else "the layout that was named"
    return (
        f"{path} is {what}, and its text is not rows of {rows}; correct the filelist, or say what it is in a list of "
        "filelists (layout=, format=)"
    )


def plain_lines(file, path: Path) -> Iterator[Line]:
    """The rows of plain text."""
    offset = 0
    while line := file.readline(base.MAX_ROW_BYTES + 1):
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
    """The lines of a gzip file, each with its newline but perhaps the last. Raises PartError after the sound ones."""
    try:
        with gzip.open(file) as text:
            while line := text.readline(base.MAX_ROW_BYTES + 1):
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
            if -1 < line.find(b"\n") < len(line) - 1 or len(line) > base.MAX_ROW_BYTES:
                raise PackedRows
            length, data = length + len(data), inflate.unused_data
        length -= len(data)
        if not line.endswith(b"\n"):
            raise PackedRows
        if line.strip():
            yield offset, length, line
        offset += length

"""Part files: rows that any reader of the published format reads in order, and we at random.

`write_part` makes each row a gzip member of its own. RFC 1952 lets members follow one another and every gzip reader
joins them, so the file is ordinary gzip; but one row costs one read. Beside the part lies its index, `<part>.idx`
(`ppldm.data.index`). The part is renamed into place first, its index after it.

`Part` opens any part. An index that is missing or does not fit is built again; one that is older than its part is
believed only where the part's checksum says so. Image sizes depend on which column is the image, so each layout but
the default has an index of its own, `<part>.<layout>.idx`. Of foreign parts, plain text is indexed
as it is; one that packs many rows into a gzip member cannot be entered in the middle and is repacked, once, into the
cache folder (`PPLDM_CACHE_DIR`, else `~/.cache/ppldm`), which also takes the indexes of parts whose own folder cannot
be written. What a part is, its first bytes say, not its name. Rows are repacked as the lines they are, so a bad row
stays a row; blank lines are none. Two processes that build the same thing at once make the same bytes twice.
"""

import gzip
import os
import struct
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from isal import isal_zlib

from ..utils.errors import OutputError, PartError, RowError
from ..utils.files import atomic_write
from ..utils.log import get_logger, progress
from .columns import ColumnsWriter
from .image import image_size
from .index import GZIP_MEMBERS, PLAIN_LINES, Index, IndexSummary, make_index, read_index, read_summary, write_index
from .layouts import DEFAULT_LAYOUT, LAYOUTS, Layout, get_layout
from .row import Row, decode_row, decode_text_columns, encode_row
from .sidecar import columns_key, columns_way
from .stored import Way, find_older, find_stored, make_copy_dir, measure_file, stat_part, store_index

GZIP_MAGIC = b"\x1f\x8b"
MAX_ROW_BYTES = 1 << 28

_MEMBER_HEADER = GZIP_MAGIC + b"\x08\x00\x00\x00\x00\x00\x00\xff"  # deflate, no name, no time, any system
_CHUNK_BYTES = 1 << 17
# Captions and metadata are nearly always within this many bytes, compressed or not, of a row's beginning.
_HEAD_BYTES = 1 << 12
# Of a file that is no part at all, no row can be read; this many are tried before saying so.
_ROWS_TO_TRY = 100

# (offset, length, line): where a row is in its file, and its text with the newline.
_Line = tuple[int, int, bytes]


@dataclass(frozen=True)
class PartInfo:
    """What a finished part is: its rows, its bytes and their CRC-32."""

    path: Path
    rows: int
    bytes: int
    crc32: int


def write_part(path, rows: Iterable[Row]) -> PartInfo:
    """Write rows as a part, then its index and its columns (`ppldm.data.columns`). The same rows give the same bytes.

    The index takes an image's size from `meta["width"]` and `meta["height"]` where both are there, else from the image.
    Raises PartError where there are no rows.
    """
    index = write_lines(Path(path), ((encode_row(row), _row_size(row)) for row in rows))
    return PartInfo(Path(path), len(index.offsets), index.part_bytes, index.part_crc32)


def index_path(part, layout: str = DEFAULT_LAYOUT) -> Path:
    """Where the index of a part is, if its folder can be written."""
    return _way(layout).index_path(Path(part))


def drop_indexes(part) -> None:
    """Remove what describes a part beside it, for a part that is replaced or removed: index and columns."""
    for way in (_way(DEFAULT_LAYOUT), columns_way()):
        way.index_path(Path(part)).unlink(missing_ok=True)


class Part:
    """A part file whose rows can be read in any order.

    `widths`, `heights`: uint16 [rows], pixels, 0 where unknown. `identity`: (bytes, CRC-32) of the file with the rows.
    Raises PartError for a file that is missing, empty, truncated or no part at all, ConfigError for an unknown layout.
    The file is closed by `close()` or with the last reference.
    """

    def __init__(self, path, layout: str = DEFAULT_LAYOUT):
        self.path, self._layout = Path(path), get_layout(layout)
        stored, self._index = find_stored(self.path, _way(layout), read_index) or _build(self.path, layout)
        self.widths, self.heights = self._index.widths, self._index.heights
        self.identity = self._index.part_bytes, self._index.part_crc32
        self._file = os.open(stored, os.O_RDONLY)
        self.close = weakref.finalize(self, os.close, self._file)

    @staticmethod
    def summarize(path, layout: str = DEFAULT_LAYOUT) -> IndexSummary | None:
        """What the header of the index alone tells; None where there is no index. Raises PartError."""
        found = find_stored(Path(path), _way(layout), read_summary)
        return found[1] if found else None

    def __len__(self) -> int:
        return len(self._index.offsets)

    def read(self, row: int) -> Row:
        """Row `row` of [0, len). Raises RowError, naming part and row, where it is damaged."""
        return decode_row(self._read_line(row, None), self._where(row), self._layout)

    def read_line(self, row: int) -> bytes:
        """The text of row `row`, all columns and the newline, be it a good row or not. Raises RowError "gzip"."""
        return self._read_line(row, None)

    def read_fields(self, row: int) -> tuple[str, dict]:
        """(caption, metadata) of row `row`, without its image. Raises RowError where they are damaged."""
        fields = decode_text_columns(self._read_line(row, _HEAD_BYTES), self._where(row), self._layout)
        if fields is None:
            whole = self.read(row)
            return whole.caption, whole.meta
        return fields

    def _where(self, row: int) -> str:
        return f"{self.path} row {row}"

    def _read_line(self, row: int, limit: int | None) -> bytes:
        """The line of a row; or the part of it that its first `limit` stored bytes hold, and no more than that many."""
        if not 0 <= row < len(self):
            raise IndexError(f"{self.path} has rows 0 to {len(self) - 1}, no row {row}")
        length = int(self._index.lengths[row])
        data = os.pread(self._file, length if limit is None else min(length, limit), int(self._index.offsets[row]))
        if self._index.kind != GZIP_MEMBERS:
            return data
        return inflate_member(data, self._where(row), limit)


def inflate_member(member: bytes, where: str, limit: int | None = None) -> bytes:
    """The line of a gzip member, or its first `limit` bytes. Raises RowError "gzip"."""
    try:
        return isal_zlib.decompress(member, 31) if limit is None else zlib.decompressobj(31).decompress(member, limit)
    except (isal_zlib.error, zlib.error) as error:
        raise RowError("gzip", f"{where}: damaged gzip data ({error}); get the part again") from error


def _way(layout: str) -> Way:
    suffix = ".idx" if layout == DEFAULT_LAYOUT else f".{layout}.idx"
    return Way((GZIP_MEMBERS, PLAIN_LINES), suffix)


def _row_size(row: Row) -> tuple[int, int]:
    size = row.meta.get("width"), row.meta.get("height")
    return size if all(type(pixels) is int and 0 < pixels < 1 << 32 for pixels in size) else image_size(row.image)


def write_lines(path: Path, lines: Iterable[tuple[bytes, tuple[int, int]]], way: Way | None = None) -> Index:
    """Write (line, image size) pairs, each as its own gzip member, then the index; of a part (`way` None) its columns,
    too. Raises PartError without lines."""
    if way is not None:
        return _write_members(path, lines, way)
    with atomic_write(columns_way().index_path(path)) as file:
        columns = ColumnsWriter(file)
        index = _write_members(path, _noted(lines, columns), _way(DEFAULT_LAYOUT))
        columns.finish(columns_key((index.part_bytes, index.part_crc32), len(index.offsets)))
    return index


def _noted(lines: Iterable[tuple[bytes, tuple[int, int]]], columns: ColumnsWriter) -> Iterator:
    """The same lines, whose captions and metadata go to `columns` as `Part.read_fields` will find them."""
    layout = LAYOUTS[DEFAULT_LAYOUT]
    for line, size in lines:
        try:
            fields = decode_text_columns(line, "", layout)
            if fields is None:
                row = decode_row(line, "", layout)
                fields = row.caption, row.meta
            columns.add(*fields)
        except RowError as error:
            columns.add_bad(error.reason)
        yield line, size


def _write_members(path: Path, lines: Iterable[tuple[bytes, tuple[int, int]]], way: Way) -> Index:
    table, offset, crc32 = [], 0, 0
    with atomic_write(path) as file:
        for line, size in lines:
            member = _compress(line)
            file.write(member)
            table.append((offset, len(member), *size))
            offset += len(member)
            crc32 = zlib.crc32(member, crc32)
        if not table:
            raise PartError(f"no rows to write to {path}; a part needs at least one")
        # An older index of the same name must not outlive the part that it described.
        way.index_path(path).unlink(missing_ok=True)
        columns_way().index_path(path).unlink(missing_ok=True)
    index = make_index(way.kinds[0], offset, crc32, table)
    write_index(way.index_path(path), index)
    return index


def _compress(line: bytes) -> bytes:
    """One gzip member. Base64 of compressed images has no repeats to find: isal at level 1 makes it as small as zlib's
    Huffman codes alone do, in a third of the time. Its bytes may be others on another kind of processor."""
    size = struct.pack("<II", isal_zlib.crc32(line), len(line) & 0xFFFFFFFF)
    return b"".join((_MEMBER_HEADER, isal_zlib.compress(line, 1, -15), size))


def _build(path: Path, layout: str) -> tuple[Path, Index]:
    """Index a part, or its repacked copy, and store the result."""
    way = _way(layout)
    if found := find_older(path, way):
        return found
    copy = way.copy_path(path, stat_part(path))
    if not path.is_file():
        raise PartError(
            f"{path} is not a part file but a folder or device; correct its line in the filelist, or say "
            "format=folder in a list of filelists"
        )
    stored = copy if copy.exists() else path
    try:
        index = _scan(stored, path, get_layout(layout))
    except _PackedRows:
        # The index file may at this moment be missing again, where another process is putting its own there.
        return copy, _repack(path, copy, layout)
    store_index(stored, way, index)
    return stored, index


def _scan(stored: Path, path: Path, layout: Layout) -> Index:
    """Read a whole part, or the copy of it that is `stored`, once. Raises _PackedRows where its rows cannot be read at
    random."""
    get_logger().info("indexing %s, once", path)
    packed = _is_gzip(stored)
    table = []
    for (offset, length, _), size in _measured(stored, path, _member_lines if packed else _plain_lines, layout):
        table.append((offset, length, *size))
    return make_index(GZIP_MEMBERS if packed else PLAIN_LINES, *measure_file(stored), table)


def _repack(path: Path, copy: Path, layout: str) -> Index:
    make_copy_dir(path, copy)
    try:
        lines = ((line, size) for (_, _, line), size in _measured(path, path, _gzip_lines, get_layout(layout)))
        return write_lines(copy, lines, _way(layout))
    except OSError as error:
        raise OutputError(
            f"cannot repack {path} into {copy.parent}: {error.strerror}; set PPLDM_CACHE_DIR to a folder with space"
        ) from error


class _PackedRows(Exception):
    """A gzip member is not exactly one line."""


def _is_gzip(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(2) == GZIP_MAGIC


def _measured(
    stored: Path, path: Path, lines_of: Callable[..., Iterator[_Line]], layout: Layout
) -> Iterator[tuple[_Line, tuple[int, int]]]:
    """The lines of a file with their image sizes, under a progress bar; errors name the part, `path`.

    Raises PartError where none of the first rows can be read: then the file is something else.
    """
    rows, readable, first_error = 0, 0, None
    with (
        open(stored, "rb") as file,
        progress(total=stored.stat().st_size, desc=path.name, unit="B", unit_scale=True, delay=3) as bar,
    ):
        for line in lines_of(file, path):
            if len(line[2]) > MAX_ROW_BYTES:
                raise PartError(f"{path} row {rows} is over {MAX_ROW_BYTES} bytes long; {_not_a_part(path, layout)}")
            try:
                size = _row_size(decode_row(line[2], f"{path} row {rows}", layout))
                readable += 1
            except RowError as error:
                size = 0, 0
                first_error = first_error or error
            rows += 1
            if rows == _ROWS_TO_TRY and not readable:
                break
            yield line, size
            bar.update(file.tell() - bar.n)
    if not rows:
        raise PartError(f"part file {path} holds no rows; get it again or delete its line in the filelist")
    if not readable:
        raise PartError(f"{_not_a_part(path, layout)} (none of the first {rows} rows can be read: {first_error})")


def _not_a_part(path: Path, layout: Layout) -> str:
    what = "a part that is not gzip" if path.suffix == ".gz" and not _is_gzip(path) else "not a part file"
    rows = "caption, metadata, image" if layout is LAYOUTS[DEFAULT_LAYOUT] else "the layout that was named"
    return (
        f"{path} is {what}, and its text is not rows of {rows}; correct the filelist, or say what it is in a list of "
        "filelists (layout=, format=)"
    )


def _plain_lines(file, path: Path) -> Iterator[_Line]:
    offset = 0
    while line := file.readline(MAX_ROW_BYTES + 1):
        if line.strip():
            yield offset, len(line), line
        offset += len(line)


def _gzip_lines(file, path: Path) -> Iterator[_Line]:
    """Lines of ordinary gzip; there is no offset to enter at."""
    try:
        with gzip.open(file) as text:
            while line := text.readline(MAX_ROW_BYTES + 1):
                if line.strip():
                    yield 0, 0, line if line.endswith(b"\n") else line + b"\n"
    except EOFError as error:
        raise PartError(f"part file {path} is truncated; get it again") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise PartError(f"part file {path} is damaged ({error}); get it again") from error


def _member_lines(file, path: Path) -> Iterator[_Line]:
    """Lines that are a gzip member each. Raises _PackedRows at the first member that is something else."""
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
                raise _PackedRows
            length, data = length + len(data), inflate.unused_data
        length -= len(data)
        if not line.endswith(b"\n"):
            raise _PackedRows
        if line.strip():
            yield offset, length, line
        offset += length

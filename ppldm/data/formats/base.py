"""What all formats share: rows that an index finds in one file, read one at a time."""

import math
import weakref
from abc import ABC, abstractmethod
from contextlib import contextmanager
from pathlib import Path

from ...utils.checksums import measure_file
from ...utils.errors import PartError, RowError
from ...utils.log import get_logger, progress
from ...utils.store.cache import hold, in_store
from ..images.decode import image_size
from .copies import Copy
from .index.cache import IndexSpec, find_stored, open_index, stat_part, store_index
from .index.entries import Index, IndexSummary, make_index, read_index, read_summary
from .layouts import CONTROL_LAYOUT, DEFAULT_LAYOUT, LAYOUTS
from .open_file import OpenFile, file_state
from .row import Row, decode_text_columns, find_name

GZIP_MAGIC = b"\x1f\x8b"
MAX_ROW_BYTES = 1 << 28
_HEAD_BYTES = 1 << 12  # of a line, compressed or not, within which its texts nearly always are
# Of a file of another kind no row can be read; this many are tried before saying so.
ROWS_TO_TRY = 100


class IndexedRows(ABC):
    """Rows that can be read in any order, of a file or folder in some format; `ppldm.data.formats.open.Rows`.

    A format says how to find its rows (`_build`), what the bytes of one mean (`_decode`), and in which `spec` its index
    is kept, another one for each `layout`. Raises PartError for what is missing, empty, truncated or of another format.
    What is open is closed by `close()` or with the last reference.
    """

    spec: IndexSpec
    has_images = True

    def __init__(self, path, layout: str = DEFAULT_LAYOUT):
        self.path, self.spec = Path(path), self.spec.of_layout(layout)
        self._has_control = layout == CONTROL_LAYOUT
        self._release = weakref.finalize(self, hold(self.path)) if in_store(self.path) else None
        # Before the file is indexed, so that a change between is seen at the first row.
        state = file_state(stat_part(self.path, self.spec))
        stored, self._index = open_index(self.path, self.spec, read_index, self._build)
        self.widths, self.heights = self._index.widths, self._index.heights
        self.identity: tuple[int, ...] = (self._index.part_bytes, self._index.part_crc32)
        self._file = OpenFile(stored, self.identity, state if stored == self.path else None)
        self._copy = self._find_copy()

    def close(self) -> None:
        """Give the files back."""
        self._file.close()
        if self._copy:
            self._copy.close()
        if self._release:
            self._release()

    @classmethod
    def summarize(cls, path, layout: str = DEFAULT_LAYOUT) -> IndexSummary | None:
        """What only the header of the index tells; None where there is no index. Raises PartError."""
        found = find_stored(Path(path), cls.spec.of_layout(layout), read_summary)
        return found[1] if found else None

    def __len__(self) -> int:
        return len(self._index.offsets)

    def read(self, row: int) -> Row:
        """Row `row` of [0, len). Raises RowError, naming file and row, where it is damaged."""
        where = self._where(row)
        return self._decode(self._read_bytes(row, where), where)

    def read_fields(self, row: int) -> tuple[str, dict]:
        """(caption, metadata) of row `row`. Raises RowError."""
        read = self.read(row)
        return read.caption, read.meta

    def count_blank_lines(self, start: int, stop: int) -> int:
        """0: only parts have lines that could be blank."""
        return 0

    def _where(self, row: int) -> str:
        """What errors call a row. Raises IndexError for a row that is not there."""
        if not 0 <= row < len(self):
            raise IndexError(f"{self.path} has rows 0 to {len(self) - 1}, no row {row}")
        return f"{self.path} row {row}"

    def _read_bytes(self, row: int, where: str, limit: int | None = None) -> bytes:
        """What `_decode` takes; of at most `limit` stored bytes. Raises RowError."""
        offset, length = int(self._index.offsets[row]), int(self._index.lengths[row])
        return self._read_stored(offset, length if limit is None else min(length, limit), where)

    def _read_stored(self, offset: int, length: int, where: str) -> bytes:
        """Bytes of the file, or of its copy; fewer at the end. Raises PartError, OutputError."""
        if self._copy is None:
            return self._file.read(offset, length, where)
        self._file.read(0, 0, where)  # notices a change
        return self._copy.read(offset, length, where)

    def _find_copy(self) -> Copy | None:
        """Where rows are read, and offsets count, where the file has no way into its middle."""
        return None

    @abstractmethod
    def _build(self) -> tuple[Path, Index]:
        """(the file with the rows, its index), the latter stored for the next time."""

    @abstractmethod
    def _decode(self, data: bytes, where: str) -> Row:
        """The row of its bytes. Raises RowError."""


class LineRows(IndexedRows):
    """Rows that are lines of `_layout`, in which caption and metadata nearly always come before the image."""

    _layout = LAYOUTS[DEFAULT_LAYOUT]

    def read_fields(self, row: int) -> tuple[str, dict]:
        """(caption, metadata) of row `row`, without its image where they come first. Raises RowError."""
        where = self._where(row)
        fields = decode_text_columns(self._read_bytes(row, where, _HEAD_BYTES), where, self._layout)
        return super().read_fields(row) if fields is None else fields


@contextmanager
def indexing(path: Path, total: int, unit: str):
    """A line in the log, a progress bar, and an error of ours where the file cannot be read."""
    get_logger().info("indexing %s, once", path)
    try:
        with progress(total=total, desc=path.name, unit=unit, unit_scale=unit == "B", delay=3) as bar:
            yield bar
    except OSError as error:
        raise PartError(f"cannot read {path}: {error.strerror or error}; get it again") from error


def is_gzip(path: Path) -> bool:
    """Whether a file begins as gzip does."""
    with open(path, "rb") as file:
        return file.read(2) == GZIP_MAGIC


def store_rows(
    path: Path, spec: IndexSpec, table: list[tuple[int, int, int, int]], content: tuple[int, int] | None = None
) -> tuple[Path, Index]:
    """(path, index of rows (offset, length, width, height) of that file), stored. content: the file's bytes and CRC-32,
    where they are known. Raises PartError without rows."""
    if not table:
        raise PartError(f"{path} holds no rows; get it again or delete its line in the filelist")
    index = make_index(spec.kinds[0], *(content or measure_file(path)), table)
    store_index(path, spec, index)
    return path, index


def read_image_size(path: Path) -> tuple[int, int]:
    """(width, height) as shown of an image file; (0, 0) where it cannot be read."""
    try:
        return image_size(path.read_bytes())
    except (OSError, ValueError):  # ValueError: a NUL in the name
        return 0, 0


def read_file(folder: Path, name: str, where: str) -> bytes:
    """The content of a file that a row names. Raises RowError "unreadable"."""
    try:
        return (folder / name).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise RowError("unreadable", f"{where}: cannot read {name}: {getattr(error, 'strerror', error)}") from error


def find_column(columns: list[str], names: tuple[str, ...], path: Path) -> str:
    """The first of `names` that a table has, in whatever case. Raises PartError."""
    if name := find_name(columns, names):
        return name
    raise PartError(f"{path} has the columns {', '.join(columns)[:200]}; it needs one of {', '.join(names)}")


def is_plain(value) -> bool:
    """Whether a value of a table can be metadata: what JSON has, lists and objects too."""
    if isinstance(value, dict):
        return all(isinstance(name, str) for name in value) and is_plain([*value.values()])
    if isinstance(value, list):
        return all(item is None or is_plain(item) for item in value)
    return isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))

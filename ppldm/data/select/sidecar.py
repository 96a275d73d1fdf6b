"""Which file holds the columns of which part (`ppldm.data.select.columns`), and how it comes to be there.

It is made where an index is made, and where a condition first asks for a field of a part that has none yet.
"""

from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from ...utils.errors import OutputError, RowError
from ...utils.files import atomic_write, make_output_dir
from ...utils.log import get_logger, progress
from ..filelist import Source
from ..formats.index.cache import READ_ONLY, IndexSpec
from ..formats.index.entries import Misfit
from ..formats.layouts import DEFAULT_LAYOUT, index_layout
from .columns import Block, Columns, ColumnsWriter


def columns_spec(layout: str = DEFAULT_LAYOUT) -> IndexSpec:
    """Where the columns of a file lie, as its index does."""
    return IndexSpec((), ".columns").of_layout(layout)


def columns_key(identity: tuple[int, ...], rows: int, format: str = "part", layout: str = DEFAULT_LAYOUT) -> list:
    """What the columns of a part depend on."""
    return [list(identity), rows, format, layout]


def read_columns(part, source: Source, names: Iterable[str]) -> list[Block]:
    """The columns of these names of an open part (`formats.open.Rows`), block by block; its rows are read where
    there are none that fit. Raises OutputError."""
    found = _read_stored(part, source, names)
    if found is None:
        build_columns(part, source)
        found = _read_stored(part, source, names)
    if found is None:
        raise OutputError(
            f"what was written of {part.path} cannot be read back; check the disk, or set PPLDM_CACHE_DIR"
        )
    return found


def ensure_columns(part, source: Source) -> None:
    """Store the columns of an open part where there are none that fit. Raises OutputError."""
    if _read_stored(part, source, ()) is None:
        build_columns(part, source)


def build_columns(part, source: Source) -> None:
    """Read the caption and metadata of every row of an open part, once, and store them. Raises OutputError."""
    get_logger().info("reading the metadata of %s, once", part.path)
    *others, last = _places(part.path, source)
    for target in others:
        try:
            return _write(part, source, target)
        except OSError as error:
            if error.errno not in READ_ONLY:
                raise _cannot_write(target, error) from error
    make_output_dir(last.parent)
    try:
        _write(part, source, last)
    except OSError as error:
        raise _cannot_write(last, error) from error


def _write(part, source: Source, target: Path) -> None:
    with (
        atomic_write(target) as file,
        progress(total=len(part), desc=part.path.name, unit="row", unit_scale=True, delay=3) as bar,
    ):
        writer = ColumnsWriter(file)
        for row in range(len(part)):
            try:
                writer.add(*part.read_fields(row))
            except RowError as error:
                writer.add_bad(error.reason)
            bar.update()
        writer.finish(_key(part, source))


def _read_stored(part, source: Source, names: Iterable[str]) -> list[Block] | None:
    for path in _places(part.path, source):
        try:
            with closing(Columns(path, _key(part, source))) as columns:
                return list(columns.blocks(names))
        except FileNotFoundError:
            continue
        except Misfit as error:
            get_logger().info("%s is not used: %s", path, error)
    return None


def _places(path: Path, source: Source) -> list[Path]:
    spec = columns_spec(index_layout(source.layout, source.format))
    beside = [] if source.format == "folder" else [spec.index_path(path)]
    return [*beside, spec.cached_index_path(path)]


def _key(part, source: Source) -> list:
    return columns_key(part.identity, len(part), source.format, index_layout(source.layout, source.format))


def _cannot_write(target: Path, error: OSError) -> OutputError:
    return OutputError(f"cannot write {target}: {error.strerror or error}; free some space or set PPLDM_CACHE_DIR")

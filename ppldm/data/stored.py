"""Where the index of a file of rows lies, and where a copy that can be read at random.

An index lies beside its file, `<file>.idx`, or in the cache folder (`PPLDM_CACHE_DIR`, else `~/.cache/ppldm`) where
that folder cannot be written. A file whose rows cannot be read at random has a copy in the cache folder, another one
for each size and time of change of the original, with an index beside it.
"""

import errno
import hashlib
import os
import stat
import zlib
from collections.abc import Callable
from pathlib import Path

from ..utils.errors import OutputError, PartError
from ..utils.files import make_output_dir
from ..utils.log import get_logger
from .index import Index, write_index

_CHUNK_BYTES = 1 << 20


def index_path(part) -> Path:
    """Where the index of a part is, if its folder can be written."""
    part = Path(part)
    return part.with_name(part.name + ".idx")


def find_stored(path: Path, read: Callable, kinds: tuple[int, ...], suffix: str = ""):
    """(file that holds the rows, `read` of its index) where an index of one of the kinds fits it, else None.

    `read`: `read_index` or `read_row_count`. `suffix`: of the copy, as `copy_path` takes it. Raises PartError for a
    file that is missing or empty.
    """
    status = stat_part(path)
    found = None if stat.S_ISDIR(status.st_mode) else read(index_path(path), status.st_size, kinds)
    if found is not None:
        return path, found
    copy = copy_path(path, status, suffix)
    for part, index in ((path, _cached_index_path(path)), (copy, index_path(copy))):
        if part.is_file() and (found := read(index, part.stat().st_size, kinds)) is not None:
            return part, found
    return None


def stat_part(path: Path) -> os.stat_result:
    """The state of a file of rows, or of a folder. Raises PartError."""
    try:
        status = path.stat()
    except OSError as error:
        raise PartError(f"cannot read part file {path}: {error.strerror}; correct its line in the filelist") from error
    if stat.S_ISREG(status.st_mode) and status.st_size == 0:
        raise PartError(f"part file {path} is empty (0 bytes); get it again or delete its line in the filelist")
    return status


def measure_file(path: Path) -> tuple[int, int]:
    """The bytes of a file and their CRC-32, as an index states them."""
    crc32 = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            crc32 = zlib.crc32(chunk, crc32)
        return file.tell(), crc32


def copy_path(path: Path, status: os.stat_result, suffix: str = "") -> Path:
    """The copy of a file whose own rows cannot be read at random; another one for each state of the original, and,
    by `suffix`, for each way to read it."""
    return _cache_dir() / f"{_cache_key(path)}-{status.st_size}-{status.st_mtime_ns}-{path.name}{suffix}"


def make_copy_dir(path: Path, copy: Path) -> None:
    """Make the cache folder and say what will be put there. Raises OutputError."""
    get_logger().info("the rows of %s cannot be read at random; repacking it, once, into %s", path, copy)
    make_output_dir(copy.parent)


def store_index(path: Path, index: Index) -> None:
    """Write the index of `path` beside it or into the cache folder. Raises OutputError."""
    try:
        write_index(index_path(path), index)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise OutputError(f"cannot write {index_path(path)}: {error.strerror}; free some space") from error
        cached = _cached_index_path(path)
        get_logger().info("%s cannot be written; the index of %s goes into %s", path.parent, path.name, cached)
        make_output_dir(cached.parent)
        write_index(cached, index)


def _cache_dir() -> Path:
    return Path(os.environ.get("PPLDM_CACHE_DIR") or Path.home() / ".cache" / "ppldm")


def _cache_key(path: Path) -> str:
    return hashlib.sha256(os.path.abspath(path).encode()).hexdigest()[:16]


def _cached_index_path(path: Path) -> Path:
    return _cache_dir() / f"{_cache_key(path)}-{path.name}.idx"

"""Where the index of a file of rows lies, and which of those that are there fits.

An index lies beside its file, `<file>.idx`, or in the cache folder (`PPLDM_CACHE_DIR`, else `~/.cache/ppldm`) where
that folder cannot be written. The rows of a folder are lines of a list of its names, which lies in the cache folder,
another one for each time of change of the folder, with an index beside it.
"""

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ....utils.checksums import measure_file
from ....utils.errors import OutputError, PartError
from ....utils.files import cache_dir, make_output_dir
from ....utils.log import get_logger
from ....utils.store.cache import bring_beside, in_store, size_of
from ..layouts import DEFAULT_LAYOUT
from .entries import Index, read_index, say_unused, write_index
from .lock import build_lock

# Why a file cannot be written where others read it, while elsewhere it can.
READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)


@dataclass(frozen=True)
class IndexSpec:
    """One way to read a file. `kinds`: of indexes that serve it. The suffixes keep apart what differs between ways;
    only where there is a `copy_suffix` the rows lie in a list of their own."""

    kinds: tuple[int, ...]
    index_suffix: str = ".idx"
    copy_suffix: str = ""

    def of_layout(self, layout: str) -> "IndexSpec":
        """The same for a layout: each but the default has its own."""
        if layout == DEFAULT_LAYOUT:
            return self
        copy_suffix = self.copy_suffix and f".{layout}{self.copy_suffix}"
        return replace(self, index_suffix=f".{layout}{self.index_suffix}", copy_suffix=copy_suffix)

    def index_path(self, path: Path) -> Path:
        """The index beside a file."""
        return path.with_name(path.name + self.index_suffix)

    def cached_index_path(self, path: Path) -> Path:
        """The index of a file whose folder cannot be written."""
        return cache_dir() / f"{_cache_key(path)}-{path.name}{self.index_suffix}"

    def copy_path(self, path: Path, status: os.stat_result) -> Path:
        """The list of a folder's rows; another one for each state of the folder."""
        return cache_dir() / f"{_cache_key(path)}-{status.st_size}-{status.st_mtime_ns}-{path.name}{self.copy_suffix}"


def find_stored(path: Path, spec: IndexSpec, read: Callable):
    """(file that holds the rows, `read` of its index) where a fitting index exists, else None.

    `read`: `read_index` or `read_summary`. Raises PartError for a file that is missing or empty.
    """
    for file, index, file_bytes, older in _candidates(path, spec):
        if not older and (result := read(index, file_bytes, spec.kinds)) is not None:
            return file, result
    return None


def find_older(path: Path, spec: IndexSpec, read: Callable = read_index):
    """As `find_stored`, of indexes older than their file that its checksum confirms. They are stored anew, so that this
    is done once. Copied files have times in any order; a file that was replaced has another checksum."""
    for file, index, file_bytes, older in _candidates(path, spec):
        if older and (result := read(index, file_bytes, spec.kinds)) is not None:
            if result.part_crc32 == measure_file(file)[1]:
                store_index(file, spec, result)
                return file, result
            get_logger().warning("index %s is not used: its part has changed since", index)
    return None


def open_index(path: Path, spec: IndexSpec, read: Callable, build: Callable):
    """(file that holds the rows, its index): found, confirmed, or built by one process while others wait for it.

    read: as `read_index`. build: makes both, and stores the index. Raises PartError, and what `build` raises.
    """
    if found := find_stored(path, spec, read):
        return found
    with build_lock(_lock_target(path, spec)):
        return find_stored(path, spec, read) or find_older(path, spec, read) or build()


def _lock_target(path: Path, spec: IndexSpec) -> Path:
    """The index that is built where nobody holds it: beside its file, or in the cache folder."""
    if not spec.copy_suffix and os.access(path.parent, os.W_OK):
        return spec.index_path(path)
    target = spec.cached_index_path(path)
    make_output_dir(target.parent)
    return target


def stat_part(path: Path, spec: IndexSpec) -> os.stat_result:
    """The state of a file of rows, or of a folder. Raises PartError for what cannot hold rows of that kind."""
    if in_store(path) and not path.exists():
        # Of no age: the first that opens it brings it, and then its index is older and its checksum compared.
        return os.stat_result((stat.S_IFREG, *(0,) * 5, size_of(path), *(0,) * 3), {"st_mtime_ns": 0})
    try:
        status = path.stat()
    except OSError as error:
        raise PartError(f"cannot read part file {path}: {error.strerror}; correct its line in the filelist") from error
    if stat.S_ISREG(status.st_mode) and status.st_size == 0:
        raise PartError(f"part file {path} is empty (0 bytes); get it again or delete its line in the filelist")
    if not spec.copy_suffix and not stat.S_ISREG(status.st_mode):
        raise PartError(
            f"{path} is not a part file but a folder or device; correct its line in the filelist, or say format=folder "
            "in a list of filelists"
        )
    return status


def store_index(path: Path, spec: IndexSpec, index: Index) -> None:
    """Write the index of `path` beside it or into the cache folder. Raises OutputError."""
    store(path, spec, lambda target: write_index(target, index))


def store(path: Path, spec: IndexSpec, write: Callable[[Path], None]) -> None:
    """Let `write` make the index of `path`, or what belongs to it, beside it or in the cache folder. Raises
    OutputError."""
    target = spec.index_path(path)
    try:
        write(target)
    except OSError as error:
        if error.errno not in READ_ONLY:
            raise OutputError(f"cannot write {target}: {error.strerror}; free some space") from error
        target = spec.cached_index_path(path)
        get_logger().info("%s cannot be written; the index of %s goes into %s", path.parent, path.name, target)
        make_output_dir(target.parent)
        write(target)
    changed = path.stat().st_mtime_ns
    if target.stat().st_mtime_ns < changed:  # by another machine's clock
        os.utime(target, ns=(changed, changed))


def _candidates(path: Path, spec: IndexSpec) -> Iterator[tuple[Path, Path, int, bool]]:
    """(file with the rows, its index, bytes of the former, whether the index is older) of all that there are.

    Of 60,000 parts each costs what is done up to its first candidate, so that the others' names are made after it.
    """
    status = stat_part(path, spec)
    if not spec.copy_suffix:
        for index in (spec.index_path, spec.cached_index_path):
            yield from _candidate(path, status, index(path))
        return
    copy = spec.copy_path(path, status)
    try:
        yield from _candidate(copy, os.stat(copy), spec.index_path(copy))
    except FileNotFoundError:
        return


def _candidate(file: Path, status: os.stat_result, index: Path) -> Iterator[tuple[Path, Path, int, bool]]:
    try:
        index_status = os.stat(index)
    except FileNotFoundError:
        if not (in_store(index) and bring_beside(index)):
            return
        os.utime(index, ns=(0, 0))
        index_status = os.stat(index)
    except OSError as error:
        say_unused(index, f"it cannot be read ({error.strerror or error})")
        return
    yield file, index, status.st_size, index_status.st_mtime_ns < status.st_mtime_ns


def _cache_key(path: Path) -> str:
    return hashlib.sha256(os.fsencode(os.path.abspath(path))).hexdigest()[:16]

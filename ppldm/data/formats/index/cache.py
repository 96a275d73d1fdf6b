"""Where the index of a file of rows lies, and which of those that are there fits.

An index lies beside its file, `<file>.idx`, or in the cache folder (`PPLDM_CACHE_DIR`, else `~/.cache/ppldm`) where
that folder cannot be written. The rows of a folder are lines of a list of its names, which lies in the cache folder,
another one for each time of change of the folder, with an index beside it.

One process builds an index, and those that want the same one wait for it, on this machine or another. The owner keeps
`<index>.lock` beside the index that it makes: a JSON object with host, process and time, touched every few seconds. An
owner that died is known by its process where it is of this host, and else by a lock that was not touched for
`STALE_SECONDS` of the waiter's own clock, so that clocks need not agree. The lock only spares work: an index is the
same whoever makes it and appears by one rename, so that two owners do no harm.
"""

import errno
import hashlib
import json
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ....utils.checksums import measure_file
from ....utils.errors import OutputError, PartError
from ....utils.files import cache_dir, make_output_dir, read_json
from ....utils.log import get_logger
from ....utils.store.cache import bring_beside, in_store, size_of
from ..layouts import DEFAULT_LAYOUT
from .entries import Index, read_index, say_unused, write_index

# Why a file cannot be written where others read it, while elsewhere it can.
READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)
STALE_SECONDS = 60.0
_TOUCH_SECONDS = 5.0
_POLL_SECONDS = 0.2


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


@contextmanager
def build_lock(target: Path):
    """Hold the right to build the index `target`, after waiting for whoever holds it. Without effect where no file can
    be made there."""
    lock = target.with_name(target.name + ".lock")
    if not _acquire(lock):
        yield
        return
    done = threading.Event()
    thread = threading.Thread(target=_keep_fresh, args=(lock, done), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        lock.unlink(missing_ok=True)


def _acquire(lock: Path) -> bool:
    """False where no lock can be made."""
    seen, since, told = None, 0.0, False
    while True:
        try:
            handle = os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        except FileExistsError:
            pass
        except OSError:
            return False
        else:
            try:
                with os.fdopen(handle, "w") as file:
                    json.dump({"host": socket.gethostname(), "pid": os.getpid(), "time": time.time()}, file)
            except OSError:  # a full disk: one that does not say whose it is would be waited for
                lock.unlink(missing_ok=True)
                return False
            return True
        touched = _touched(lock)
        if touched != seen:
            seen, since = touched, time.monotonic()
        if touched is not None and (_is_dead(lock) or time.monotonic() - since > STALE_SECONDS):
            get_logger().warning("%s was left by a process that is gone; the index is built here", lock)
            lock.unlink(missing_ok=True)
            continue
        if not told:
            get_logger().info("waiting for the process that builds %s", lock.name.removesuffix(".lock"))
            told = True
        time.sleep(_POLL_SECONDS)


def _touched(lock: Path) -> int | None:
    try:
        return os.stat(lock).st_mtime_ns
    except OSError:
        return None


def _is_dead(lock: Path) -> bool:
    """Whether the owner is a process of this host that has ended."""
    owner = read_json(lock, optional=True)
    if not isinstance(owner, dict) or owner.get("host") != socket.gethostname():
        return False
    pid = owner.get("pid")
    if not isinstance(pid, int) or pid == os.getpid():
        return False  # another thread of this process
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass
    return False


def _keep_fresh(lock: Path, done: threading.Event) -> None:
    while not done.wait(_TOUCH_SECONDS):
        try:
            os.utime(lock)
        except OSError:
            return

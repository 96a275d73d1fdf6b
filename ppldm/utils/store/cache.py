"""Files of a store on this machine: whole, bounded in bytes, shared by all its processes.

    PPLDM_CACHE_DIR/stores/SCHEME/HOST/FOLDERS/NAME@SIZE-TAG/NAME

is a version of SCHEME://HOST/FOLDERS/NAME. Its path says which file it is, how large, and, by the tag, whether the
store still has that one. So whatever reads files takes such a path before the file is here; `hold` brings and keeps it.
What belongs to it (indexes) lies beside it and stays when it goes.

- A file is fetched by one process, under a lock, to a temporary name, and renamed where it has the version, the size
  and, if the store tells it, the MD5 that are expected.
- Whoever holds a file has a shared lock on it, also in forked processes. Room is made under PPLDM_STORE_CACHE_GB
  (default: half of what the disk had free) by removing those used longest ago that nobody holds.

What a flag names to be read whole, such as a model, is copied to PPLDM_CACHE_DIR/inputs (`input_path`).
"""

import fcntl
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from ..checksums import digest_of, hash_file
from ..errors import FULL_DISK, ConfigError, DiskFullError, OutputError, StoreError
from ..files import (
    atomic_dir,
    cache_dir,
    check_address,
    count_free_bytes,
    finish_file,
    is_address,
    local_path,
    make_output_dir,
    shown,
)
from ..log import get_logger
from ..variables import read

if TYPE_CHECKING:
    from .client import Stored

_VERSION = re.compile(r"(?P<name>.+)@(?P<size>\d+)-(?P<tag>[0-9a-f]{16})")
_UNFINISHED = ".fetching"
_NO_HOST = "-"
_TRIES = 4
_warned: set[int] = set()  # limits that are known to be too small


def place_of(url: str) -> Path:
    """Where the file at an address is, or will be, on this machine. Raises StoreError, ConfigError."""
    url = check_address(url)
    from .client import stat

    return _place(url, stat(url))


def in_store(path) -> bool:
    """Whether a path is of the cache, and stands for a file of a store."""
    return str(path).startswith(f"{_root()}{os.sep}")


def address_of(path) -> str:
    """The address of a file of the cache, or of what lies beside it."""
    scheme, host, *folders, _version, name = Path(path).relative_to(_root()).parts
    return f"{scheme}://{'/'.join(('' if host == _NO_HOST else host, *folders, name))}"


def name_of(path) -> str:
    """The address of a file of a store, or the absolute path of another: a name for filelists."""
    return address_of(path) if in_store(path) else os.path.abspath(path)


def is_there(path: Path) -> bool:
    """Whether a file is on this machine or in a store."""
    return in_store(path) or path.exists()


def size_of(path) -> int:
    """Bytes of a file, here or not. Raises OSError."""
    return int(_VERSION.fullmatch(Path(path).parent.name)["size"]) if in_store(path) else os.path.getsize(path)


def hold(path: Path) -> Callable[[], None]:
    """Bring a file of the cache, and keep it here until the function is called that this returns, or the process and
    those it forked have ended. Raises StoreError, OutputError."""
    while True:
        bring(path)
        try:
            number = os.open(path, os.O_RDONLY)
        except FileNotFoundError:  # removed in between
            continue
        fcntl.flock(number, fcntl.LOCK_SH)
        if _is_open_as(number, path):
            with suppress(OSError):
                # The time of access notes the use, whatever the file system's own rule is.
                os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
            return lambda: os.close(number)
        os.close(number)


def bring(path: Path) -> None:
    """Fetch a file of the cache that is not here, or what lies beside one. Raises StoreError, OutputError."""
    if path.exists():
        return
    make_output_dir(path.parent)
    with _fetching(path) as temporary:
        if temporary is not None:
            _fetch(path, temporary)


def bring_beside(path: Path) -> bool:
    """Fetch what may lie beside a file in the store: whether it does. Raises StoreError, OutputError."""
    from .client import stat

    try:
        stat(address_of(path))
        bring(path)
    except StoreError as error:
        if error.missing:
            return False
        raise
    return True


def input_path(value) -> Path:
    """The path of a file or folder that is read: itself, or of an address what is there now, fetched once for each
    state of it, to PPLDM_CACHE_DIR/inputs. Raises StoreError, OutputError, ConfigError."""
    if not is_address(value):
        return local_path(value)
    from .client import find, get

    url = check_address(str(value)).rstrip("/")
    files = find(url)
    if not files:
        place = place_of(url)
        bring(place)
        return place
    state = digest_of({name: (one.size, one.tag) for name, one in files.items()})
    target = cache_dir() / "inputs" / state / url.rpartition("/")[2]
    make_output_dir(target.parent)
    with open(target.parent / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():
            get_logger().info("fetching %s", shown(url))
            with atomic_dir(target) as temporary:
                for name, stored in files.items():
                    path, one = temporary / name, f"{url}/{name}"
                    path.parent.mkdir(parents=True, exist_ok=True)
                    get(one, path)
                    if (found := path.stat().st_size) != stored.size:
                        what = f"came with {found} bytes and not {stored.size}"
                        raise StoreError(f"{shown(one)} {what}; give the command again")
    return target


def limit_bytes() -> int:
    """The bytes that files of stores may take here. Raises ConfigError."""
    text = read("PPLDM_STORE_CACHE_GB")
    try:
        return int(float(text) * 1e9) if text else _half_of_disk(str(_root()))
    except ValueError as error:
        raise ConfigError(f"PPLDM_STORE_CACHE_GB={text} is not a number of GB; set one, such as 200") from error


def _root() -> Path:
    return cache_dir() / "stores"


def _place(url: str, stored: "Stored") -> Path:
    scheme, _, rest = url.partition("://")
    host, *folders, name = rest.split("/")
    if not name or stored.size < 0:
        raise StoreError(f"{shown(url)} is not a file of known size; name one, on a server that tells it")
    tag = hashlib.sha256(stored.tag.encode()).hexdigest()[:16]
    return _root().joinpath(scheme, host or _NO_HOST, *folders, f"{name}@{stored.size}-{tag}", name)


def _fetch(path: Path, temporary: Path) -> None:
    """Raises StoreError for what the store no longer has, or does not give whole."""
    from . import client

    url, digests = address_of(path), set()
    is_part = _VERSION.fullmatch(path.parent.name)["name"] == path.name
    for _ in range(_TRIES):
        stored = client.stat_now(url)
        if is_part and _place(url, stored) != path:
            raise StoreError(
                f"{shown(url)} has changed since this command began; put it back as it was and start the same "
                "command, or go on with the new one (training: --accept_changes data)"
            )
        if is_part:
            _make_room(stored.size)
        try:
            client.get(url, temporary)
        except OSError as error:
            if error.errno in FULL_DISK:
                raise _no_room(stored.size) from error
            raise OutputError(f"cannot write {temporary} ({error.strerror or error}); see to its disk") from error
        if os.path.getsize(temporary) == stored.size:
            digest = hash_file(temporary, "md5")
            # The ETag of some encrypted files looks like an MD5 and is none: what comes twice is so.
            if not stored.md5 or digest == stored.md5 or digest in digests:
                finish_file(temporary, path)
                return
            digests.add(digest)
        get_logger().info("%s came damaged; getting it again", shown(url))
    raise StoreError(f"{shown(url)} came damaged {_TRIES} times; see to the store and what lies between")


@contextmanager
def _fetching(path: Path) -> Iterator[Path | None]:
    """The temporary file of `path`, under the lock of whoever fetches it; None where another has fetched it. The lock
    is on a file of its own: on the temporary file, which becomes `path`, one would wait for all who hold that."""
    temporary, mark = path.with_name(f".{path.name}{_UNFINISHED}"), _mark(path)
    while not path.exists():
        number = os.open(mark, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(number, fcntl.LOCK_EX)
            if not _is_open_as(number, mark):
                continue
            try:
                if not path.exists():
                    temporary.touch()  # it counts as whole from here on
                    yield temporary
                    return
            finally:
                temporary.unlink(missing_ok=True)
                mark.unlink()
        finally:
            os.close(number)
    yield None


def _mark(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")


def _make_room(num_bytes: int) -> None:
    """Remove what was used longest ago and nobody holds, so that what is here and being fetched, of which this file of
    so many bytes is one, is within the limit and has room on the disk. Raises DiskFullError."""
    root, limit = _root(), limit_bytes()
    with open(root / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        files = sorted(_list_files(root))
        over = sum(size for _, size, _ in files) - limit
        over = max(over, num_bytes - count_free_bytes(root))
        for _, size, path in files:
            if over <= 0:
                return
            if _remove(path):
                over -= size
    if count_free_bytes(root) < num_bytes:
        raise _no_room(num_bytes)
    if over > 0 and limit not in _warned:
        _warned.add(limit)
        get_logger().warning(
            "the files of stores that are in use take more than the %.1f GB of PPLDM_STORE_CACHE_GB; raise it",
            limit / 1e9,
        )


def _list_files(root: Path) -> Iterator[tuple[int, int, Path]]:
    """(time of last use in ns, bytes, path) of every file of a store that is here or being fetched."""
    for folder, _, names in os.walk(root):
        version = _VERSION.fullmatch(os.path.basename(folder))
        for name in names if version else ():
            unfinished = name == f".{version['name']}{_UNFINISHED}"
            if unfinished or name == version["name"]:
                path = Path(folder, name)
                try:
                    status = path.stat()
                except FileNotFoundError:  # finished or removed just now
                    continue
                yield status.st_atime_ns, int(version["size"]) if unfinished else status.st_size, path


def _remove(path: Path) -> bool:
    """Whether a file could be removed: not one that is held or being fetched."""
    is_unfinished = path.name.endswith(_UNFINISHED)
    locked = _mark(path.with_name(path.name[1 : -len(_UNFINISHED)])) if is_unfinished else path
    try:
        number = os.open(locked, os.O_RDWR)
    except FileNotFoundError:  # it is gone, or nobody fetches it
        path.unlink(missing_ok=True)
        return True
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(number)


def _is_open_as(number: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(number), os.stat(path))
    except FileNotFoundError:
        return False


@cache
def _half_of_disk(root: str) -> int:
    make_output_dir(root)
    return sum(size for _, size, _ in _list_files(Path(root))) + count_free_bytes(root) // 2


def _no_room(num_bytes: int) -> DiskFullError:
    size = f"{num_bytes / 1e9:.3f} GB"
    return DiskFullError(
        f"{_root()} has no room for a file of {size}; free some, or set PPLDM_CACHE_DIR to another disk"
    )

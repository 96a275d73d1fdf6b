"""Files of a store by their address: what is there, got, put and removed, by the library fsspec.

What can pass (a server that is down, slow, busy or cuts its answer off) is tried again, with growing pauses, for
`PPLDM_STORE_RETRY_SECONDS` (300) in all. What cannot pass is a StoreError at once: 403, 404, a missing package. Errors
name the address without what stands before @ and behind ?. The store's library finds the credentials; none are kept.
"""

import os
import random
import re
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ..errors import StoreError, describe
from ..files import STORE_SCHEMES, refused_offline, shown
from ..log import get_logger
from ..processes.workers import map_in_threads
from ..variables import is_network_forbidden, read, set_for_libraries

T = TypeVar("T")

_DENIED = re.compile(r"\b(401|403)\b|Forbidden|Access ?Denied|credential", re.IGNORECASE)
_NEVER = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError, NotImplementedError)
_CLIENT_ERROR = re.compile(r"\b(400|405|409|410|412|416|451)\b")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 20.0  # seconds
_S3_OPTIONS = {"config_kwargs": {"retries": {"max_attempts": 1}, "connect_timeout": 10, "read_timeout": 60}}

# Stores that speak S3 do not all know the checksums that botocore adds since 1.36; sizes and MD5 are compared here.
_S3_VARIABLES = dict.fromkeys(("AWS_REQUEST_CHECKSUM_CALCULATION", "AWS_RESPONSE_CHECKSUM_VALIDATION"), "when_required")


@dataclass(frozen=True)
class Stored:
    """A file of a store. `tag`: another one for another content; `md5` in hexadecimal digits where known, else ""."""

    size: int
    tag: str
    md5: str = ""


def stat(url: str) -> Stored:
    """The file at an address; asked once, or told by `survey`. Raises StoreError."""
    if url not in _known:
        if url.rpartition("/")[0] in _surveyed:
            raise _missing(url)
        _known[url] = stat_now(url)
    return _known[url]


def stat_now(url: str) -> Stored:
    """As `stat`, of this moment."""
    info = _retried(url, "find", lambda files, path: files.info(path))
    if info.get("type") == "directory":
        raise StoreError(f"{shown(url)} is a folder; name a file in it", missing=True)
    return _stored(info)


def survey(urls: Iterable[str]) -> None:
    """Learn of many files at once, folder by folder, so that `stat` of them, and of what lies beside them, asks nothing
    more. Folders that may not be listed, and those of web servers, are left out."""
    folders = {url.rpartition("/")[0] for url in urls if not url.startswith("http")} - _surveyed

    def learn(url: str) -> None:
        with suppress(StoreError):  # `stat` says what is wrong with which file
            if url not in folders:
                stat(url)
                return
            for info in _retried(url, "list", lambda files, path: files.ls(path, detail=True)):
                if info["type"] == "file":
                    _known[f"{url}/{info['name'].rpartition('/')[2]}"] = _stored(info)
            _surveyed.add(url)

    map_in_threads(learn, sorted(folders), "listing stores")
    map_in_threads(learn, [url for url in urls if url.startswith("http") and url not in _known], "asking")


def find(url: str) -> dict[str, Stored]:
    """All files below a folder, at this moment, by their path in it; {} where there is none. Raises StoreError."""
    url = url.rstrip("/")

    def below(files, path: str) -> dict[str, Stored]:
        root = files._strip_protocol(path).rstrip("/")
        found = files.find(path, detail=True)
        return {name.removeprefix(root).lstrip("/"): _stored(info) for name, info in found.items()}

    try:
        return {name: one for name, one in _retried(url, "list", below).items() if name}
    except StoreError as error:
        if error.missing:
            return {}
        raise


def expand(url: str) -> list[str]:
    """The addresses that a pattern with * stands for, sorted. Raises StoreError."""
    scheme = url.partition("://")[0]

    def match(files, path: str) -> list[str]:
        return [f"{scheme}://{name.split('://')[-1].lstrip('/')}" for name in files.glob(path)]

    return sorted(_retried(url, "list", match))


def get(url: str, path: Path) -> None:
    """Write the file at an address to `path`, which is cut short where this fails. Raises StoreError, OSError."""
    _retried(url, "read", lambda files, remote: files.get_file(remote, str(path)))


def put(path: Path, url: str) -> None:
    """Write a file to an address, where it appears whole or not at all. Raises StoreError, FileNotFoundError."""
    if not path.is_file():
        raise FileNotFoundError(path)
    _retried(url, "write", lambda files, remote: files.put_file(str(path), remote))
    _known.pop(url, None)


def remove(url: str) -> None:
    """Remove a file, where it is there. Raises StoreError."""
    try:
        _retried(url, "remove", lambda files, path: files.rm_file(path))
    except StoreError as error:
        if not error.missing:
            raise
    _known.pop(url, None)


_known: dict[str, Stored] = {}  # by address; processes that are forked have it too
_surveyed: set[str] = set()  # folders of which all files are known
_opened: dict[tuple[int, str], object] = {}


def _stored(info: dict) -> Stored:
    etag = str(info.get("ETag") or info.get("etag") or "").strip('"').removeprefix('W/"')
    times = ("LastModified", "updated", "mtime", "last_modified")
    changed = next((str(info[name]) for name in times if name in info), "")
    size = -1 if info.get("size") is None else int(info["size"])
    return Stored(size, etag or changed, etag if re.fullmatch("[0-9a-f]{32}", etag) else "")


def _filesystem(url: str):
    """fsspec's file system of an address, one a process. Raises StoreError where its package is missing."""
    protocol, package = STORE_SCHEMES[url.partition("://")[0]]
    key = os.getpid(), protocol
    if key not in _opened:
        try:
            import fsspec
            import fsspec.asyn

            options = {}
            if protocol == "s3":
                options = _S3_OPTIONS
                set_for_libraries(_S3_VARIABLES)
            _opened[key] = fsspec.filesystem(protocol, use_listings_cache=False, skip_instance_cache=True, **options)
        except ImportError as error:
            name = package.partition("=")[0]
            raise StoreError(f"{shown(url)} needs the package {name} ({error}); run pip install '{package}'") from error
        except OSError as error:
            if "libhdfs" in str(error) or "libjvm" in str(error):
                raise StoreError(f"{shown(url)} needs Hadoop's libraries ({error}); install or mount it") from error
            raise
    return _opened[key]


# fsspec's thread is not there in a forked process, and it does not see that.
os.register_at_fork(after_in_child=lambda: "fsspec.asyn" in sys.modules and sys.modules["fsspec.asyn"].reset_lock())


def _retried(url: str, verb: str, operation: Callable[[object, str], T]) -> T:
    """operation(file system, address in its spelling), tried again while that may help. Raises StoreError."""
    if is_network_forbidden():
        raise refused_offline(url)
    scheme, _, rest = url.partition("://")
    remote = f"s3://{rest}" if STORE_SCHEMES[scheme][0] == "s3" else url
    bound = float(read("PPLDM_STORE_RETRY_SECONDS") or 300)
    end, pause, told = time.monotonic() + bound, _FIRST_PAUSE, False
    while True:
        try:
            return operation(_filesystem(url), remote)
        except StoreError:
            raise
        except Exception as error:  # of whichever library, and none of them has a list of what it raises
            if isinstance(error, OSError) and error.filename and Path(str(error.filename)).is_absolute():
                raise  # of this machine's disk
            if lasting := _lasting(url, verb, error):
                raise lasting from error
            if time.monotonic() + pause > end:
                raise StoreError(
                    f"cannot {verb} {shown(url)} for {bound:.0f} s ({_describe(error)}); see whether the store is "
                    "there and AWS_ENDPOINT_URL, or what its library takes, is right; the same command goes on"
                ) from error
            log = get_logger().debug if told else get_logger().info
            log("cannot %s %s yet (%s); trying again", verb, shown(url), _describe(error))
            told = True
        time.sleep(pause * random.uniform(0.5, 1))
        pause = min(2 * pause, _LONGEST_PAUSE)


def _lasting(url: str, verb: str, error: Exception) -> StoreError | None:
    """The error of ours for what will not pass; None for what may."""
    text = f"{getattr(error, 'status', '')} {error} {error.__cause__ or ''}"
    if isinstance(error, PermissionError) or _DENIED.search(text):
        return StoreError(
            f"may not {verb} {shown(url)} ({_describe(error)}); set credentials that may, as the store's library takes "
            "them (docs/data.md)"
        )
    if isinstance(error, FileNotFoundError) and not re.search(r"\b5\d\d\b|\b429\b|Cannot connect|Timeout", text):
        return _missing(url)
    if isinstance(error, _NEVER[1:]) or (isinstance(error, OSError) and _CLIENT_ERROR.search(text)):
        return StoreError(f"cannot {verb} {shown(url)} ({_describe(error)}); correct the address")
    return None


def _missing(url: str) -> StoreError:
    return StoreError(f"there is no {shown(url)}; correct the address, or put the file there", missing=True)


def _describe(error: Exception) -> str:
    """Without addresses, which may hold a signature."""
    return re.sub(r"[A-Za-z0-9+.-]+://\S+", "its address", describe(error))[:300]

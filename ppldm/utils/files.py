"""Files that are finished or absent: write to a temporary name in the same folder, fsync, rename."""

import errno
import fcntl
import io
import json
import os
import re
import shutil
import stat
import struct
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

from .errors import FULL_DISK, ConfigError, DataError, OutputError, PpldmError, StoreError
from .log import get_logger
from .text import NOT_UTF8, nearest
from .variables import read

_MOST_NAMES = 1000  # of a folder, among which the one that was meant is looked for
SMALL_BYTES = 64 << 20  # configs, vocabularies and indexes are far smaller
_HUB_BLOBS = re.compile(r"/(models|datasets|spaces)--[^/]+/blobs$")  # what files of a snapshot are links to
_OF_MODELS = ("model_index.json", "model.json", "ppldm.json")  # in the folder above those of a model's components
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://(.*)", re.DOTALL)
_MOUNTS = {"hdfs": "by HDFS's NFS gateway or fuse_dfs", "gs": "by gcsfuse"}
_MOUNTS |= dict.fromkeys(("s3", "s3a", "s3n"), "by mount-s3 or s3fs")
# Scheme -> (fsspec's name of it, package that it needs; some fit one fsspec alone, and datasets holds that back).
_S3, _GS = ("s3", "s3fs==2024.9.*"), ("gs", "gcsfs==2024.9.*")
STORE_SCHEMES = {
    **{"s3": _S3, "s3a": _S3, "s3n": _S3, "bos": _S3, "gs": _GS, "gcs": _GS, "oss": ("oss", "ossfs")},
    **{"hdfs": ("hdfs", "pyarrow"), "http": ("http", "aiohttp"), "https": ("http", "aiohttp")},
}


def local_path(path) -> Path:
    """The path that a flag names, `file:///folder` being /folder. Raises ConfigError for an address of another kind."""
    found = _ADDRESS.match(str(path))
    if not found:
        return Path(path)
    scheme = found.group(1).lower()
    if scheme == "file":
        return Path(unquote(urlsplit(str(path)).path))
    raise ConfigError(
        f"{path} is an address, and ppldm reads and writes folders; mount it at the same place on every machine"
        f"{' ' + _MOUNTS[scheme] if scheme in _MOUNTS else ''}, or copy it, and name that folder"
    )


def is_address(text) -> bool:
    """Whether a text is the address of a file or folder of a store."""
    found = _ADDRESS.match(str(text))
    return bool(found) and found[1].lower() in STORE_SCHEMES


def check_address(url: str) -> str:
    """`url`, its scheme in small letters. Raises ConfigError for one that holds a secret, or no file's name."""
    found = _ADDRESS.match(url)
    scheme, rest = found[1].lower(), found[2]
    if "@" in rest.partition("/")[0] or (scheme in ("http", "https") and re.search("[?#]", rest)):
        raise ConfigError(
            f"{shown(url)}: an address with a password or a query would be written into logs and records; give the "
            "store's own address, and the credentials as its library takes them (docs/data.md)"
        )
    if any(piece in (".", "..") for piece in rest.split("/")) or "//" in rest.strip("/"):
        raise ConfigError(f"{shown(url)} is not a plain address; write it without //, . and .. in its path")
    return f"{scheme}://{rest}"


def shown(url: str) -> str:
    """An address as it may be shown: without what stands before @ and behind ?."""
    return re.sub(r"(://)[^/]*@", r"\1", str(url)).partition("?")[0]


def refused_offline(url: str) -> StoreError:
    return StoreError(
        f"{shown(url)} is an address, and the network is not to be used; copy it here and name that path, or omit "
        "--offline (PPLDM_OFFLINE)"
    )


def cache_dir() -> Path:
    """Where everything that can be made again is kept. It need not exist."""
    return Path(read("PPLDM_CACHE_DIR") or Path.home() / ".cache" / "ppldm")


class RemotePath:
    """A path of another file system, such as `prepare.place.AddressPath`: the methods of `pathlib.Path` that are used
    of it, `count_free_bytes`, `remove`, and a `write_bytes` that leaves a file finished or absent. The functions below
    take it that read or write JSON and text, and that make, lock and remove folders."""


def as_path(path) -> Path | RemotePath:
    """A path that may be text, or of another file system."""
    return path if isinstance(path, RemotePath) else Path(path)


def meant_path(path, otherwise: str = "check the path") -> str:
    """ "did you mean PATH?" with the nearest path that is there; where none is near, what to say otherwise."""
    found = Path(Path(path).anchor)
    for piece in Path(path).relative_to(found).parts:
        names = os.listdir(found)[:_MOST_NAMES] if os.path.isdir(found) and os.access(found, os.R_OK) else []
        near = piece if os.path.exists(found / piece) else nearest(piece, names, 0.75)
        if not near:
            return otherwise
        found /= near
    return otherwise if found == Path(path) else f"did you mean {found}?"


def make_output_dir(path) -> Path | RemotePath:
    """Create the folder `path` and prove that files can be written there. Raises OutputError."""
    if isinstance(path, RemotePath):
        path.mkdir(parents=True, exist_ok=True)
        return path
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise OutputError(
            f"cannot write to the folder {path}: {error.strerror or error}; choose another or change its permissions"
        ) from error
    return path


def fsync_dir(path) -> None:
    """Make the names inside the folder `path` durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def count_free_bytes(folder) -> int:
    """The bytes that this user may still write to the file system of `folder`."""
    return folder.count_free_bytes() if isinstance(folder, RemotePath) else shutil.disk_usage(folder).free


@contextmanager
def naming_full_disk(path):
    """Inside the block, the error of a full disk that names no file, as that of a write does not, names `path`."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL_DISK and error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def atomic_write(path, mode="wb", **kwargs):
    """Open a temporary file that becomes `path` when the block ends without an error, and vanishes otherwise."""
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with naming_full_disk(path), os.fdopen(handle, mode, **kwargs) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
        fsync_dir(path.parent)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def finish_file(temporary, path) -> None:
    """Give a file that is whole its name, for files that another library writes; both in one folder."""
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)
    fsync_dir(Path(path).parent)


@contextmanager
def atomic_dir(path):
    """A temporary folder that becomes `path`, its files synced, in place of an older one, when the block ends well."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp"))
    try:
        with naming_full_disk(path):
            yield temporary
            _fsync_tree(temporary)
        os.chmod(temporary, 0o777 & ~_umask())
        if path.exists():
            remove_dir(path, temporary)
        else:
            os.replace(temporary, path)
        fsync_dir(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def remove_path(path, ignore_errors: bool = False) -> None:
    """Remove a file or folder where it is there. `ignore_errors`: what cannot be removed of a folder stays."""
    if isinstance(path, RemotePath):
        path.remove()
    elif path.is_dir():
        shutil.rmtree(path, ignore_errors)
    else:
        path.unlink(missing_ok=True)


def remove_dir(path, successor=None) -> None:
    """Remove a folder so that at no time a part of it has its name, which the folder `successor` gets, if any."""
    if isinstance(path, RemotePath):
        path.remove()
        return
    path = Path(path)
    old = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".old"))
    os.replace(path, old / "removed")
    if successor:
        os.replace(successor, path)
    shutil.rmtree(old)


def remove_leftovers(folder) -> int:
    """Remove what killed processes left half written, or half removed, in `folder`, which this process holds
    (`lock_folder`): another one's unfinished files have such names too. Returns the bytes freed."""
    freed = 0
    for path in (*Path(folder).glob(".*.tmp"), *Path(folder).glob(".*.old")):
        with passing_over(path):
            num_bytes = sum(file.stat().st_size for file in (path, *path.rglob("*")) if file.is_file())
            remove_path(path)
            freed += num_bytes
    return freed


def link_or_copy(source, target) -> None:
    """Let `target` be the file `source`, replacing an older one: by a hard link, or a copy where there are none."""
    source, target = Path(source), Path(target)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        os.link(source, temporary)
        os.replace(temporary, target)
        temporary.unlink(missing_ok=True)  # two links to one file are left as they are by replace
        fsync_dir(target.parent)
    except OSError:
        with open(source, "rb") as file, atomic_write(target) as copy:
            shutil.copyfileobj(file, copy, 1 << 20)


@contextmanager
def claimed_dir(path, plan=None, replace=False):
    """As `atomic_dir`, for long work on a folder that must not be there, or be empty, yet. The temporary folder has a
    fixed name beside it, so that what a killed run left is found and removed, and is locked. With a `plan`, which goes
    through JSON unchanged, an interrupted block leaves the temporary folder, and the next one of an equal plan finds
    its files there; what a DataError ended would end so again, and is removed. With `replace`, an older folder stays
    until the new one is whole. Raises OutputError."""
    path = Path(path)
    make_output_dir(path.parent)
    temporary = path.with_name(f".{path.name}.unfinished")
    lock = None
    while lock is None:  # another process may rename it at any moment
        try:
            temporary.mkdir(exist_ok=True)
            lock = lock_folder(temporary)
        except (FileExistsError, OutputError) as error:
            was_renamed = isinstance(error, FileExistsError) or isinstance(error.__cause__, FileNotFoundError)
            if temporary.exists() or not was_renamed:
                raise
    plan_path = temporary / ".plan.json"
    try:
        if not (temporary / ".lock").exists() or (not replace and path.is_dir() and any(path.iterdir())):
            raise OutputError(f"another process has just finished {path}; run the same command again")
        if plan is None or read_json(plan_path) != plan:
            for left in set(temporary.iterdir()) - {temporary / ".lock"}:
                remove_path(left)
            if plan is not None:
                write_json(plan_path, plan)
        yield temporary
        _fsync_tree(temporary)
        os.chmod(temporary, 0o777 & ~_umask())
        plan_path.unlink(missing_ok=True)
        if replace and path.is_dir():
            remove_dir(path)
        os.replace(temporary, path)
        (path / ".lock").unlink()  # held until here: else another run would take the folder for its own
        fsync_dir(path.parent)
    except BaseException as error:
        if plan is None or isinstance(error, DataError):
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        lock.close()


def lock_folder(path, wait_seconds: float = 60.0):
    """Hold the folder `path` for this process (not for its children), as long as the returned file stays open; where
    another holds it, wait for its end, as of one that still saves after a signal. Raises OutputError after
    `wait_seconds`. On a file system without locks, and at an address, nothing is held."""
    if isinstance(path, RemotePath):
        return io.BytesIO()
    try:
        file = open(Path(path, ".lock"), "w")  # noqa: SIM115 (held open on purpose)
    except OSError as error:
        raise OutputError(
            f"cannot write {path}/.lock: {error.strerror}; make it yours, or choose another folder"
        ) from error
    deadline = time.monotonic() + wait_seconds
    told = False
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except (BlockingIOError, PermissionError) as error:
            if time.monotonic() > deadline:
                file.close()
                raise OutputError(
                    f"another process is writing to {path}; stop it first, or choose another folder"
                ) from error
            if not told:
                get_logger().info("waiting for another process that is writing to %s", path)
                told = True
            time.sleep(0.1)
        except OSError as error:
            get_logger().warning("%s has no file locks (%s); let only one run write there", path, error.strerror)
            return file


def is_held(path) -> bool:
    """Whether another process of this machine, or of its network where locks go that far, holds the folder `path`."""
    asked = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)  # <fcntl.h>: struct flock
    try:
        with open(Path(path, ".lock"), "rb") as file:
            return struct.unpack("hhqqi", fcntl.fcntl(file, fcntl.F_GETLK, asked))[0] != fcntl.F_UNLCK
    except OSError:
        return False


def write_json(path, value) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path, optional: bool = False):
    """The JSON in a file of ours; None: it is missing, damaged or, if `optional`, unreadable. Raises DataError."""
    try:
        return json.loads(as_path(path).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return None
    except OSError as error:
        if optional:
            return None
        raise DataError(f"cannot read {path}: {error.strerror or error}; make it readable, or remove it") from error


@contextmanager
def passing_over(what):
    """Inside the block, an OSError is said in the log and ends the block: for what is optional, or older."""
    try:
        yield
    except OSError as error:
        get_logger().warning("passing over %s: %s", what, error.strerror or error)


def open_regular(path, buffering: int = -1):
    """A file to read bytes of, open. Raises OSError; also for a FIFO or a device, which might never end."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO must not wait
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return open(handle, "rb", buffering)


def read_given_text(path, errors: str = "strict", most: int = 1 << 28) -> str:
    """The UTF-8 text of a file that somebody gave us, in which lines end as in any text; also of a pipe of this very
    process, as /dev/stdin. Raises OSError, also for what has more than `most` bytes; UnicodeDecodeError."""
    is_own = str(path).startswith(("/dev/fd/", "/dev/stdin"))
    if not is_own and os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    with open(path, "rb") if is_own else open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EINVAL, f"it has more than {most:,} bytes", str(path))
    return content.decode("utf-8-sig", errors).replace("\r\n", "\n").replace("\r", "\n")


def read_small(path, error_class: type[PpldmError], remedy: str = "copy it again", inside: bool = False) -> bytes:
    """The bytes of a small file that somebody gave us: a regular one of at most SMALL_BYTES. `inside`: one of a folder,
    as of a model, out of which no link may lead but to the blobs of a hub's cache. Raises `error_class`."""
    path = Path(path)
    try:
        if inside and path.is_symlink():
            folder, target = (Path(os.path.realpath(one)) for one in (path.parent, path))
            if any((folder.parent / name).is_file() for name in _OF_MODELS):
                folder = folder.parent
            if not (target.is_relative_to(folder) or _HUB_BLOBS.search(str(target.parent))):
                raise error_class(f"{path} is a link out of its folder, to {target}; put the file itself there")
        with open_regular(path) as file:
            content = file.read(SMALL_BYTES + 1)
    except OSError as error:
        raise error_class(f"cannot read {path}: {error.strerror}; {remedy}") from error
    if len(content) > SMALL_BYTES:
        raise error_class(f"{path} is larger than {SMALL_BYTES >> 20} MiB, which no such file is; {remedy}")
    return content


def is_table(value, kind: type) -> bool:
    """Whether a value of JSON is an object whose values are all of one kind; a truth value is no number."""
    return isinstance(value, dict) and all(type(one) is kind for one in value.values())


def parse_json_object(text: str | bytes, source, error_class: type[PpldmError], remedy: str = "copy it again") -> dict:
    """The object in JSON text of somebody's. Raises `error_class`, whose message begins with the `source`."""
    try:
        value = json.loads(text if isinstance(text, str) else text.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise error_class(f"{source} is not JSON ({error}); {remedy}") from error
    if not isinstance(value, dict):
        raise error_class(f"{source} does not hold a JSON object; {remedy}")
    return value


def read_json_object(path, error_class: type[PpldmError], remedy: str = "copy it again", inside: bool = False) -> dict:
    """The object in a JSON file that somebody gave us. Raises `error_class`, whose message ends with the `remedy`."""
    return parse_json_object(read_small(path, error_class, remedy, inside), path, error_class, remedy)


def write_text(path, text: str, names: bool = False) -> None:
    r"""Write `text` as UTF-8, atomically. What a file's name has that is not UTF-8 is written as `\udcXX`, which JSON
    reads as that name again; with `names`, for files that hold nothing but names, as the bytes that it is."""
    if isinstance(path, RemotePath):
        path.write_bytes(text.encode(errors=NOT_UTF8))
        return
    with atomic_write(path, "w", encoding="utf-8", errors="surrogateescape" if names else NOT_UTF8) as file:
        file.write(text)


def _fsync_tree(path: Path) -> None:
    for folder, _, names in os.walk(path):
        for name in set(names) - {".lock"}:  # to close it anywhere ends what this process holds
            with open(Path(folder, name), "rb") as file:
                os.fsync(file.fileno())
        fsync_dir(folder)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@contextmanager
def in_working_folder(manifest: dict):
    """Inside the block, relative paths are found as they were when the checkpoint with this manifest was written."""
    before = os.getcwd()
    folder = manifest.get("working_folder", before)
    if not os.path.isdir(folder):
        get_logger().warning("%s, where the run was started, is not there: paths are taken from %s", folder, before)
        folder = before
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)

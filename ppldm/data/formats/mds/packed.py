"""Shards that MosaicML's writer compressed, `shard.00000.mds.zstd`: a shard as one frame, with no way into its middle.

    open_stream(path)     a shard from its beginning, unpacked on the way, whether it is compressed or not
    open_samples(path)    a file to read at random: the shard itself, or its copy, unpacked, in the cache folder

The order of training reads some hundred rows of a shard and comes back an epoch later, so that unpacking a shard once
and reading those rows costs little; in memory there is no room for as many shards as a window of the order has. All
processes of a machine share a copy. Copies take at most `LIMIT_BYTES`, and half of what the disk has for them; those
used last stay. One that is removed while it is open is still read: its space is free when it is closed.
"""

import os
from pathlib import Path

from ....utils.errors import OutputError, PartError
from ....utils.files import atomic_write, cache_dir, count_free_bytes, make_output_dir
from ....utils.log import get_logger
from ..index.cache import IndexSpec, stat_part
from ..index.lock import build_lock

LIMIT_BYTES = 32 << 30
# The suffixes that MosaicML's writer gives, and what pyarrow calls their formats.
_CODECS = {".zstd": "zstd", ".gz": "gzip", ".br": "brotli", ".bz2": "bz2", ".snappy": "snappy"}
_COPIES = IndexSpec((), copy_suffix=".unpacked")
_BLOCK_BYTES = 1 << 20
_MAX_BYTES = 1 << 32  # of a shard, whose offsets are u32
_ATTEMPTS = 3


def unpacked_name(name: str) -> str:
    """The name of a shard without the suffix of its compression."""
    stem, suffix = os.path.splitext(name)
    return stem if suffix in _CODECS and stem.endswith(".mds") else name


def is_packed(path: Path) -> bool:
    """Whether a shard is compressed, by its name: two of the formats have no mark of their own."""
    return unpacked_name(path.name) != path.name


class _Unpacked:
    """`read` and `close` of a compressed file's content. Raises PartError where it is damaged."""

    def __init__(self, path: Path):
        import pyarrow as pa

        self._path, self._errors = path, (pa.ArrowException, OSError)
        codec = _CODECS[path.suffix]
        self._file = self._try(lambda: _unpack_snappy(path) if codec == "snappy" else pa.input_stream(path, codec))

    def read(self, size: int) -> bytes:
        return self._try(lambda: self._file.read(size))

    def close(self) -> None:
        self._file.close()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def _try(self, action):
        try:
            return action()
        except self._errors as error:
            words = " ".join(str(error).split())[:200]
            raise PartError(f"{self._path} cannot be unpacked ({words}); get it again") from error


def _unpack_snappy(path: Path):
    """The raw format, which begins with the size of what it holds: seven bits a byte, the lowest first."""
    import pyarrow as pa

    data, size, shift = path.read_bytes(), 0, 0
    for byte in data[:5]:
        size |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            break
    if size > _MAX_BYTES:
        raise OSError("its size cannot be")
    return pa.BufferReader(pa.Codec("snappy").decompress(data, size))


def open_stream(path: Path):
    """A shard's bytes by `read(size)`, from the first on; to be closed. Raises PartError."""
    return _Unpacked(path) if is_packed(path) else open(path, "rb")


def open_samples(path: Path):
    """A shard, or its unpacked copy, as a binary file that is not buffered. Raises PartError, OutputError."""
    if not is_packed(path):
        return open(path, "rb", buffering=0)
    copy = _COPIES.copy_path(path, stat_part(path, _COPIES))
    for _ in range(_ATTEMPTS):
        try:
            file = open(copy, "rb", buffering=0)  # noqa: SIM115 (the caller closes it)
            os.utime(copy)
            return file
        except FileNotFoundError:  # not there yet, or just removed in favour of others
            _make_copy(path, copy)
    raise OutputError(f"{copy} is removed as soon as it is made; set PPLDM_CACHE_DIR to a disk with more room")


def _make_copy(path: Path, copy: Path) -> None:
    make_output_dir(copy.parent)
    with build_lock(copy):
        if copy.exists():
            return
        get_logger().info("unpacking %s into %s", path, copy.parent)
        try:
            with open_stream(path) as packed, atomic_write(copy) as file:
                while block := packed.read(_BLOCK_BYTES):
                    file.write(block)
                    if file.tell() > _MAX_BYTES:
                        raise PartError(f"{path} holds more than a shard can; get it again")
        except OSError as error:
            raise OutputError(
                f"cannot write {copy} ({error.strerror or error}); free some space, set PPLDM_CACHE_DIR to another "
                "folder, or run `ppldm repack` once"
            ) from error
    _remove_oldest(copy)


def _remove_oldest(newest: Path) -> None:
    """Keep copies, and what killed processes left of them, within bounds; the newest stays in any case."""
    found = []
    for path in cache_dir().glob(f"*{_COPIES.copy_suffix}*"):
        try:
            status = path.stat()
        except FileNotFoundError:  # another process removes them too
            continue
        found.append((status.st_mtime_ns, status.st_size, path))
    left = min(LIMIT_BYTES, (sum(size for _, size, _ in found) + count_free_bytes(cache_dir())) // 2)
    for _, size, path in sorted(found, reverse=True):
        left -= size
        if left < 0 and path != newest:
            path.unlink(missing_ok=True)

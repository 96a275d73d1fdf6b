"""Shards that MosaicML's writer compressed, `shard.00000.mds.zstd`: a shard as one frame, with no way into its middle.

open_stream(path)     a shard from its beginning, unpacked on the way, whether it is compressed or not
open_samples(path)    a file to read at random: the shard itself, or its copy (`formats.copies`), unpacked
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO

from ....utils.checksums import measure_file
from ....utils.errors import PartError
from ..copies import Copy

# The suffixes that MosaicML's writer gives, and what pyarrow calls their formats.
_CODECS = {".zstd": "zstd", ".gz": "gzip", ".br": "brotli", ".bz2": "bz2", ".snappy": "snappy"}
_COPY = ".unpacked"
_BLOCK_BYTES = 1 << 20
_MAX_BYTES = 1 << 32  # of a shard, whose offsets are u32


def unpacked_name(name: str) -> str:
    """The name of a shard without the suffix of its compression."""
    stem, suffix = os.path.splitext(name)
    return stem if suffix in _CODECS and stem.endswith(".mds") else name


def is_packed(path: Path) -> bool:
    """Whether a shard is compressed, by its name: two of the formats have no mark of their own."""
    return unpacked_name(path.name) != path.name


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


@contextmanager
def open_stream(path: Path) -> Iterator:
    """A shard's bytes by `read(size)`, from the first on. Raises PartError, also in the block, where it is damaged."""
    if not is_packed(path):
        with open(path, "rb") as file:
            yield file
        return
    import pyarrow as pa

    codec = _CODECS[path.suffix]
    try:
        with _unpack_snappy(path) if codec == "snappy" else pa.input_stream(path, codec) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        words = " ".join(str(error).split())[:200]
        raise PartError(f"{path} cannot be unpacked ({words}); get it again") from error


def open_samples(path: Path) -> BinaryIO:
    """A shard, or its unpacked copy, as a binary file that is not buffered. Raises PartError, OutputError."""
    if not is_packed(path):
        return open(path, "rb", buffering=0)
    return copy_of(path, measure_file(path)).open()


def copy_of(path: Path, content: tuple[int, int]) -> Copy:
    """The unpacked copy of a compressed shard with this content (bytes, CRC-32)."""
    return Copy(path, content, _COPY, partial(_unpack, path))


def _unpack(path: Path) -> Iterator[bytes]:
    num_bytes = 0
    with open_stream(path) as packed:
        while block := packed.read(_BLOCK_BYTES):
            num_bytes += len(block)
            if num_bytes > _MAX_BYTES:
                raise PartError(f"{path} holds more than a shard can; get it again")
            yield block

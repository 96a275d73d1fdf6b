"""Checksums of files, arrays and settings: what tells two of them apart, and shows that one has changed."""

import hashlib
import json
import zlib
from collections.abc import Iterable

import numpy as np

from .files import open_regular

_BLOCK_BYTES = 1 << 20


def measure(file, num_bytes: int | None = None) -> tuple[int, int]:
    """(bytes, CRC-32) of what an open binary file holds from here on, or of its next `num_bytes`. Raises OSError."""
    total, crc32 = 0, 0
    while block := file.read(_BLOCK_BYTES if num_bytes is None else min(_BLOCK_BYTES, num_bytes - total)):
        crc32 = zlib.crc32(block, crc32)
        total += len(block)
    return total, crc32


def measure_file(path) -> tuple[int, int]:
    """(bytes, CRC-32) of a whole file. Raises OSError."""
    with open_regular(path, buffering=0) as file:
        return measure(file)


def checksum_file(path) -> dict[str, int]:
    """`measure_file` as manifests state it: {"bytes", "crc32"}. Raises OSError."""
    return dict(zip(("bytes", "crc32"), measure_file(path), strict=True))


def hash_file(path, name: str = "sha256") -> str:
    """One of hashlib's hashes of a file in hexadecimal digits. Raises OSError."""
    digest = hashlib.new(name)
    with open_regular(path) as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def digest_of(value) -> str:
    """32 hexadecimal digits of a value that JSON can hold, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def checksum_json(value) -> int:
    """CRC-32 of a value that JSON can hold, whatever the order of its keys."""
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())


def checksum_arrays(arrays: Iterable[tuple[str, np.ndarray]], start: int = 0) -> str:
    """CRC-32 of named arrays, in the order of their names, 8 hexadecimal digits; `start` is that of what precedes."""
    checksum = start
    for name, array in sorted(arrays, key=lambda pair: pair[0]):
        checksum = zlib.crc32(np.ascontiguousarray(array), zlib.crc32(name.encode(), checksum))
    return f"{checksum:08x}"


def sha256_arrays(arrays: Iterable[tuple[str, np.ndarray]], start: bytes = b"") -> str:
    """SHA-256 of named arrays as float32, in the order of their names, 32 hexadecimal digits; `start` precedes them."""
    digest = hashlib.sha256(start)
    for name, array in sorted(arrays, key=lambda pair: pair[0]):
        values = np.ascontiguousarray(array, np.float32)
        digest.update(f"{name} {list(values.shape)}".encode())
        digest.update(values)
    return digest.hexdigest()[:32]

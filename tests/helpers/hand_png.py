"""PNG files made by hand, of every kind of pixel, and what they show, computed from the samples themselves."""

import struct
import zlib

import numpy as np

CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by colour type
KINDS = [
    *((0, depth) for depth in (1, 2, 4, 8, 16)),
    *((2, depth) for depth in (8, 16)),
    *((3, depth) for depth in (1, 2, 4, 8)),
    *((kind, depth) for kind in (4, 6) for depth in (8, 16)),
]
PALETTE_SIZE = {1: 2, 2: 4, 4: 16, 8: 256}


def write_png(samples: np.ndarray, kind: int, depth: int, palette=None, transparent: bytes | None = None, more=b""):
    """The file of samples, [height, width, channels]; `more` are chunks that stand before the pixels."""
    height, width, _ = samples.shape

    def pack(row):
        if depth == 16:
            return row.astype(">u2").tobytes()
        bits = (row.reshape(-1, 1) >> np.arange(depth)[::-1]) & 1
        return np.packbits(bits.astype(np.uint8).ravel()).tobytes()

    lines = b"".join(b"\0" + pack(row) for row in samples)
    chunks = [chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0)), more]
    if palette is not None:
        chunks.append(chunk(b"PLTE", np.asarray(palette, np.uint8).tobytes()))
    if transparent is not None:
        chunks.append(chunk(b"tRNS", transparent))
    chunks += [chunk(b"IDAT", zlib.compress(lines)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def shown(samples: np.ndarray, kind: int, depth: int, palette=None, transparent: bytes | None = None) -> np.ndarray:
    """float [height, width, 3] of 0 to 255: as the specification says, laid on white."""
    whole = samples.astype(np.float64) * 255 / (2**depth - 1)
    colour, alpha = whole[..., :3], np.full(samples.shape[:2], 255.0)
    if kind == 3:
        colour = np.asarray(palette, np.float64)[samples[..., 0]]
        if transparent is not None:
            alpha = np.array([*transparent, *[255] * (256 - len(transparent))], float)[samples[..., 0]]
    elif kind in (4, 6):
        colour, alpha = whole[..., :-1], whole[..., -1]
    elif transparent is not None:
        key = np.frombuffer(transparent, ">u2").astype(int) & (2**depth - 1)
        alpha = np.where((samples == key).all(-1), 0.0, 255.0)
    colour = np.repeat(colour, 3, axis=-1) if colour.shape[-1] == 1 else colour
    return 255 + (colour - 255) * (alpha / 255)[..., None]

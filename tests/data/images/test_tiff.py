"""TIFF files of every kind of sample, made by hand, against what their samples mean: that, or refused."""

import struct
from itertools import product

import numpy as np
import pytest

from ppldm.data.images import decode_pixels
from ppldm.utils.errors import RowError

WHITE_IS_ZERO, BLACK_IS_ZERO, RGB, PALETTE, CMYK, YCBCR = 0, 1, 2, 3, 5, 6
COLOURS = {WHITE_IS_ZERO: 1, BLACK_IS_ZERO: 1, RGB: 3, PALETTE: 1, CMYK: 4, YCBCR: 3}
_LONG, _SHORT = 4, 3
REFUSED = "refused"


def write_tiff(samples, photometric, depth, order="<", extra=None, planar=1, fill=1, sample_format=1, palette=None):
    height, width, channels = samples.shape
    planes = [samples] if planar == 1 else [samples[..., one : one + 1] for one in range(channels)]
    strips = []
    for plane in planes:
        if depth in (16, 32):
            strips.append(plane.astype(f"{order}u{depth // 8}").tobytes())
            continue
        rows = [(row.reshape(-1, 1) >> np.arange(depth)[::-1]) & 1 for row in plane]
        strip = b"".join(np.packbits(row.astype(np.uint8).ravel()).tobytes() for row in rows)
        strips.append(bytes(int(f"{byte:08b}"[::-1], 2) for byte in strip) if fill == 2 else strip)
    tags = {
        256: (_LONG, [width]), 257: (_LONG, [height]), 258: (_SHORT, [depth] * channels), 259: (_SHORT, [1]),
        262: (_SHORT, [photometric]), 266: (_SHORT, [fill]), 273: (_LONG, [0] * len(strips)), 277: (_SHORT, [channels]),
        278: (_LONG, [height]), 279: (_LONG, [len(strip) for strip in strips]), 284: (_SHORT, [planar]),
        339: (_SHORT, [sample_format] * channels),
    }  # fmt: skip
    if extra is not None:
        tags[338] = (_SHORT, [extra])
    if palette is not None:
        tags[320] = (_SHORT, (palette.T.astype(int) * 257).ravel().tolist())
    if photometric == YCBCR:
        tags[530] = (_SHORT, [1, 1])
    start = 8 + 2 + 12 * len(tags) + 4
    sizes = {tag: len(values) * (4 if kind == _LONG else 2) for tag, (kind, values) in tags.items()}
    pixels = start + sum(size for size in sizes.values() if size > 4)
    tags[273] = (_LONG, [pixels + sum(map(len, strips[:number])) for number in range(len(strips))])
    entries, beside = b"", b""
    for tag, (kind, values) in sorted(tags.items()):
        data = struct.pack(f"{order}{len(values)}{'I' if kind == _LONG else 'H'}", *values)
        where = data.ljust(4, b"\0") if len(data) <= 4 else struct.pack(f"{order}I", start + len(beside))
        beside += data if len(data) > 4 else b""
        entries += struct.pack(f"{order}HHI", tag, kind, len(values)) + where
    head = (b"II" if order == "<" else b"MM") + struct.pack(f"{order}HI", 42, 8) + struct.pack(f"{order}H", len(tags))
    # Something may follow, as in files of several pages.
    return head + entries + bytes(4) + beside + b"".join(strips) + bytes(samples.size)


def shown(samples, photometric, depth, extra=None, palette=None):
    whole = samples.astype(np.float64) * 255 / (2**depth - 1)
    alpha = whole[..., -1:] if extra in (1, 2) else np.full((*samples.shape[:2], 1), 255.0)
    colour = whole[..., : COLOURS[photometric]]
    if photometric == WHITE_IS_ZERO:
        colour = 255 - colour
    elif photometric == PALETTE:
        colour = palette[samples[..., 0]].astype(float)
    elif photometric == CMYK:
        colour = (255 - colour[..., :3]) * (255 - colour[..., 3:]) / 255
    elif photometric == YCBCR:
        y, cb, cr = colour[..., 0], colour[..., 1] - 128, colour[..., 2] - 128
        colour = np.stack([y + 1.402 * cr, y - 0.344136 * cb - 0.714136 * cr, y + 1.772 * cb], -1).clip(0, 255)
    on_white = colour + 255 - alpha if extra == 1 else 255 + (colour - 255) * alpha / 255
    return np.broadcast_to(on_white, (*samples.shape[:2], 3))


KINDS = [
    *(product((WHITE_IS_ZERO, BLACK_IS_ZERO), (1, 2, 4, 8, 12, 16, 32), (None,))),
    *(product((BLACK_IS_ZERO,), (8, 16), (0, 1, 2))),
    *(product((RGB,), (8, 16), (None, 0, 1, 2))),
    *(product((PALETTE,), (1, 2, 4, 8), (None,))),
    *(product((CMYK,), (8, 16), (None,))),
    (YCBCR, 8, None),
]


@pytest.mark.parametrize("photometric, depth, extra", KINDS)
def test_every_kind_of_sample_shows_what_it_means_or_is_refused(photometric, depth, extra):
    rng, outcomes = np.random.default_rng(depth), {}
    for order, planar, fill, sample_format in product("<>", (1, 2), (1, 2), (1, 2)):
        samples = rng.integers(0, 2**depth, (7, 24, COLOURS[photometric] + (extra is not None)))
        if extra == 1:
            samples[..., :-1] = np.minimum(samples[..., :-1], samples[..., -1:])
        if sample_format == 2:  # signed: of these the halves without a sign
            samples //= 2
        palette = rng.integers(0, 256, (2**depth, 3)) if photometric == PALETTE else None
        where = {"order": order, "planar": planar, "fill": fill, "sample_format": sample_format}
        file = write_tiff(samples, photometric, depth, extra=extra, palette=palette, **where)
        due = shown(samples, photometric, depth, extra, palette)
        try:
            outcomes[str(where)] = round(np.abs(decode_pixels(file) - due).max())
        except RowError:
            outcomes[str(where)] = REFUSED
    wrong = {name: found for name, found in outcomes.items() if found != REFUSED and found > 3}
    assert not wrong

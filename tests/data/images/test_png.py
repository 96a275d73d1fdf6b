"""PNG files of every kind of pixel, made by hand, against what their samples mean."""

import numpy as np
import pytest
from hand_png import CHANNELS, KINDS, PALETTE_SIZE, chunk, shown, write_png

from ppldm.data.images import decode_pixels

ALPHA = (4, 6)  # kinds whose transparency is a channel of its own


def make(kind, depth, transparent, seed, size=(5, 37)):
    """(samples, the other arguments) of a picture, in which one of the pixels has the transparent grey or colour, and
    others have one that differs from it in the last bit only, or in all but the last bits."""
    rng = np.random.default_rng(seed)
    samples = rng.integers(0, 2**depth, (*size, CHANNELS[kind]))
    given = {"palette": rng.integers(0, 256, (PALETTE_SIZE[depth], 3))} if kind == 3 else {}
    if transparent and kind == 3:
        given["transparent"] = bytes(rng.integers(0, 256, PALETTE_SIZE[depth] - 1).tolist())
    elif transparent:
        key = samples[1, 1].copy()
        samples[2, 2], samples[3, 3] = key ^ 1, key ^ (1 << (depth - 1))
        samples[4, 4] = key
        given["transparent"] = key.astype(">u2").tobytes()
    return samples, given


@pytest.mark.parametrize(
    "kind, depth, transparent",
    [(*one, transparent) for one in KINDS for transparent in (False, True) if not transparent or one[0] not in ALPHA],
)
def test_every_kind_of_pixel_shows_what_its_samples_mean(kind, depth, transparent):
    for seed in range(20):
        samples, given = make(kind, depth, transparent, seed)
        difference = np.abs(
            decode_pixels(write_png(samples, kind, depth, **given)) - shown(samples, kind, depth, **given)
        )
        assert difference.max() <= (0 if depth < 16 and kind in (0, 2) else 3), seed


@pytest.mark.parametrize("kind, depth", [one for one in KINDS if one[0] in (0, 2) and one[1] > 1])
def test_bits_of_the_transparent_grey_above_its_depth_do_not_count(kind, depth):
    samples, given = make(kind, depth, True, 0)
    key = np.frombuffer(given["transparent"], ">u2") | (0xFFFF << depth & 0xFFFF)
    high = {"transparent": key.astype(">u2").tobytes()}
    assert (
        decode_pixels(write_png(samples, kind, depth, **high))
        == decode_pixels(write_png(samples, kind, depth, **given))
    ).all()


@pytest.mark.parametrize("kind, depth", KINDS)
def test_a_transparent_picture_is_turned_whole(kind, depth):
    samples, given = make(kind, depth, kind not in ALPHA, 3)
    turned = chunk(b"eXIf", b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0")
    plain, rotated = (decode_pixels(write_png(samples, kind, depth, **given, more=more)) for more in (b"", turned))
    assert (np.rot90(plain, -1) == rotated).all()

"""Standard normal numbers to the bits of numpy's, in less than half its time.

The numbers are those of `Generator.standard_normal(dtype=float32)`: the ziggurat of Marsaglia and Tsang 2000 (Journal
of Statistical Software 5(8)) in 256 layers of one area, from 32 random bits a number: 8 choose the layer, one the sign,
23 the place in it. A place inside the next layer too, as 98.8 % are, is taken at once; else one more number decides,
and in the tail of the lowest layer two (Marsaglia 1964). The processor guesses numpy's branch on the sign wrong half of
the time; here nothing branches on it. The random bits stay numpy's.

numba compiles the loop at its first use, in about a second. One thread; safe to fork.
"""

import math

import numpy as np
from numba import njit

_LAYERS = 256
_TAIL = 3.6541528853610088  # where it begins; makes the areas of 256 layers equal
_TAIL_32, _INVERSE_TAIL_32 = np.float32(_TAIL), np.float32(1 / _TAIL)
_PLACES = 1 << 23
_UNIT = np.float32(2.0**-24)  # of a uniform number of 24 bits
_SIGN_BIT, _LAYER_BITS, _LAYER_AND_SIGN, _UNUSED_BITS = np.uint32(256), np.uint32(255), np.uint32(9), np.uint32(8)


def _make_layers() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each layer: width of a place, float32; places that are inside the next layer too, int32; height of the bell
    curve exp(-x * x / 2) at its right end, float32. Layer 0 is the lowest, with the tail."""

    def height(x):
        return np.exp(-0.5 * x * x)

    area = _TAIL * height(_TAIL) + math.sqrt(math.pi / 2) * math.erfc(_TAIL / math.sqrt(2))
    ends = np.zeros(_LAYERS)
    ends[-1] = _TAIL
    for layer in range(_LAYERS - 2, 0, -1):
        ends[layer] = math.sqrt(-2 * math.log(area / ends[layer + 1] + height(ends[layer + 1])))
    widths = ends.copy()
    widths[0] = area / height(_TAIL)
    inside = np.concatenate([[_TAIL, 0], ends[1:-1]]) / widths
    return (
        (widths / _PLACES).astype(np.float32),
        np.rint(inside * _PLACES).astype(np.int32),
        height(ends).astype(np.float32),
    )


_WIDTHS, _INSIDE, _HEIGHTS = _make_layers()


def fill_normals(generator: np.random.Generator, out: np.ndarray) -> None:
    """Fill `out`, contiguous float32, as a Philox `generator` of which nothing was drawn yet does with
    `standard_normal(dtype=np.float32, out=out)`; what it would draw next is undefined."""
    numbers = out.reshape(-1)
    words = _draw_words(generator, out.size + out.size // 32 + 32)
    while not _take(words, numbers):
        words = np.concatenate([words, _draw_words(generator, out.size // 8 + 32)])


def compile_kernel() -> None:
    """Compile what `fill_normals` needs, so that processes forked afterwards need not."""
    _take(np.zeros(1, np.uint32), np.empty(1, np.float32))


def _draw_words(generator: np.random.Generator, least: int) -> np.ndarray:
    """At least so many random uint32, in the order in which numpy uses the halves of its words of 64 bits."""
    return generator.bit_generator.random_raw((least + 1) // 2).astype("<u8", copy=False).view("<u4")


@njit(nogil=True)
def _take(words, numbers):
    """Fill float32 `numbers` from uint32 `words`; False where there are too few."""
    used = 0
    for i in range(numbers.size):
        while True:
            if used + 1 > words.size:
                return False
            word = words[used]
            used += 1
            layer, place = word & _LAYER_BITS, np.int32(word >> _LAYER_AND_SIGN)
            x = np.float32(place) * _WIDTHS[layer]
            signed = -x if word & _SIGN_BIT else x
            if place < _INSIDE[layer]:
                numbers[i] = signed
                break
            if layer:
                if used + 1 > words.size:
                    return False
                share = np.float32(words[used] >> _UNUSED_BITS) * _UNIT
                used += 1
                between = (_HEIGHTS[layer - 1] - _HEIGHTS[layer]) * share + _HEIGHTS[layer]
                if between < math.exp(-0.5 * np.float64(x) * np.float64(x)):
                    numbers[i] = signed
                    break
            else:
                beyond, used = _reach_into_tail(words, used)
                if used > words.size:
                    return False
                # The sign here is another bit: numpy's bits, which have it so.
                numbers[i] = -(_TAIL_32 + beyond) if (place >> 8) & 1 else _TAIL_32 + beyond
                break
    return True


@njit(nogil=True)
def _reach_into_tail(words, used):
    """(how far a number is beyond the beginning of the tail, words used); more of these than there are if too few."""
    while used + 2 <= words.size:
        first = np.float32(words[used] >> _UNUSED_BITS) * _UNIT
        second = np.float32(words[used + 1] >> _UNUSED_BITS) * _UNIT
        used += 2
        beyond = -_INVERSE_TAIL_32 * np.float32(math.log1p(-first))
        height = -np.float32(math.log1p(-second))
        if height + height > beyond * beyond:
            return beyond, used
    return np.float32(0), words.size + 1

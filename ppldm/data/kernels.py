"""What numba compiles at the first import, in two seconds, and keeps; one thread, safe to fork.

Resizing a part of a picture, with Pillow's pixels in a fraction of its time. A filter is linear and separable: each
output row is a weighted sum of a few input rows, and so for columns. With Pillow's weights, in its fixed point of 22
bits, columns first and rounded to 8 bits, then rows, the result equals a crop of Pillow's resized whole image in every
bit, at the cost of the crop only. "area" is the mean of what an output pixel covers, as OpenCV's INTER_AREA; where it
enlarges, it is "bilinear". The loops run along contiguous pixels, for the processor's vector units; hence a
transposition before each pass.

Standard normal numbers to the bits of numpy's, in less than half its time: those of
`Generator.standard_normal(dtype=float32)`, the ziggurat of Marsaglia and Tsang 2000 (Journal of Statistical Software
5(8)) in 256 layers of one area, from 32 random bits a number: 8 choose the layer, one the sign, 23 the place in it. A
place inside the next layer too, as 98.8 % are, is taken at once; else one more number decides, and in the tail of the
lowest layer two (Marsaglia 1964). Unlike numpy's, the loop does not branch on the sign.
"""

import math
from functools import lru_cache, partial

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from ..utils.machine.cpu import keep_compiled

# Arrays that are only read: each kernel has one form, whoever calls it. Processes that begin at once could mix up two.
_BYTES_2D, _BYTES_3D = (types.Array(types.uint8, ndim, "C", readonly=True) for ndim in (2, 3))
_FRACTION_BITS, _HALF, _BLACK, _WHITE = np.int32(22), np.int32(1 << 21), np.int32(0), np.int32(255)

# Pillow's filters, of a distance of 0 or more, with how far they reach: in output pixels where they shrink, in input
# pixels where they enlarge.
_PILLOW_FILTERS = {
    "lanczos": (3, lambda x: np.where(x < 3, np.sinc(x) * np.sinc(x / 3), 0)),
    "bicubic": (
        2,
        lambda x: np.where(x < 1, (1.5 * x - 2.5) * x * x + 1, np.where(x < 2, ((2.5 - 0.5 * x) * x - 4) * x + 2, 0)),
    ),
    "bilinear": (1, lambda x: np.maximum(1 - x, 0)),
}
INTERPOLATIONS = (*_PILLOW_FILTERS, "area")


def _compiled(signature):
    return partial(keep_compiled, partial(njit, signature, nogil=True))


def resize_crop(
    pixels: np.ndarray, scaled: tuple[int, int], left: int, top: int, interpolation: str, crop: np.ndarray
) -> None:
    """Fill `crop`, uint8 [3, H, W]: the rectangle at (left, top) of an image resized to `scaled`, (width, height).
    pixels: uint8 [height, width, 3]. Both arrays are contiguous. interpolation: one of INTERPOLATIONS."""
    _, crop_height, crop_width = crop.shape
    height, width, _ = pixels.shape
    (x, right), *columns = _weigh_crop(width, scaled[0], interpolation, left, crop_width)
    (y, bottom), *rows = _weigh_crop(height, scaled[1], interpolation, top, crop_height)
    lines = pixels.reshape(height, 3 * width)
    if interpolation == "area" and scaled[0] < width:
        # Rows first: no pixels but Pillow's ask for the other order, and less remains to be transposed.
        flat = np.empty((1, crop_height, 3 * (right - x)), np.uint8)
        _sum_rows(lines[y:bottom].reshape(bottom - y, 1, 3 * width), 3 * x, *rows, flat)
        turned = transpose(flat[0], 0, crop_height, 0, flat.shape[2])
        narrow = np.empty((3, crop_width, crop_height), np.uint8)
        _sum_rows(turned.reshape(right - x, 3, crop_height), 0, *columns, narrow)
        for channel, plane in zip(crop, narrow, strict=True):
            channel[:] = transpose(plane, 0, crop_width, 0, crop_height)
        return
    turned = transpose(lines, y, bottom, 3 * x, 3 * right)
    narrow = np.empty((3, crop_width, bottom - y), np.uint8)
    _sum_rows(turned.reshape(right - x, 3, bottom - y), 0, *columns, narrow)
    turned = transpose(narrow.reshape(3 * crop_width, bottom - y), 0, 3 * crop_width, 0, bottom - y)
    _sum_rows(turned.reshape(bottom - y, 3, crop_width), 0, *rows, crop)


def _weigh_crop(size: int, scaled: int, interpolation: str, start: int, length: int):
    """(input pixels that the output pixels [start, start + length) need, first of them for each, weights)."""
    firsts, weights = _weigh_axis(size, scaled, interpolation)
    firsts, weights = firsts[start : start + length], weights[start : start + length]
    begin, end = int(firsts[0]), int(firsts[-1]) + weights.shape[1]
    return (begin, end), firsts - begin, weights


@lru_cache(maxsize=64)  # some 200 kB each for a very large picture
def _weigh_axis(size: int, scaled: int, interpolation: str) -> tuple[np.ndarray, np.ndarray]:
    """(first input pixel of each output pixel, int64 [scaled]; weights from there on, int32 [scaled, taps])."""
    scale = size / scaled
    stretch = max(scale, 1.0)
    support, kernel = _PILLOW_FILTERS.get(interpolation, (None, None))
    reach = (stretch + 1) / 2 if interpolation == "area" else support * stretch
    centres = (np.arange(scaled) + 0.5) * scale
    begins = np.maximum((centres - reach + 0.5).astype(np.int64), 0)
    ends = np.minimum((centres + reach + 0.5).astype(np.int64), size)
    taps = (ends - begins).max()
    firsts = np.minimum(begins, size - taps)
    inputs = firsts[:, None] + np.arange(taps)
    distances = inputs - centres[:, None] + 0.5
    # In "area", the overlap of an input pixel with the `stretch` of them that an output pixel covers.
    area = interpolation == "area"
    weights = (reach - np.abs(distances)).clip(0, 1) if area else kernel(np.abs(distances * (1.0 / stretch)))
    weights[(inputs < begins[:, None]) | (inputs >= ends[:, None])] = 0
    weights /= weights.sum(axis=1, keepdims=True)
    return firsts, np.trunc(weights * (1 << int(_FRACTION_BITS)) + np.copysign(0.5, weights)).astype(np.int32)


@_compiled(types.void(_BYTES_3D, types.int64, types.int64[::1], types.int32[:, ::1], types.uint8[:, :, ::1]))
def _sum_rows(pixels, start, firsts, weights, result):
    """uint8 [inputs, channels, start + n or more] to [channels, outputs, n]: output i is the sum over k of
    pixels[firsts[i] + k, :, start:] * weights[i, k]."""
    outputs, taps = weights.shape
    channels, _, n = result.shape
    stop = start + n
    sums = np.empty(n, np.int32)
    for i in range(outputs):
        for channel in range(channels):
            sums[:] = _HALF
            for k in range(0, taps - 1, 2):  # two at a time: the sums are read and written half as often
                w0, w1 = weights[i, k], weights[i, k + 1]
                row0, row1 = pixels[firsts[i] + k, channel, start:stop], pixels[firsts[i] + k + 1, channel, start:stop]
                for j in range(n):
                    sums[j] += w0 * np.int32(row0[j]) + w1 * np.int32(row1[j])
            if taps % 2:
                w0, row0 = weights[i, taps - 1], pixels[firsts[i] + taps - 1, channel, start:stop]
                for j in range(n):
                    sums[j] += w0 * np.int32(row0[j])
            row = result[channel, i]
            for j in range(n):
                row[j] = min(max(sums[j] >> _FRACTION_BITS, _BLACK), _WHITE)


_SIDE = 16
_STRIP = 4 * _SIDE  # rows read at a time: what they fill of a row of the result is a line of the cache


@intrinsic
def _transpose_square(typing_context, source, source_step, target, target_step):
    """Transpose 16 x 16 bytes: addresses of the first and of its target, each with the bytes from row to row."""

    def generate(context, builder, signature, arguments):
        source, source_step, target, target_step = arguments
        vector, word = ir.VectorType(ir.IntType(8), _SIDE), source_step.type
        half = _SIDE // 2
        orders = ir.VectorType(ir.IntType(32), _SIDE)
        interleave = [
            ir.Constant(orders, [place + side for place in range(first, first + half) for side in (0, _SIDE)])
            for first in (0, half)
        ]

        def row(address, step, number):
            place = builder.add(address, builder.mul(step, ir.Constant(word, number)))
            return builder.inttoptr(place, vector.as_pointer())

        rows = [builder.load(row(source, source_step, number), align=1) for number in range(_SIDE)]
        for _ in range(4):
            pairs = list(zip(rows[:half], rows[half:], strict=True))
            rows = [builder.shuffle_vector(*pair, order) for pair in pairs for order in interleave]
        for number, one in enumerate(rows):
            builder.store(one, row(target, target_step, number), align=1)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, types.intp), generate


@_compiled(types.uint8[:, ::1](_BYTES_2D, *[types.int64] * 4))
def transpose(matrix, top, bottom, left, right):
    """A contiguous copy of the transpose of matrix[top:bottom, left:right], contiguous uint8. A square of 16 x
    16 bytes is loaded as sixteen vectors. Interleaving vector k with vector k + 8, for all k below 8, is a perfect
    shuffle of the 256 bytes; four of them exchange the two halves of a byte's place, which is (row, column). Loops over
    single bytes take four times as long. Written as LLVM's vectors, which it maps to any processor."""
    height, width = bottom - top, right - left
    result = np.empty((width, height), np.uint8)
    if height < _SIDE or width < _SIDE:
        for j in range(width):
            for i in range(height):
                result[j, i] = matrix[top + i, left + j]
        return result
    source, target = matrix[top:, left:].ctypes.data, result.ctypes.data
    step = matrix.strides[0]
    for strip in range(0, height, _STRIP):
        for column in range(0, width, _SIDE):
            j = min(column, width - _SIDE)  # the last square covers a part of the one before again
            for row in range(strip, min(strip + _STRIP, height), _SIDE):
                i = min(row, height - _SIDE)
                _transpose_square(source + i * step + j, step, target + j * height + i, height)
    return result


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


def _draw_words(generator: np.random.Generator, least: int) -> np.ndarray:
    """At least so many random uint32, in the order in which numpy uses the halves of its words of 64 bits."""
    return generator.bit_generator.random_raw((least + 1) // 2).astype("<u8", copy=False).view("<u4")


@_compiled(types.Tuple([types.float32, types.int64])(types.uint32[::1], types.int64))
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


@_compiled(types.boolean(types.uint32[::1], types.float32[::1]))
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

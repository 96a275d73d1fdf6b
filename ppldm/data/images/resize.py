"""Resizing a part of a picture, with Pillow's pixels in a fraction of its time.

A filter is linear and separable: each output row is a weighted sum of a few input rows, and so for columns. The weights
of an axis are Pillow's, in its fixed point of 22 bits; columns are done first and rounded to 8 bits, then rows, as
Pillow does. So the result equals a crop of Pillow's resized whole image in every bit, at the cost of the crop only.
"area" is the mean of what an output pixel covers, as OpenCV's INTER_AREA; where it enlarges, it is "bilinear".

The compiled loops run along contiguous pixels, for the processor's vector units; hence a transposition before each
pass (`transpose`). numba compiles them at their first use, in about a second. One thread; safe to
fork.
"""

from functools import lru_cache

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

_FRACTION_BITS, _HALF, _BLACK, _WHITE = np.int32(22), np.int32(1 << 21), np.int32(0), np.int32(255)
# Weights kept, of one axis each: some 200 kB for a very large picture.
_MAX_CACHED_AXES = 64


def _lanczos(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0)


def _bicubic(x: np.ndarray) -> np.ndarray:
    x = np.abs(x)
    return np.where(x < 1, (1.5 * x - 2.5) * x * x + 1, np.where(x < 2, ((2.5 - 0.5 * x) * x - 4) * x + 2, 0))


def _bilinear(x: np.ndarray) -> np.ndarray:
    return np.maximum(1 - np.abs(x), 0)


# Pillow's filters, with how far they reach: in output pixels where they shrink, in input pixels where they enlarge.
_PILLOW_FILTERS = {"lanczos": (3, _lanczos), "bicubic": (2, _bicubic), "bilinear": (1, _bilinear)}

INTERPOLATIONS = (*_PILLOW_FILTERS, "area")


def resize_crop(
    pixels: np.ndarray, scaled: tuple[int, int], left: int, top: int, interpolation: str, crop: np.ndarray
) -> None:
    """Fill `crop`, uint8 [3, H, W]: the rectangle at (left, top) of an image resized to `scaled`, (width, height).

    pixels: uint8 [height, width, 3]. Both arrays are contiguous. interpolation: one of INTERPOLATIONS.
    """
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


def compile_kernels() -> None:
    """Compile what `resize_crop` needs, so that processes forked afterwards need not."""
    resize_crop(np.zeros((2, 2, 3), np.uint8), (1, 1), 0, 0, "area", np.empty((3, 1, 1), np.uint8))


def _weigh_crop(size: int, scaled: int, interpolation: str, start: int, length: int):
    """(input pixels that the output pixels [start, start + length) need, first of them for each, weights)."""
    firsts, weights = _weigh_axis(size, scaled, interpolation)
    firsts, weights = firsts[start : start + length], weights[start : start + length]
    begin, end = int(firsts[0]), int(firsts[-1]) + weights.shape[1]
    return (begin, end), firsts - begin, weights


@lru_cache(maxsize=_MAX_CACHED_AXES)
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
    weights = (reach - np.abs(distances)).clip(0, 1) if area else kernel(distances * (1.0 / stretch))
    weights[(inputs < begins[:, None]) | (inputs >= ends[:, None])] = 0
    weights /= weights.sum(axis=1, keepdims=True)
    return firsts, np.trunc(weights * (1 << int(_FRACTION_BITS)) + np.copysign(0.5, weights)).astype(np.int32)


@njit(nogil=True)
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


@njit(nogil=True)
def transpose(matrix, top, bottom, left, right):
    """A contiguous copy of the transpose of matrix[top:bottom, left:right], uint8 of contiguous rows.

    A square of 16 x 16 bytes is loaded as sixteen vectors. Interleaving vector k with vector k + 8, for all k below 8,
    is a perfect shuffle of the 256 bytes; four of them exchange the two halves of a byte's place, which is (row,
    column). Loops over single bytes take four times as long. Written as LLVM's vectors, which it maps to any processor.
    """
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


@intrinsic
def _transpose_square(typing_context, source, source_step, target, target_step):
    """Transpose 16 x 16 bytes. Arguments: the addresses of the first of them and of where it goes, each followed by how
    many bytes its rows are apart."""

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

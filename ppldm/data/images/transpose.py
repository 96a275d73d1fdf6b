"""Transposing bytes, sixteen by sixteen in the registers of the processor's vector unit.

A square of 16 x 16 bytes is loaded as sixteen vectors. Interleaving vector k with vector k + 8, for all k below 8, is a
perfect shuffle of the 256 bytes; four of them exchange the two halves of a byte's place, which is (row, column). Loops
over single bytes take four times as long. Written as LLVM's vectors, which it maps to any processor.
"""

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

_SIDE = 16
_STRIP = 4 * _SIDE  # rows read at a time: what they fill of a row of the result is a line of the cache


@njit(nogil=True)
def transpose(matrix, top, bottom, left, right):
    """A contiguous copy of the transpose of matrix[top:bottom, left:right], uint8 of contiguous rows."""
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

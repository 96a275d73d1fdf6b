"""Products of matrices in which a row has the same bits among any number of rows, and with any number of threads.

oneDNN's products for processors with AVX2 (`gemm:jit`) round a row by its place in a block of six, and share the sums
of small ones among threads. So each thread computes whole products by itself: groups of rows of a large one, or whole
ones of many. Those for AVX-512 have the same bits as they are.
"""

import ctypes
from itertools import product as grid
from math import ceil, prod

from .kernels import kernel
from .onednn import NONE, Operation, is_own_product, layout, num_threads, scratch, shielded, then

_GROUP = 12  # rows: twice six, since the kernel halves a rest of up to 96
_COLUMNS = 16  # which a kernel computes side by side

Strided = tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides of a tensor, in elements


class _Spread:
    """Operations on parts of tensors, which the threads share."""

    def __init__(self, kinds: list[tuple[tuple, dict]], parts: list[tuple[int, ...]], overlaps: bool = False):
        """kinds: the operations' description and tensors. parts: of each its kind, and the bytes from each tensor's
        address to where the part begins. overlaps: the last one has rows of the one before, and its thread."""
        threads = min(num_threads(), max(1, len(parts) - overlaps))
        self._operations = [Operation("matmul", *kind) for kind in kinds for _ in range(threads)]
        handles = [number for one in self._operations for number in one.handles()]
        self._width = len(kinds[0][1])
        head = 0, len(parts), self._width, threads, *[0] * self._width
        numbers = *head, *(number for part in parts for number in part), *handles
        self._numbers = (ctypes.c_double * len(numbers))(*numbers)

    def __call__(self, *addresses: int) -> None:
        self._numbers[0], self._numbers[4 : 4 + self._width] = 0, list(addresses)
        spread = kernel("spread")  # compiled by threads that get signals
        with shielded():
            spread.run(self._numbers)
        if self._numbers[0]:
            raise RuntimeError(f"a product of oneDNN failed with status {self._numbers[0]:.0f}")


class _FewRows:
    """A product of a group of rows for fewer of them, which are copied."""

    def __init__(self, rows: int, widths: tuple[int, int], product: _Spread):
        self._sizes, self._product = [(4 * rows * width, 4 * _GROUP * width) for width in widths], product

    def __call__(self, x: int, *between_and_y: int) -> None:
        *between, y = between_and_y
        (x_size, x_room), (y_size, y_room) = self._sizes
        held_x, held_y = scratch("few rows", x_room), scratch("their products", y_room)
        ctypes.memmove(held_x, x, x_size)
        self._product(held_x, *between, held_y)
        ctypes.memmove(y, held_y, y_size)


def rows_by_matrix(rows: int, matrix: Strided, with_bias: bool):
    """x [R, I] by a matrix [I, O], and a bias [O] or none, to y [R, O]; called with the addresses of all, in order."""
    inputs, outputs = matrix[0]
    biases = {"bias": layout((1, outputs))} if with_bias else {}

    def of(count: int):
        x, y = layout((count, inputs)), layout((count, outputs))
        tensors = {"src": x, "weights": layout(*matrix), **biases, "dst": y}
        return (x, tensors["weights"], biases.get("bias", NONE), y, NONE), tensors

    whole = Operation("matmul", *of(rows))
    if not is_own_product(whole.description):
        return whole
    starts = _share_out(max(rows, _GROUP))
    sizes = sorted(set(starts.values()))
    offsets = {first: (4 * first * inputs, *(0,) * (1 + with_bias), 4 * first * outputs) for first in starts}
    parts = [(sizes.index(size), *offsets[first]) for first, size in starts.items()]
    spread = _Spread([of(size) for size in sizes], parts, overlaps=max(rows, _GROUP) % _GROUP > 0)
    return spread if rows >= _GROUP else _FewRows(rows, (inputs, outputs), spread)


def _share_out(rows: int) -> dict[int, int]:
    """Sizes of parts by their first rows: whole groups for each thread; the last group may have rows of the one before,
    which get the same bits twice."""
    groups = rows // _GROUP
    each = ceil(groups / num_threads())
    parts = {first * _GROUP: min(each, groups - first) * _GROUP for first in range(0, groups, each)}
    return parts if rows % _GROUP == 0 else parts | {rows - _GROUP: _GROUP}


def products(one: Strided, other: Strided, result: Strided, scale: float | None = None, added: Strided | None = None):
    """Of matrices [b, h, N, K] and [b, h, K, M] to [b, h, N, M], times `scale`, plus `added`; other sizes of b and h
    than the result's, and any of what is added, may be 1. Called with the addresses of all."""
    named = {"src": one, "weights": other, "dst": result} | ({} if added is None else {"added": added})

    def of(tensors: dict[str, Strided]):
        laid = {name: layout(*strided) for name, strided in tensors.items()}
        attributes = NONE if scale is None else then(scale, laid.get("added"))
        return (laid["src"], laid["weights"], NONE, laid["dst"], attributes), laid

    whole = Operation("matmul", *of(named))
    if not is_own_product(whole.description):
        return whole
    (*batch, _, columns), _ = result
    each = _COLUMNS * ceil(columns / _COLUMNS / ceil(num_threads() / prod(batch)))
    parts = {first: min(each, columns - first) for first in range(0, columns, each)}
    sizes = sorted(set(parts.values()))

    def of_columns(count: int):
        """With so many columns in all tensors that have the result's."""
        widths = {name: count if name != "src" and shape[3] > 1 else shape[3] for name, (shape, _) in named.items()}
        return of({name: ((shape[2], widths[name]), strides[2:]) for name, (shape, strides) in named.items()})

    def offset(name: str, place: tuple[int, int], column: int) -> int:
        shape, strides = named[name]
        at = *place, 0, 0 if name == "src" else column
        return 4 * sum(number * step for number, size, step in zip(at, shape, strides, strict=True) if size > 1)

    return _Spread(
        [of_columns(size) for size in sizes],
        [
            (sizes.index(size), *(offset(name, place, first) for name in named))
            for place in grid(*map(range, batch))
            for first, size in parts.items()
        ],
    )


def over_channels(x: tuple[int, ...], weight: Strided):
    """The convolution of 1 x 1 of x [B, I, ...] by a weight [O, I]; called with the addresses of x, weight, a bias [O]
    or none, and the result. None where the threads need not share it by this file."""
    (samples, inputs, *sides), (outputs, _) = x, weight[0]

    def pictures(channels):
        size = channels * prod(sides)
        return (samples, 1, channels, prod(sides)), (size, size, prod(sides), 1)

    matrix = (1, 1, *weight[0]), (outputs * inputs, outputs * inputs, *weight[1])
    product = products(matrix, pictures(inputs), pictures(outputs))
    if not isinstance(product, _Spread):
        return None

    def convolve(x: int, weight: int, *bias_and_y: int) -> None:
        *bias, y = bias_and_y
        product(weight, x, y)
        if bias:
            kernel("add_bias")(y, *bias, samples, outputs, prod(sides))

    return convolve

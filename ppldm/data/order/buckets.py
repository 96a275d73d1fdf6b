"""Which places have which shape: the i-th place of a shape, and back, at a byte a place.

Rows of one shape are a *bucket* (`ppldm.data.shapes` says which); `codes` has the number of its shape for each place
among the selected rows. Beside them lie the counts of each shape before every block of places. They lead to the block,
and the block's codes to the place, so that nothing is as long as a list of all places, and a look-up reads one block.
"""

import numpy as np

_BLOCK = 2048  # places
_BLOCKS_AT_ONCE = 512  # that a look-up has in memory, a byte a place
_COUNTED_AT_ONCE = 512 * _BLOCK  # places


class BucketIndex:
    """The shape of every selected row.

    shapes: (height, width) in pixels of each shape. codes: uint8 [selected rows], the number of a row's shape.
    list_sizes: selected rows of each list. `sizes`: int64 [lists, shapes], how many rows each list has of each shape.
    """

    def __init__(self, shapes: list[tuple[int, int]], codes: np.ndarray, list_sizes: list[int]):
        if sum(list_sizes) != len(codes):
            raise ValueError(f"{len(codes)} rows have a shape, and the lists have {sum(list_sizes)}")
        if len(codes) and codes.max() >= len(shapes):
            raise ValueError(f"a row has shape number {codes.max()} of {len(shapes)} shapes")
        self.shapes, self.codes = shapes, codes
        num_whole = len(codes) // _BLOCK
        self._whole = codes[: num_whole * _BLOCK].reshape(num_whole, _BLOCK)
        self._last = np.full(_BLOCK, 255, dtype=np.uint8)  # which is no shape's number, there being no more than 255
        self._last[: len(codes) - num_whole * _BLOCK] = codes[num_whole * _BLOCK :]
        self._before = _count_before_blocks(codes, len(shapes))
        self.sizes = self.count_between(np.cumsum([0, *list_sizes]))
        self._before_lists = (np.cumsum(self.sizes, axis=0) - self.sizes).T

    def shape(self, place: int) -> tuple[int, int]:
        """(height, width) in pixels."""
        return self.shapes[self.codes[place]]

    def count_between(self, bounds: np.ndarray) -> np.ndarray:
        """How many rows of each shape lie between one of the places `bounds`, ascending, and the next. int64
        [bounds - 1, shapes]."""
        before = self._before[:, bounds // _BLOCK].T.copy()
        for counts, place in zip(before, bounds.tolist(), strict=True):
            counts += np.bincount(self.codes[place // _BLOCK * _BLOCK : place], minlength=len(self.shapes))
        return np.diff(before, axis=0)

    def places(self, code: int, indices: np.ndarray, list_number: int = 0) -> np.ndarray:
        """Where the rows of a shape lie, int64 [n]: the indices count them from the first of a list on."""
        indices = indices + self._before_lists[code, list_number]
        found = [
            self._look_up(code, indices[start : start + _BLOCKS_AT_ONCE])
            for start in range(0, len(indices), _BLOCKS_AT_ONCE)
        ]
        return np.concatenate(found) if found else np.empty(0, dtype=np.int64)

    def index(self, place: int, list_number: int = 0) -> int:
        """How many rows of the shape of `place` lie before it from the first of a list on: the inverse of `places`."""
        code = int(self.codes[place])
        return self._count_before(code, place) - int(self._before_lists[code, list_number])

    def _look_up(self, code: int, indices: np.ndarray) -> np.ndarray:
        before = self._before[code]
        blocks = np.searchsorted(before, indices, side="right") - 1
        in_whole = blocks < len(self._whole)
        codes = np.empty((len(blocks), _BLOCK), dtype=np.uint8)
        codes[in_whole] = self._whole[blocks[in_whole]]
        codes[~in_whole] = self._last
        found = np.flatnonzero(codes == code)
        firsts = np.searchsorted(found, np.arange(len(blocks)) * _BLOCK)
        return found[firsts + indices - before[blocks]] % _BLOCK + blocks * _BLOCK

    def _count_before(self, code: int, place: int) -> int:
        block = place // _BLOCK
        return int(self._before[code, block]) + int(np.count_nonzero(self.codes[block * _BLOCK : place] == code))


def _count_before_blocks(codes: np.ndarray, num_shapes: int) -> np.ndarray:
    """How many places of each shape lie before each block. int64 [shapes, blocks]."""
    counts = np.zeros((num_shapes, len(codes) // _BLOCK + 1), dtype=np.int64)
    for start in range(0, len(codes), _COUNTED_AT_ONCE):
        some = codes[start : start + _COUNTED_AT_ONCE].astype(np.int64)
        some += np.arange(len(some)) // _BLOCK * num_shapes
        num_blocks = -(-len(some) // _BLOCK)
        table = np.bincount(some, minlength=num_blocks * num_shapes).reshape(num_blocks, num_shapes).T
        counts[:, start // _BLOCK : start // _BLOCK + num_blocks] = table
    return np.cumsum(counts, axis=1) - counts

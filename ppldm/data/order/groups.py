"""The order of rows of several shapes: whole groups of one shape, a pure function of (seed, position).

A *group* is g rows of one shape. Each bucket (all rows of a shape) runs through epochs of its own `Order`, one after
the other, cut into groups: what one epoch leaves over, the next group begins with, so that nothing is lost, repeated or
padded. After e epochs of n rows, floor(e * n / g) groups are used.

Whose turn it is: an epoch of all buckets is cut into slices of about `_SLICE` groups, S of them. After s slices,
counted from the first epoch on, bucket b has used floor(s * n_b / (S * g)) groups, which after whole epochs is the
number above; all buckets together have used the sum, by which the slice of a group is found. The turns of a slice are
permuted. A bucket's own groups stay in their order, so that rows are read from one window of each bucket at a time.

With weights, each list has buckets and turns of its own, and each cycle of 10,000 groups holds every list in
proportion, as that of `Mix` does of rows.
"""

from bisect import bisect_right
from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from ...utils.rng import Stream, make_rng
from .rows import (
    RUN_LENGTH,
    Mix,
    Order,
    Successors,
    bucket_window_runs,
    flow,
    others_after,
    others_before,
    permutation,
    position_of_turn,
    proportional_shares,
    turns_of_lists,
)

_BLOCK = 2048  # places
_BLOCKS_AT_ONCE = 512  # that a look-up has in memory, a byte a place
_COUNTED_AT_ONCE = 512 * _BLOCK  # places


class BucketIndex:
    """The shape of every selected row, the place of the i-th row of a shape, and back, at a byte a row.

    Beside the codes lie the counts of each shape before every block of places. They lead to the block, and the block's
    codes to the place, so that nothing is as long as a list of all places, and a look-up reads one block.

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


_SLICE = 4096  # groups


class Groups:
    """The endless global sequence of (epoch, place), in groups of rows of one shape; as `Mix`, which has none.

    A place is counted among the selected rows of all lists; its epoch is that of its bucket. weights: one number of 0
    or more for each list, or None, where the lists share their buckets.
    """

    def __init__(self, buckets: BucketIndex, weights: list[float] | None, seed: int, group_size: int):
        self.num_rows, self.seed, self.group_size = len(buckets.codes), seed, group_size
        self._ends = np.cumsum(buckets.sizes.sum(1))
        if weights is None:
            self._lists, self._shares = [_Turns(buckets, buckets.sizes.sum(0).tolist(), 0, seed, group_size)], None
        else:
            self._shares = proportional_shares(weights, buckets.sizes.sum(1).tolist())
            self._lists = [
                _Turns(buckets, own, number, seed, group_size) if any(own) else None
                for number, own in enumerate(buckets.sizes.tolist())
            ]

    def samples(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """(epochs int64 [n], places int64 [n]) at positions [start, stop) of the sequence, n = stop - start."""
        first, last = start // self.group_size, -(-stop // self.group_size)
        if self._shares is None:
            both = self._lists[0].groups(first, last)
        else:
            both = np.empty((2, last - first, self.group_size), dtype=np.int64)
            for number, before, turns in turns_of_lists(self._shares, self.seed, first, last):
                both[:, turns] = self._lists[number].groups(before, before + len(turns))
        epochs, places = both.reshape(2, -1)[:, start - first * self.group_size : stop - first * self.group_size]
        return epochs, places

    def position(self, epoch: int, place: int) -> int | None:
        """Where a place stands in the sequence in an epoch of its bucket; None where its list has no turn. The inverse
        of `samples`."""
        if self._shares is None:
            group, number = self._lists[0].find(epoch, place)
        else:
            own = int(np.searchsorted(self._ends, place, side="right"))
            if not self._shares[own]:
                return None
            turn, number = self._lists[own].find(epoch, place)
            group = position_of_turn(self._shares, self.seed, own, turn)
        return group * self.group_size + number


class BucketSuccessors:
    """What follows a row in the order of the rows of its own list and shape, as `Groups` runs through it; after them
    come those of the other lists that are drawn from. buckets, weights, seed: as of `Groups`."""

    def __init__(self, buckets: BucketIndex, weights: list[float] | None, seed: int):
        self._buckets = buckets
        self._starts = np.cumsum([0, *buckets.sizes.sum(1).tolist()])
        self._orders = [_orders(own, number, seed) for number, own in enumerate(buckets.sizes.tolist())]
        self._drawn_from = [number for number in range(len(self._orders)) if weights is None or weights[number]]

    def after(self, epoch: int, place: int) -> Iterator[int]:
        """The other places of the shape, each once: of the list those that follow in the epoch, then the epoch's first;
        then those of other lists."""
        own, code = int(np.searchsorted(self._starts, place, side="right")) - 1, int(self._buckets.codes[place])
        order = self._orders[own][code]
        position = order.position(epoch, self._buckets.index(place, own))
        for index in others_after(order, epoch, position):
            yield int(self._buckets.places(code, np.array([index]), own)[0])
        for number in self._drawn_from:
            if number != own and (other := self._orders[number][code]):
                for index in others_after(other, epoch, -1):
                    yield int(self._buckets.places(code, np.array([index]), number)[0])

    def before(self, epoch: int, place: int) -> Iterator[int]:
        """The other places of the list and shape, each once, backwards in the order in which `after` goes through
        them: for which a row stands in, if those between are bad."""
        own, code = int(np.searchsorted(self._starts, place, side="right")) - 1, int(self._buckets.codes[place])
        order = self._orders[own][code]
        for index in others_before(order, epoch, order.position(epoch, self._buckets.index(place, own))):
            yield int(self._buckets.places(code, np.array([index]), own)[0])

    def elsewhere(self, place: int) -> Iterator[int]:
        """A place of each other list that has the shape, for whose rows the row may stand in."""
        own, code = int(np.searchsorted(self._starts, place, side="right")) - 1, int(self._buckets.codes[place])
        for number, orders in enumerate(self._orders):
            if number != own and orders[code]:
                yield int(self._buckets.places(code, np.array([0]), number)[0])


class _Turns:
    """The endless sequence of groups of one list, or of several that share their buckets.

    sizes: rows of each shape. list_number: of the list, the first of those that share.
    """

    def __init__(self, buckets: BucketIndex, sizes: list[int], list_number: int, seed: int, group_size: int):
        self._buckets, self._sizes, self._group_size = buckets, sizes, group_size
        self._list_number, self._seed = list_number, seed
        self._slices = -(-sum(sizes) // (group_size * _SLICE))  # of an epoch
        self._orders = _orders(sizes, list_number, seed)

    def groups(self, start: int, stop: int) -> np.ndarray:
        """Groups [start, stop) of the sequence: epochs and places, int64 [2, n, group size]."""
        codes, first_turns = self._codes(start, stop)
        found = np.empty((2, stop - start, self._group_size), dtype=np.int64)
        for code, first in first_turns.items():
            turns = np.flatnonzero(codes == code)
            rows = first * self._group_size, (first + len(turns)) * self._group_size
            epochs, indices = flow(self._orders[code], *rows)
            places = self._buckets.places(code, indices, self._list_number)
            found[0, turns], found[1, turns] = (one.reshape(len(turns), -1) for one in (epochs, places))
        return found

    def find(self, epoch: int, place: int) -> tuple[int, int]:
        """(the group that holds a place in an epoch of its bucket, which of its rows that is): the inverse of
        `groups`."""
        code = int(self._buckets.codes[place])
        order, size = self._orders[code], self._sizes[code]
        position = epoch * size + order.position(epoch, self._buckets.index(place, self._list_number))
        turn, number = divmod(position, self._group_size)
        cut = self._slices * self._group_size
        number_of_slice = -(-(turn + 1) * cut // size) - 1  # the last before which no more than `turn` are used
        used = self._used(number_of_slice)
        own = self._permuted(number_of_slice)
        return sum(used) + int(np.flatnonzero(own == code)[turn - used[code]]), number

    def _permuted(self, number: int) -> np.ndarray:
        used = self._used(number + 1), self._used(number)
        return _permuted_turns(*map(tuple, used), self._seed, self._list_number, number)

    def _codes(self, start: int, stop: int) -> tuple[np.ndarray, dict[int, int]]:
        """(the shape of each of groups [start, stop); by shape, how many groups of it come before its first here)."""
        codes, first_turns, number = [], {}, self._find_slice(start)
        while start < stop:
            first, used = self._count(number), self._used(number)
            own = self._permuted(number)
            some = own[start - first : stop - first]
            for code in np.unique(some).tolist():
                if code not in first_turns:
                    first_turns[code] = used[code] + int(np.count_nonzero(own[: start - first] == code))
            codes.append(some)
            start, number = start + len(some), number + 1
        return np.concatenate(codes) if codes else np.empty(0, dtype=np.uint8), first_turns

    def _find_slice(self, group: int) -> int:
        """The slice that a group is in: the last before which no more than `group` groups are used."""
        rows, whole = group * self._group_size, sum(self._sizes)
        least = max(0, rows * self._slices // whole - 1)
        most = (rows + len(self._sizes) * self._group_size) * self._slices // whole + 1
        return bisect_right(range(least, most + 1), group, key=self._count) + least - 1

    def _count(self, number: int) -> int:
        return sum(self._used(number))

    def _used(self, number: int) -> list[int]:
        """The groups of each shape that come before a slice."""
        cut = self._slices * self._group_size
        return [number * size // cut for size in self._sizes]


def make_order(
    list_sizes: list[int],
    weights: list[float] | None,
    seed: int,
    buckets: BucketIndex | None = None,
    group_size: int = 1,
) -> Mix | Groups:
    """The order of a run's rows. Of one shape alone, any rows make a batch."""
    return Groups(buckets, weights, seed, group_size) if _differ(buckets) else Mix(list_sizes, weights, seed)


def make_successors(
    list_sizes: list[int], weights: list[float] | None, seed: int, buckets: BucketIndex | None = None
) -> Successors | BucketSuccessors:
    """What stands in for a row in that order."""
    return BucketSuccessors(buckets, weights, seed) if _differ(buckets) else Successors(list_sizes, weights, seed)


def _differ(buckets: BucketIndex | None) -> bool:
    return buckets is not None and np.count_nonzero(buckets.sizes.sum(0)) > 1


# (list, shape) is (epoch, row) of the stream for the seeds of orders, (list, 2**32 + s) for slice s.
def _orders(sizes: list[int], list_number: int, seed: int) -> list[Order | None]:
    """The order of each shape's rows in a list, None without any. Each has a seed of its own, as orders of equal size
    and seed are alike."""
    window_runs, orders = bucket_window_runs(max(np.count_nonzero(sizes), 1)), []
    for code, size in enumerate(sizes):
        own_seed = int(make_rng(seed, Stream.GROUP, list_number, code).bit_generator.random_raw())
        orders.append(Order(size, own_seed, RUN_LENGTH, window_runs) if size else None)
    return orders


@lru_cache(maxsize=64)
def _permuted_turns(
    used_after: tuple[int, ...], used_before: tuple[int, ...], seed: int, list_number: int, number: int
) -> np.ndarray:
    """The shape of each group of a slice. uint8 [groups]."""
    counts = np.subtract(used_after, used_before)
    turns = np.repeat(np.arange(len(counts), dtype=np.uint8), counts)
    return turns[permutation(len(turns), seed, Stream.GROUP, list_number, (1 << 32) + number)]

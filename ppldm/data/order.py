"""Which row comes when: a pure function of (seed, position).

`Order` is a windowed shuffle. The rows are cut into runs of consecutive rows, so that disks read forward; the runs are
permuted; and the rows are permuted inside windows of permuted runs. A look-up costs one window, not the data set.
`Mix` turns one or several lists of rows, of one shape or of several, into one endless sequence. `StepSampler` tells
which samples a rank trains on, a pure function of (order, batch sizes, world, step): resuming is a start step.

`Successors` stand in for rows that cannot be used. `uses_of` tells in which updates a place was used, as the inverse of
`StepSampler`: where a place stands in an epoch is computed, not searched for. It also stood in for the bad rows just
before it in the order of its list and shape: these are tried, the nearest first, until another row stood in for one.

A permutation is the stable argsort of raw words of Philox, which is defined by its paper, not by a version of numpy.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain, count
from typing import Any

import numpy as np

from ..utils.errors import ConfigError, DataError
from ..utils.processes.ranks import World
from ..utils.rng import Stream, make_rng
from ..utils.text import count_of
from .inputs import Strata
from .shapes import BucketIndex

RUN_LENGTH, WINDOW_RUNS = 256, 64
_ROWS_AHEAD = 100  # looked up at a time
_SLICE = 4096  # groups

_CYCLE_LENGTH = 10_000
_BUCKETS_RUNS, _LEAST_RUNS = 256, 8  # read from at a time by all buckets of a list; by each of them


class Order:
    """A permutation of [0, num_rows) for each epoch."""

    def __init__(self, num_rows: int, seed: int, run_length: int = RUN_LENGTH, window_runs: int = WINDOW_RUNS):
        if num_rows < 1:
            raise DataError("there are no rows to put in order; check the filelist")
        self.num_rows, self.seed, self.run_length, self.window_runs = num_rows, seed, run_length, window_runs
        # Of its own: among many orders that are read from in turn, a shared cache would drop what is needed next.
        self._runs = lru_cache(maxsize=2)(self._permute_runs)
        self._window = lru_cache(maxsize=4)(self._permute_window)

    def __reduce__(self):
        return Order, (self.num_rows, self.seed, self.run_length, self.window_runs)

    def rows(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """The row numbers at positions [start, stop) of an epoch, 0 <= start <= stop <= num_rows. int64."""
        if not 0 <= start <= stop <= self.num_rows:
            raise IndexError(f"positions {start} to {stop} are not in an epoch of {self.num_rows} rows")
        pieces, window = [], start // (self.run_length * self.window_runs)
        while start < stop:
            first, rows = self._window(epoch, window)
            pieces.append(rows[max(0, start - first) : stop - first])
            start = max(start, first + len(rows))
            window += 1
        return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)

    def position(self, epoch: int, row: int) -> int:
        """Where a row stands in an epoch: the inverse of `rows`."""
        if not 0 <= row < self.num_rows:
            raise IndexError(f"there are rows 0 to {self.num_rows - 1}, no row {row}")
        runs, _ = self._runs(epoch)
        place = int(np.flatnonzero(runs == row // self.run_length)[0])
        first, rows = self._window(epoch, place // self.window_runs)
        return first + int(np.flatnonzero(rows == row)[0])

    # Row 0 of the stream is for the runs, row 1 + w for window w.
    def _permute_runs(self, epoch: int) -> tuple[np.ndarray, int]:
        """The order of the runs, and the place in it of the last run, the only one that may be short."""
        num_runs = -(-self.num_rows // self.run_length)
        runs = permutation(num_runs, self.seed, Stream.ORDER, epoch, 0)
        return runs, int(np.flatnonzero(runs == num_runs - 1)[0])

    def _permute_window(self, epoch: int, window: int) -> tuple[int, np.ndarray]:
        """(position of the window's first row in its epoch, the window's row numbers in order)."""
        runs, place_of_last = self._runs(epoch)
        first_run = window * self.window_runs
        missing = len(runs) * self.run_length - self.num_rows if place_of_last < first_run else 0
        chosen = runs[first_run : first_run + self.window_runs, None]
        rows = (chosen * self.run_length + np.arange(self.run_length)).ravel()
        rows = rows[rows < self.num_rows]
        rows = rows[permutation(len(rows), self.seed, Stream.ORDER, epoch, 1 + window)]
        rows.flags.writeable = False
        return first_run * self.run_length - missing, rows


class Mix:
    """The endless global sequence of (epoch, row); `row` counts through all lists, one after the other.

    Without weights it is epoch after epoch of one `Order` over the rows of all lists: each row once an epoch, and the
    last batch of an epoch is filled from the next. With weights, each cycle of 10,000 positions holds every list in
    proportion, in an order permuted by the seed, and each list runs through epochs of its own.

    Rows of several shapes come in groups of `group_size` rows of one shape; of one shape alone, any rows make a batch,
    and `group_size` is None. Each bucket (all rows of a shape, with weights of a list) runs through epochs of its own
    `Order`, one after the other, cut into groups: what one epoch leaves over, the next group begins with. After e
    epochs of n rows, floor(e * n / g) groups of g rows are used. A cycle is then one of 10,000 groups.

    list_sizes: rows of each list. weights: one number of 0 or more for each, or None.
    """

    def __init__(
        self,
        list_sizes: list[int],
        weights: list[float] | None,
        seed: int,
        buckets: BucketIndex | None = None,
        group_size: int = 1,
    ):
        self.num_rows, self.seed, self._ends = sum(list_sizes), seed, np.cumsum(list_sizes)
        self._shares = None if weights is None else proportional_shares(weights, list_sizes)
        self.group_size = group_size if differ(buckets) else None
        self._lists: list[Any]
        if self.group_size:
            sizes = buckets.sizes.sum(0, keepdims=True) if weights is None else buckets.sizes
            turns = partial(Turns, buckets, seed=seed, group_size=group_size)
            self._lists = [turns(own, number) if any(own) else None for number, own in enumerate(sizes.tolist())]
        else:
            orders = [Order(self.num_rows, seed)] if weights is None else own_orders(list_sizes, seed)
            firsts = (self._ends - list_sizes).tolist()
            self._lists = [order and _Flow(order, first) for order, first in zip(orders, firsts, strict=False)]

    def samples(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """(epochs int64 [n], rows int64 [n]) at positions [start, stop) of the sequence, n = stop - start."""
        size = self.group_size or 1
        first, last = start // size, -(-stop // size)
        if self._shares is None:
            both = self._lists[0].groups(first, last)
        else:
            both = np.empty((2, last - first, size), dtype=np.int64)
            for number, before, turns in turns_of_lists(self._shares, self.seed, first, last):
                both[:, turns] = self._lists[number].groups(before, before + len(turns))
        epochs, rows = both.reshape(2, -1)[:, start - first * size : stop - first * size]
        return epochs, rows

    def position(self, epoch: int, row: int) -> int | None:
        """Where a row stands in the sequence in an epoch of its list, bucket or all; None if its list has no turn."""
        own = 0 if self._shares is None else int(np.searchsorted(self._ends, row, side="right"))
        if self._shares and not self._shares[own]:
            return None
        group, number = self._lists[own].find(epoch, row)
        if self._shares:
            cycle, turn = divmod(group, self._shares[own])
            turns = np.flatnonzero(_cycle(self._shares, self.seed, cycle) == own)
            group = cycle * _CYCLE_LENGTH + int(turns[turn])
        return group * (self.group_size or 1) + number


class _Flow:
    """Epoch after epoch of one order, of rows from `first` on, as groups of one row; as `Turns`, which has larger."""

    def __init__(self, order: Order, first: int):
        self._order, self._first = order, first

    def groups(self, start: int, stop: int) -> np.ndarray:
        """Epochs and rows at positions [start, stop), int64 [2, n, 1]."""
        epochs, rows = flow(self._order, start, stop)
        return np.stack([epochs, rows + self._first])[..., None]

    def find(self, epoch: int, row: int) -> tuple[int, int]:
        """(the position of a row in an epoch, 0): the inverse."""
        return epoch * self._order.num_rows + self._order.position(epoch, row - self._first), 0


class Turns:
    """The endless sequence of groups of one list, or of several that share their buckets. sizes: rows of each shape.
    list_number: of the list, the first of those that share. An epoch of all buckets is cut into slices of about
    `_SLICE` groups, S of them. After s slices, counted from the first epoch on, bucket b has used floor(s * n_b / (S *
    g)) groups, which after whole epochs is all of them; the sum over all buckets tells the slice of a group. The turns
    of a slice are permuted; a bucket's own groups stay in order, so that one window of each is read from at a time."""

    def __init__(self, buckets: BucketIndex, sizes: list[int], list_number: int, seed: int, group_size: int):
        self._buckets, self._sizes, self._group_size = buckets, sizes, group_size
        self._list_number, self._seed = list_number, seed
        self._slices = -(-sum(sizes) // (group_size * _SLICE))  # of an epoch
        self._orders = _orders_of_shapes(sizes, list_number, seed)

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
        """(the group of a place in an epoch of its bucket, which of its rows that is): the inverse of `groups`."""
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
        counts = np.subtract(self._used(number + 1), self._used(number))
        return _permuted_turns(tuple(counts.tolist()), self._seed, self._list_number, number)

    def _codes(self, start: int, stop: int) -> tuple[np.ndarray, dict[int, int]]:
        """(the shape of each of groups [start, stop); by shape, how many groups of it come before its first here)."""
        codes, first_turns, number = [], {}, self._find_slice(start)
        while start < stop:
            used = self._used(number)
            first = sum(used)
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
        return bisect_right(range(least, most + 1), group, key=lambda number: sum(self._used(number))) + least - 1

    def _used(self, number: int) -> list[int]:
        """The groups of each shape that come before a slice."""
        cut = self._slices * self._group_size
        return [number * size // cut for size in self._sizes]


def differ(buckets: BucketIndex | None) -> bool:
    """Whether rows have several shapes."""
    return buckets is not None and np.count_nonzero(buckets.sizes.sum(0)) > 1


def bucket_window_runs(num_buckets: int) -> int:
    """The runs of a window of each of a list's buckets: of many buckets fewer, as all are read from at a time."""
    return max(_LEAST_RUNS, min(WINDOW_RUNS, _BUCKETS_RUNS // num_buckets))


def own_orders(list_sizes: list[int], seed: int) -> list[Order | None]:
    """The order of each list, None without rows; each of its own seed, lest equal sizes be permuted alike."""
    seeds = [int(make_rng(seed, Stream.MIX, row=i).bit_generator.random_raw()) for i in range(len(list_sizes))]
    return [Order(size, own_seed) if size else None for size, own_seed in zip(list_sizes, seeds, strict=True)]


# (list, shape) is (epoch, row) of the stream for the seeds of orders, (list, 2**32 + s) for slice s.
def _orders_of_shapes(sizes: list[int], list_number: int, seed: int) -> list[Order | None]:
    """The order of each shape's rows in a list, None without any; each of a seed of its own."""
    window_runs, orders = bucket_window_runs(max(np.count_nonzero(sizes), 1)), []
    for code, size in enumerate(sizes):
        own_seed = int(make_rng(seed, Stream.GROUP, list_number, code).bit_generator.random_raw())
        orders.append(Order(size, own_seed, RUN_LENGTH, window_runs) if size else None)
    return orders


def flow(order: Order, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """(epochs, rows) at positions [start, stop) of epoch after epoch of one order."""
    epochs = np.arange(start, stop, dtype=np.int64) // order.num_rows
    pieces = [
        order.rows(epoch, max(start - epoch * order.num_rows, 0), min(stop - epoch * order.num_rows, order.num_rows))
        for epoch in range(start // order.num_rows, -(-stop // order.num_rows))
    ]
    return epochs, np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)


def permutation(size: int, seed: int, stream: Stream, epoch: int, row: int) -> np.ndarray:
    """The stable argsort of `size` raw words of (seed, stream, epoch, row). int64 [size]."""
    words = make_rng(seed, stream, epoch, row).bit_generator.random_raw(size)
    return np.argsort(words, kind="stable")


@lru_cache(maxsize=64)
def _permuted_turns(counts: tuple[int, ...], seed: int, list_number: int, number: int) -> np.ndarray:
    """The shape of each group of a slice, which has so many of each. uint8 [groups]."""
    turns = np.repeat(np.arange(len(counts), dtype=np.uint8), counts)
    return turns[permutation(len(turns), seed, Stream.GROUP, list_number, (1 << 32) + number)]


def proportional_shares(weights: list[float], list_sizes: list[int]) -> tuple[int, ...]:
    """How many positions of a cycle each list has: nearest to its weight, by largest remainder. Raises DataError for a
    list with a weight and without rows, ConfigError for a weight too small to be kept."""
    if any(weight and not size for weight, size in zip(weights, list_sizes, strict=True)):
        raise DataError("a list with a weight has no rows to put in order; check the filelist")
    exact = np.asarray(weights, dtype=np.float64) / sum(weights) * _CYCLE_LENGTH
    shares = np.floor(exact).astype(np.int64)
    largest = np.argsort(shares - exact, kind="stable")[: _CYCLE_LENGTH - shares.sum()]
    shares[largest] += 1
    for weight, share in zip(weights, shares, strict=True):
        if weight > 0 and share == 0:
            raise ConfigError(
                f"the weight {weight:g} is under 1/{_CYCLE_LENGTH} of the sum of weights, so that its list would never "
                "be read; raise it or drop the list"
            )
    return tuple(shares.tolist())


def turns_of_lists(shares: tuple[int, ...], seed: int, start: int, stop: int) -> Iterator[tuple[int, int, np.ndarray]]:
    """At positions [start, stop) of cycle after cycle: (list, its turns before these, its positions less `start`,
    ascending) of each list that has any in a cycle."""
    for cycle in range(start // _CYCLE_LENGTH, -(-stop // _CYCLE_LENGTH)):
        first = cycle * _CYCLE_LENGTH
        begin, end = max(start, first), min(stop, first + _CYCLE_LENGTH)
        lists = _cycle(shares, seed, cycle)
        for i in np.unique(lists[begin - first : end - first]).tolist():
            before = cycle * shares[i] + int(np.count_nonzero(lists[: begin - first] == i))
            yield i, before, begin - start + np.flatnonzero(lists[begin - first : end - first] == i)


# Cycle c is row 2**32 + c of the stream; the rows below belong to the seeds of the lists.
@lru_cache(maxsize=16)
def _cycle(shares: tuple[int, ...], seed: int, cycle: int) -> np.ndarray:
    """The list number at each position of a cycle."""
    lists = np.repeat(np.arange(len(shares)), shares)
    return lists[permutation(_CYCLE_LENGTH, seed, Stream.MIX, 0, (1 << 32) + cycle)]


class Successors:
    """What follows a row in the order of its own list, as `Mix` runs through it; where rows differ in shape, of its
    list and shape, and after them those of the other lists that are drawn from. Lists without weights share one order;
    where there are several, each is taken in the order that it would have with a weight."""

    def __init__(
        self, list_sizes: list[int], weights: list[float] | None, seed: int, buckets: BucketIndex | None = None
    ):
        self._starts = np.cumsum([0, *list_sizes])
        self._buckets = buckets if differ(buckets) else None
        self._drawn_from: list[int] = []
        if self._buckets:
            self._orders = [
                _orders_of_shapes(own, number, seed) for number, own in enumerate(self._buckets.sizes.tolist())
            ]
            self._drawn_from = [number for number in range(len(self._orders)) if weights is None or weights[number]]
        else:
            alone = weights is None and len(list_sizes) == 1
            orders = [Order(list_sizes[0], seed)] if alone else own_orders(list_sizes, seed)
            self._orders = [[order] for order in orders]

    def after(self, epoch: int, place: int) -> Iterator[int]:
        """The other places of the list and shape, each once, from the next one round; then those of other lists."""
        own, code, position = self._find(epoch, place)
        for index in others_after(self._orders[own][code], epoch, position):
            yield self._place(own, code, index)
        for number in self._drawn_from:
            if number != own and (other := self._orders[number][code]):
                for index in others_after(other, epoch, -1):
                    yield self._place(number, code, index)

    def before(self, epoch: int, place: int) -> Iterator[int]:
        """The other places of the list and shape, each once, in the order of `after` backwards."""
        own, code, position = self._find(epoch, place)
        for index in others_before(self._orders[own][code], epoch, position):
            yield self._place(own, code, index)

    def elsewhere(self, place: int) -> Iterator[int]:
        """A place of each other list for whose rows the row may stand in: of those that have its shape."""
        if self._buckets:
            own, code, _ = self._find(0, place)
            for number, orders in enumerate(self._orders):
                if number != own and orders[code]:
                    yield self._place(number, code, 0)

    def _find(self, epoch: int, place: int) -> tuple[int, int, int]:
        """(the list of a place, the number of its shape, where it stands in the order of these in an epoch)."""
        own = int(np.searchsorted(self._starts, place, side="right")) - 1
        code, index = 0, place - int(self._starts[own])
        if self._buckets:
            code, index = int(self._buckets.codes[place]), self._buckets.index(place, own)
        return own, code, self._orders[own][code].position(epoch, index)

    def _place(self, list_number: int, code: int, index: int) -> int:
        if self._buckets:
            return int(self._buckets.places(code, np.array([index]), list_number)[0])
        return int(self._starts[list_number]) + index


def others_after(order: Order, epoch: int, position: int) -> Iterator[int]:
    """The rows of an epoch but that at `position`, each once: those that follow it, then the epoch's first."""
    for start, stop in ((position + 1, order.num_rows), (0, position)):
        for begin in range(start, stop, _ROWS_AHEAD):
            yield from order.rows(epoch, begin, min(begin + _ROWS_AHEAD, stop)).tolist()


def others_before(order: Order, epoch: int, position: int) -> Iterator[int]:
    """The rows of `others_after`, backwards."""
    for start, stop in ((0, position), (position + 1, order.num_rows)):
        for end in range(stop, start, -_ROWS_AHEAD):
            yield from order.rows(epoch, max(end - _ROWS_AHEAD, start), end)[::-1].tolist()


class StepSampler:
    """The micro-batches of one rank, in order, for steps start_step to max_steps - 1. Global batch s is the positions
    [s * B, (s + 1) * B) of the order, B = global_batch_size. Rank r takes its contiguous slice of B / world.size, cut
    into micro-batches of micro_batch_size. A micro-batch is a list of (epoch, row), all of one shape. Raises
    ConfigError where B is not a multiple of world.size * micro_batch_size, or the share of a rank is not one of whole
    groups, or a group not one of whole micro-batches; DataError where there are fewer rows than one global batch."""

    def __init__(
        self, mix: Mix, global_batch_size: int, micro_batch_size: int, world: World, start_step: int, max_steps: int
    ):
        if min(global_batch_size, micro_batch_size) < 1 or global_batch_size % (world.size * micro_batch_size):
            raise ConfigError(
                f"a global batch of {global_batch_size} rows cannot be cut into micro-batches of {micro_batch_size} on "
                f"{count_of(world.size, 'rank')}; make it a multiple of {world.size * micro_batch_size}"
            )
        rank_batch_size = global_batch_size // world.size
        group_size = mix.group_size or micro_batch_size
        if rank_batch_size % group_size or group_size % micro_batch_size:
            raise ConfigError(
                f"{rank_batch_size} rows of a rank and update in micro-batches of {micro_batch_size} cannot be made of "
                f"groups of {group_size} rows of one shape; give --bucket_group_size {micro_batch_size}, or another of "
                f"its multiples that divide {rank_batch_size}"
            )
        if mix.num_rows < global_batch_size:
            raise DataError(
                f"the filelists hold {mix.num_rows} rows, fewer than one global batch of {global_batch_size} "
                f"(batch size x accumulation x {count_of(world.size, 'rank')}); add rows, or make "
                "--per_device_train_batch_size or --gradient_accumulation_steps smaller"
            )
        self.mix, self.world = mix, world
        self.global_batch_size, self.micro_batch_size = global_batch_size, micro_batch_size
        self.start_step, self.max_steps = start_step, max_steps

    def __len__(self) -> int:
        micro_batches = self.global_batch_size // (self.world.size * self.micro_batch_size)
        return max(0, self.max_steps - self.start_step) * micro_batches

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        rank_batch_size = self.global_batch_size // self.world.size
        for step in range(self.start_step, self.max_steps):
            first = step * self.global_batch_size + self.world.rank * rank_batch_size
            epochs, rows = self.mix.samples(first, first + rank_batch_size)
            samples = list(zip(epochs.tolist(), rows.tolist(), strict=True))
            for start in range(0, rank_batch_size, self.micro_batch_size):
                yield samples[start : start + self.micro_batch_size]

    def strata(self, number: int) -> Strata:
        """Where the samples of micro-batch `number` of this rank, counted from 0, stand in their update."""
        rank_batch_size = self.global_batch_size // self.world.size
        step, start = divmod(number * self.micro_batch_size, rank_batch_size)
        return Strata(self.start_step + step, self.world.rank * rank_batch_size + start, self.global_batch_size)


@dataclass(frozen=True, order=True)
class Use:
    """The sample at `position` of a run's sequence was asked for as (`epoch`, `asked`), a place."""

    position: int
    epoch: int
    asked: int


def uses_of(
    place: int, order: Mix, successors: Successors, stop: int, used: Callable[[int, int], int] | None
) -> Iterator[Use]:
    """Each use of a place before position `stop`. used: (epoch, place asked for) -> place used; None: no row is bad."""
    if used and used(0, place) != place:
        return  # a bad row
    starts = (place, *successors.elsewhere(place)) if used else (place,)
    for start in starts:
        for epoch in count():
            first = order.position(epoch, start)
            if first is None:
                break
            for asked in chain([start], successors.before(epoch, start) if used else ()):
                if used and asked != place and used(epoch, asked) != place:
                    break
                if (position := order.position(epoch, asked)) < stop:
                    yield Use(position, epoch, asked)
            if first >= stop:
                break


def first_use(
    places: list[int], order: Mix, successors: Successors, stop: int, used: Callable[[int, int], int] | None
) -> int:
    """The first position before `stop` at which any of the places was used; `stop` where there is none."""
    for place in places:
        stop = min((use.position for use in uses_of(place, order, successors, stop, used)), default=stop)
    return stop

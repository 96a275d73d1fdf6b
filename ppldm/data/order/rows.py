"""Which row comes when: a pure function of (seed, position).

`Order` is a windowed shuffle. The rows are cut into runs of consecutive rows, so that disks read forward; the runs are
permuted; and the rows are permuted inside windows of permuted runs. A look-up costs one window, not the data set.
`Mix` turns one or several lists of rows into one endless sequence. `Successors` tells what comes after a row in the
order of its own list, which is what stands in for a row that cannot be used.

A permutation is the stable argsort of raw words of Philox, which is defined by its paper, not by a version of numpy.
"""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from ...utils.errors import ConfigError, DataError
from ...utils.rng import Stream, make_rng

RUN_LENGTH, WINDOW_RUNS = 256, 64

_CYCLE_LENGTH = 10_000
_ROWS_AHEAD = 100  # looked up at a time
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

    list_sizes: rows of each list. weights: one number of 0 or more for each, or None.
    """

    group_size: int | None = None  # its rows need not stay together (see `ppldm.data.order.groups`)

    def __init__(self, list_sizes: list[int], weights: list[float] | None, seed: int):
        self.num_rows = sum(list_sizes)
        self.seed = seed
        self._starts = np.cumsum([0, *list_sizes])
        if weights is None:
            self._orders, self._shares = [Order(self.num_rows, seed)], None
        else:
            self._orders, self._shares = _own_orders(list_sizes, seed), proportional_shares(weights, list_sizes)

    def samples(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """(epochs int64 [n], rows int64 [n]) at positions [start, stop) of the sequence, n = stop - start."""
        if self._shares is None:
            return flow(self._orders[0], start, stop)
        epochs, rows = np.empty(stop - start, dtype=np.int64), np.empty(stop - start, dtype=np.int64)
        for i, before, places in turns_of_lists(self._shares, self.seed, start, stop):
            epochs[places], own_rows = flow(self._orders[i], before, before + len(places))
            rows[places] = own_rows + self._starts[i]
        return epochs, rows

    def position(self, epoch: int, row: int) -> int | None:
        """Where a row stands in the sequence in an epoch of its list, or of all where they have no weights; None where
        its list has no turn. The inverse of `samples`."""
        if self._shares is None:
            return epoch * self.num_rows + self._orders[0].position(epoch, row)
        i = int(np.searchsorted(self._starts, row, side="right")) - 1
        if not self._shares[i]:
            return None
        turn = epoch * self._orders[i].num_rows + self._orders[i].position(epoch, row - int(self._starts[i]))
        return position_of_turn(self._shares, self.seed, i, turn)


class Successors:
    """What follows a row in the order of its own list, as `Mix` runs through it.

    Lists without weights share one order, in which what follows may be of any of them: where there are several, each
    is taken in the order that it would have with a weight. list_sizes, weights, seed: as of `Mix`.
    """

    def __init__(self, list_sizes: list[int], weights: list[float] | None, seed: int):
        self._starts = np.cumsum([0, *list_sizes])
        alone = weights is None and len(list_sizes) == 1
        self._orders = [Order(list_sizes[0], seed)] if alone else _own_orders(list_sizes, seed)

    def after(self, epoch: int, row: int) -> Iterator[int]:
        """The other rows of the row's list, each once: those that follow it in the epoch, then the epoch's first."""
        order, first, position = self._find(epoch, row)
        return (first + successor for successor in others_after(order, epoch, position))

    def before(self, epoch: int, row: int) -> Iterator[int]:
        """The same rows backwards: for which of them a row stands in, if those between are bad."""
        order, first, position = self._find(epoch, row)
        return (first + predecessor for predecessor in others_before(order, epoch, position))

    def elsewhere(self, row: int) -> Iterator[int]:
        """A row of each other list for whose rows the row may stand in: there are none."""
        return iter(())

    def _find(self, epoch: int, row: int) -> tuple[Order, int, int]:
        """(the order of a row's list, the list's first row, where the row stands in it)."""
        number = int(np.searchsorted(self._starts, row, side="right")) - 1
        order, first = self._orders[number], int(self._starts[number])
        assert order is not None, "a list with a row has an order"
        position = order.position(epoch, row - first)
        return order, first, position


def bucket_window_runs(num_buckets: int) -> int:
    """The runs of a window of each of a list's buckets: of many buckets fewer, as all are read from at a time."""
    return max(_LEAST_RUNS, min(WINDOW_RUNS, _BUCKETS_RUNS // num_buckets))


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


def _own_orders(list_sizes: list[int], seed: int) -> list[Order | None]:
    """The order of each list, None for one without rows. Lists of equal size must not be permuted alike, so each has a
    seed of its own."""
    seeds = [int(make_rng(seed, Stream.MIX, row=i).bit_generator.random_raw()) for i in range(len(list_sizes))]
    return [Order(size, own_seed) if size else None for size, own_seed in zip(list_sizes, seeds, strict=True)]


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


def proportional_shares(weights: list[float], list_sizes: list[int]) -> tuple[int, ...]:
    """How many positions of a cycle each list has: nearest to its weight, by largest remainder.

    Raises DataError for a list with a weight and without rows, ConfigError for a weight too small to be kept.
    """
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
    """Whose turn it is at positions [start, stop) of cycle after cycle: (list, how many turns it had before these, its
    positions less `start`, ascending) of each list that has any in a cycle."""
    for cycle in range(start // _CYCLE_LENGTH, -(-stop // _CYCLE_LENGTH)):
        first = cycle * _CYCLE_LENGTH
        begin, end = max(start, first), min(stop, first + _CYCLE_LENGTH)
        lists = _cycle(shares, seed, cycle)
        for i in np.unique(lists[begin - first : end - first]).tolist():
            before = cycle * shares[i] + int(np.count_nonzero(lists[: begin - first] == i))
            yield i, before, begin - start + np.flatnonzero(lists[begin - first : end - first] == i)


def position_of_turn(shares: tuple[int, ...], seed: int, number: int, turn: int) -> int:
    """The position at which a list has its turn `turn`, counted from 0 over all cycles: the inverse of
    `turns_of_lists`."""
    cycle, turn = divmod(turn, shares[number])
    return cycle * _CYCLE_LENGTH + int(np.flatnonzero(_cycle(shares, seed, cycle) == number)[turn])


# Cycle c is row 2**32 + c of the stream; the rows below belong to the seeds of the lists.
@lru_cache(maxsize=16)
def _cycle(shares: tuple[int, ...], seed: int, cycle: int) -> np.ndarray:
    """The list number at each position of a cycle."""
    lists = np.repeat(np.arange(len(shares)), shares)
    return lists[permutation(_CYCLE_LENGTH, seed, Stream.MIX, 0, (1 << 32) + cycle)]

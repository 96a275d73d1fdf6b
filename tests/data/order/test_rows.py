import itertools
import tracemalloc

import numpy as np
import pytest

from ppldm.data.order import Mix, Order, Successors
from ppldm.utils.errors import ConfigError, DataError

GRID = list(itertools.product([1, 2, 7, 64, 101], [1, 4, 7, 256], [1, 3, 64]))


@pytest.mark.parametrize("num_rows, run_length, window_runs", GRID)
def test_an_epoch_is_a_permutation_and_any_slice_of_it_is_the_same(num_rows, run_length, window_runs):
    order = Order(num_rows, 5, run_length, window_runs)
    for epoch in (0, 3):
        whole = order.rows(epoch, 0, num_rows)
        assert whole.dtype == np.int64 and sorted(whole) == list(range(num_rows))
        for start in range(num_rows + 1):
            for stop in {start, min(start + 1, num_rows), min(start + 9, num_rows), num_rows}:
                rows = order.rows(epoch, start, stop)
                assert rows.tolist() == whole[start:stop].tolist() and rows.dtype == np.int64


def test_rows_are_shuffled_inside_windows_of_runs():
    order = Order(1000, 5, run_length=10, window_runs=4)
    for start in range(0, 1000, 40):
        window = order.rows(0, start, start + 40)
        runs = np.unique(window // 10)
        assert len(runs) == 4 and sorted(window) == [run * 10 + i for run in runs for i in range(10)]
        assert len(np.unique(np.diff(window))) > 5


def test_epochs_and_seeds_differ():
    orders = [Order(500, seed).rows(epoch, 0, 500).tolist() for seed in (1, 2) for epoch in (0, 1)]
    assert all(a != b for a, b in itertools.combinations(orders, 2))


def test_the_order_never_changes():
    assert Order(12, 23, run_length=3, window_runs=2).rows(0, 0, 12).tolist() == [4, 6, 7, 5, 3, 8, 0, 2, 10, 1, 9, 11]
    epochs, rows = Mix([5, 7], [0.25, 0.75], seed=23).samples(0, 12)
    assert list(zip(epochs.tolist(), rows.tolist(), strict=True)) == [
        (0, 5),
        (0, 2),
        (0, 6),
        (0, 1),
        (0, 11),
        (0, 9),
        (0, 8),
        (0, 7),
        (0, 3),
        (0, 10),
        (1, 7),
        (1, 5),
    ]


@pytest.mark.parametrize("num_rows, run_length, window_runs", GRID)
def test_the_position_of_a_row_is_where_the_order_has_it(num_rows, run_length, window_runs):
    order = Order(num_rows, 5, run_length, window_runs)
    for epoch in (0, 3):
        rows = order.rows(epoch, 0, num_rows).tolist()
        assert [order.position(epoch, row) for row in rows] == list(range(num_rows))
    for outside in (-1, num_rows):
        with pytest.raises(IndexError):
            order.position(0, outside)


@pytest.mark.parametrize("sizes, weights", [([250], None), ([250], [1]), ([7, 0, 250, 90], [1, 0, 5, 0])])
def test_what_follows_a_row_is_the_next_of_the_sequence_of_its_list(sizes, weights):
    successors, starts = Successors(sizes, weights, 3), np.cumsum([0, *sizes])
    epochs, rows = Mix(sizes, weights, 3).samples(0, 10_000)
    for number, size in enumerate(sizes):
        mine = (starts[number] <= rows) & (rows < starts[number + 1])
        for epoch in (0, 2) if mine.any() else ():
            order = rows[mine & (epochs == epoch)].tolist()
            assert len(order) == size
            for i in range(0, size, 6):
                assert list(successors.after(epoch, order[i])) == order[i + 1 :] + order[:i]


@pytest.mark.parametrize("weights", [None, [1, 2, 0]])
def test_what_follows_a_row_is_every_other_row_of_its_list_and_no_row_of_another(weights):
    sizes, starts = [5, 300, 40], [0, 5, 305, 345]
    successors = Successors(sizes, weights, 3)
    for epoch, row in itertools.product((0, 1), (0, 4, 5, 170, 304, 305, 344)):
        number = np.searchsorted(starts, row, side="right") - 1
        expected = set(range(starts[number], starts[number + 1])) - {row}
        following = list(successors.after(epoch, row))
        assert len(following) == len(expected) and set(following) == expected


def test_a_list_that_is_never_drawn_from_may_be_empty():
    assert set(Mix([5, 0], [1, 0], 3).samples(0, 100)[1].tolist()) == set(range(5))
    with pytest.raises(DataError, match="no rows"):
        Mix([5, 0], [1, 1], 3)


def test_cycles_of_a_mix_are_permuted_differently():
    sizes = [300, 300]
    _, rows = Mix(sizes, [1, 1], 3).samples(0, 40_000)
    cycles = (rows < 300).reshape(4, 10_000)
    for one, other in itertools.combinations(cycles, 2):
        # Two independent halves agree in half of the places; five standard deviations.
        assert abs((one == other).mean() - 0.5) < 5 * (0.25 / 10_000) ** 0.5


def test_positions_outside_an_epoch_are_refused():
    for start, stop in [(-1, 2), (3, 2), (0, 11)]:
        with pytest.raises(IndexError):
            Order(10, 0).rows(0, start, stop)
    with pytest.raises(DataError, match="no rows"):
        Order(0, 0)


def test_a_look_up_in_400_million_rows_builds_nothing_of_that_size():
    tracemalloc.start()
    rows = Order(400_000_000, 1).rows(2, 399_999_000, 400_000_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(np.unique(rows)) == 1000 and peak < 100 << 20


@pytest.mark.parametrize("sizes", [[1], [10], [3, 4, 5], [40, 1]])
def test_without_weights_each_row_comes_once_an_epoch(sizes):
    total = sum(sizes)
    epochs, rows = Mix(sizes, None, 3).samples(0, 5 * total)
    for epoch in range(5):
        assert sorted(rows[epochs == epoch]) == list(range(total))
    assert (np.diff(epochs) >= 0).all()


@pytest.mark.parametrize("weights", [None, [0.3, 0.6, 0.1], [0, 1, 2]])
def test_any_slice_of_the_sequence_is_the_same(weights):
    mix = Mix([5, 300, 40], weights, 3)
    epochs, rows = mix.samples(0, 21_000)
    for start, stop in [(0, 0), (0, 1), (7, 400), (9_990, 10_010), (9_999, 20_001), (10_000, 10_001), (20_500, 21_000)]:
        some_epochs, some_rows = Mix([5, 300, 40], weights, 3).samples(start, stop)
        assert some_epochs.tolist() == epochs[start:stop].tolist() and some_rows.tolist() == rows[start:stop].tolist()


@pytest.mark.parametrize("weights", [[0.3, 0.6, 0.1], [1, 1, 1], [0, 1, 2], [1, 10_000, 1]])
def test_weights_give_exact_shares_and_each_list_its_own_epochs(weights):
    sizes, starts = [5, 3000, 40], [0, 5, 3005, 3045]
    epochs, rows = Mix(sizes, weights, 3).samples(0, 40_000)
    for i, weight in enumerate(weights):
        mine = (starts[i] <= rows) & (rows < starts[i + 1])
        assert abs(mine.sum() - 40_000 * weight / sum(weights)) <= 4
        pairs = list(zip(epochs[mine].tolist(), rows[mine].tolist(), strict=True))
        assert len(set(pairs)) == len(pairs) and epochs[mine].tolist() == [n // sizes[i] for n in range(len(pairs))]


def test_a_list_is_spread_over_its_cycle():
    _, rows = Mix([500, 500], [1, 1], 3).samples(0, 100)
    assert 25 < np.count_nonzero(rows < 500) < 75


def test_lists_of_equal_size_are_permuted_differently():
    _, rows = Mix([200, 200], [1, 1], 3).samples(0, 400)
    assert rows[rows < 200].tolist() != (rows[rows >= 200] - 200).tolist()


def test_a_weight_too_small_to_be_kept_is_refused():
    with pytest.raises(ConfigError, match="1e-06"):
        Mix([5, 5], [1, 1e-6], 0)


@pytest.mark.parametrize("weights", [None, [0.7, 0.3, 0]])
def test_a_position_is_where_the_row_stands(weights):
    mix = Mix([9, 40, 5], weights, seed=3)
    epochs, rows = mix.samples(0, 20_500)
    for place in (0, 8, 777, 9_999, 10_000, 20_499):
        assert mix.position(int(epochs[place]), int(rows[place])) == place
    assert weights is None or mix.position(0, 50) is None

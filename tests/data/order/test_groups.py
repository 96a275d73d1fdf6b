"""The laws of groups: exact shares of every epoch, one shape a micro-batch, and the same samples whoever takes them."""

import itertools
import pickle
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ppldm.data import order as order_module
from ppldm.data.order import Mix, StepSampler, Successors
from ppldm.data.shapes import BucketIndex
from ppldm.utils.errors import ConfigError, DataError
from ppldm.utils.processes.ranks import World


def make_groups(buckets, weights, seed, group_size):
    return Mix(buckets.sizes.sum(1).tolist(), weights, seed, buckets, group_size)


def make_buckets(list_sizes, num_shapes, seed=0):
    """Rows of shapes of very different shares: the first is frequent, the last rare."""
    draw = np.random.default_rng(seed)
    shares = 0.8 ** np.arange(num_shapes)
    codes = draw.choice(num_shapes, sum(list_sizes), p=shares / shares.sum()).astype(np.uint8)
    return BucketIndex([(64, 64 * (code + 1)) for code in range(num_shapes)], codes, list_sizes)


def groups_of(order, start, stop):
    """(epochs, places) of groups [start, stop), int64 [n, group size] each."""
    size = order.group_size
    return (values.reshape(-1, size) for values in order.samples(start * size, stop * size))


GRID = {
    "num_rows": st.sampled_from([1, 9, 100, 1000, 3000]),
    "num_shapes": st.integers(1, 40),
    "group_size": st.sampled_from([1, 2, 3, 8, 32]),
    "seed": st.integers(0, 2**64 - 1),
}


@settings(max_examples=40, deadline=None)
@given(**GRID, slice_groups=st.sampled_from([1, 7, 4096]))
def test_over_epochs_each_bucket_gives_its_exact_groups_and_each_row_comes_once(
    num_rows, num_shapes, group_size, seed, slice_groups
):
    buckets = make_buckets([num_rows], num_shapes)
    assume(np.count_nonzero(buckets.sizes) > 1)
    sizes, length = buckets.sizes[0], order_module._SLICE
    order_module._SLICE = slice_groups  # not by monkeypatch, which lasts for all examples
    try:
        order = make_groups(buckets, None, seed, group_size)
        used = [sum(epoch * size // group_size for size in sizes.tolist()) for epoch in range(4)]
        epochs, places = groups_of(order, 0, used[3])
    finally:
        order_module._SLICE = length
    codes = buckets.codes[places]
    assert (codes == codes[:, :1]).all(), "a group has one shape"
    for epoch in range(3):
        counts = np.bincount(codes[used[epoch] : used[epoch + 1], 0], minlength=num_shapes)
        assert counts.tolist() == ((epoch + 1) * sizes // group_size - epoch * sizes // group_size).tolist()
    for code, size in enumerate(sizes.tolist()):
        own_epochs, own_places = epochs[codes == code], places[codes == code]
        assert own_epochs.tolist() == [position // size for position in range(len(own_epochs))]
        assert len(own_epochs) == 3 * size // group_size * group_size
        for epoch in range(3):
            once = own_places[own_epochs == epoch].tolist()
            assert len(set(once)) == len(once) and set(once) <= set(np.flatnonzero(buckets.codes == code).tolist())
            assert len(once) == size or 3 * size - len(own_epochs) < group_size


@settings(max_examples=25, deadline=None)
@given(**GRID, weights=st.sampled_from([None, (1, 3), (0, 1)]), data=st.data())
def test_any_slice_of_the_sequence_is_the_same_and_of_a_later_epoch_too(
    num_rows, num_shapes, group_size, seed, weights, data
):
    buckets = make_buckets([num_rows, num_rows + 5], num_shapes)
    first = data.draw(st.sampled_from([0, 1_000_000])) * group_size
    order = make_groups(buckets, weights, seed, group_size)
    whole = np.array(order.samples(first, first + 5 * num_rows))
    for _ in range(3):
        start = data.draw(st.integers(0, 5 * num_rows))
        stop = data.draw(st.integers(start, min(5 * num_rows, start + 200)))
        some = np.array(make_groups(buckets, weights, seed, group_size).samples(first + start, first + stop))
        assert np.array_equal(some, whole[:, start:stop])


@settings(max_examples=25, deadline=None)
@given(**GRID, weights=st.sampled_from([None, (1, 3), (0, 1)]), slice_groups=st.sampled_from([7, 4096]), data=st.data())
def test_a_position_is_where_the_row_stands(num_rows, num_shapes, group_size, seed, weights, slice_groups, data):
    sizes, length = [num_rows, num_rows // 2 + 1], order_module._SLICE
    order_module._SLICE = slice_groups
    try:
        order = make_groups(make_buckets(sizes, num_shapes), weights, seed, group_size)
        start = data.draw(st.sampled_from([0, 5 * num_rows, 10_000 * group_size - 3]))
        epochs, places = order.samples(start, start + 40)
        found = [order.position(*key) for key in zip(epochs.tolist(), places.tolist(), strict=True)]
        assert found == list(range(start, start + 40))
        assert weights != (0, 1) or order.position(1, 0) is None
    finally:
        order_module._SLICE = length


@settings(max_examples=15, deadline=None)
@given(
    num_shapes=st.integers(1, 40),
    group_size=st.sampled_from([2, 4, 8]),
    micro=st.sampled_from([1, 2]),
    start_step=st.integers(0, 30),
    weights=st.sampled_from([None, (1, 3)]),
)
def test_ranks_and_start_steps_change_no_sample_and_a_micro_batch_has_one_shape(
    num_shapes, group_size, micro, start_step, weights
):
    buckets, batch, steps = make_buckets([200, 120], num_shapes), 32, 31  # over three epochs of 10 steps
    order = Mix([200, 120], weights, 5, buckets, group_size)
    alone = [list(StepSampler(order, batch, micro, World(), step, step + 1)) for step in range(start_step, steps)]
    for ranks in (1, 2, 4):
        worlds = [World(rank, ranks) for rank in range(ranks)]
        shares = [list(StepSampler(order, batch, micro, world, start_step, steps)) for world in worlds]
        per_step = batch // ranks // micro
        for step in range(steps - start_step):
            joined = [m for share in shares for m in share[step * per_step : (step + 1) * per_step]]
            assert joined == alone[step]
            assert all(len({buckets.shape(place) for _, place in micro_batch}) == 1 for micro_batch in joined)


def test_the_end_of_an_epoch_loses_and_repeats_nothing_where_a_run_resumes_there():
    buckets, size = make_buckets([240], 7), 8
    order = make_groups(buckets, None, 5, size)
    used = [sum(epoch * size_of // size for size_of in buckets.sizes[0].tolist()) for epoch in range(30)]
    boundary = next(epoch for epoch in range(1, 30) if used[epoch] % 2 == 0)  # global batches of two groups
    whole = list(StepSampler(order, 2 * size, size, World(), 0, used[boundary] // 2 + 20))
    resumed = StepSampler(make_groups(buckets, None, 5, size), 2 * size, size, World(), used[boundary] // 2,
                          used[boundary] // 2 + 20)  # fmt: skip
    assert list(resumed) == whole[used[boundary] :]
    samples = [sample for micro_batch in whole for sample in micro_batch]
    assert len(set(samples)) == len(samples)
    for code, size_of in enumerate(buckets.sizes[0].tolist()):
        mine = [epoch for epoch, place in samples if buckets.codes[place] == code]
        assert mine == [position // size_of for position in range(len(mine))]


@pytest.mark.parametrize("weights", [None, [0.3, 0.7]])
@pytest.mark.parametrize("num_shapes", [1, 3])
def test_with_one_shape_the_samples_are_those_without_buckets(weights, num_shapes):
    codes = np.full(90, num_shapes - 1, dtype=np.uint8)
    buckets = BucketIndex([(64, 64 * (code + 1)) for code in range(num_shapes)], codes, [50, 40])
    for order in (Mix([50, 40], weights, 3, buckets, 8), Mix([50, 40], weights, 3)):
        expected = Mix([50, 40], weights, 3)
        for some, other in zip(order.samples(0, 500), expected.samples(0, 500), strict=True):
            assert some.tolist() == other.tolist()
        assert StepSampler(order, 8, 2, World(), 0, 1).mix is order, "which need not be cut into groups"
    with_shapes, without = Successors([50, 40], weights, 3, buckets), Successors([50, 40], weights, 3)
    assert list(with_shapes.after(2, 60)) == list(without.after(2, 60))


def test_the_order_of_groups_never_changes():
    buckets = BucketIndex([(64, 64), (64, 128)], np.array([0, 0, 1, 0, 1, 1, 0, 0, 1, 0], dtype=np.uint8), [4, 6])
    for weights, expected_epochs, expected_places in (
        (None, [0] * 10 + [1] * 2, [7, 1, 4, 8, 0, 3, 2, 5, 9, 6, 3, 0]),
        ([1, 1], [0] * 7 + [1, 0, 1, 1, 1], [7, 9, 1, 0, 4, 8, 3, 3, 5, 5, 8, 4]),
    ):
        epochs, places = make_groups(buckets, weights, 23, 2).samples(0, 12)
        assert (epochs.tolist(), places.tolist()) == (expected_epochs, expected_places)


def test_epochs_and_seeds_differ_and_buckets_of_equal_size_are_permuted_differently():
    codes = np.repeat(np.arange(2, dtype=np.uint8), 200)
    buckets = BucketIndex([(64, 64), (64, 128)], codes, [400])
    epochs, places = make_groups(buckets, None, 1, 4).samples(0, 800)
    turns = buckets.codes[places].tolist()
    own = {(e, c): places[(epochs == e) & (buckets.codes[places] == c)].tolist() for e in (0, 1) for c in (0, 1)}
    own |= {2: (np.array(own[0, 1]) - 200).tolist(), 3: make_groups(buckets, None, 2, 4).samples(0, 400)[1].tolist()}
    assert all(one != other for one, other in itertools.combinations(own.values(), 2))
    assert turns[:400] != turns[400:]


def test_the_turns_of_buckets_are_shuffled_and_spread_over_an_epoch():
    buckets = make_buckets([64_000], 5)
    codes = buckets.codes[make_groups(buckets, None, 1, 2).samples(0, 64_000)[1]][::2]
    share = buckets.sizes[0, 0] / 64_000
    for part in np.split(codes[:32_000], 16):  # five standard deviations
        assert abs((part == 0).mean() - share) < 5 * (share * (1 - share) / len(part)) ** 0.5
    assert len(np.unique(np.diff(np.flatnonzero(codes == 0)))) > 4


@pytest.mark.parametrize("weights", [[0.3, 0.6, 0.1], [0, 1, 2]])
def test_weights_give_exact_shares_of_groups_and_each_list_its_own_epochs(weights):
    list_sizes = [50, 3000, 400]
    buckets, starts = make_buckets(list_sizes, 4), [0, 50, 3050, 3450]
    epochs, places = groups_of(make_groups(buckets, weights, 3, 4), 0, 20_000)
    codes = buckets.codes[places]
    assert (codes == codes[:, :1]).all()
    lists = np.searchsorted(starts, places, side="right") - 1
    assert (lists == lists[:, :1]).all(), "a group is of one list"
    for number, weight in enumerate(weights):
        assert abs((lists[:, 0] == number).sum() - 20_000 * weight / sum(weights)) <= 2
        for code, size in enumerate(buckets.sizes[number].tolist()):
            mine = (lists == number) & (codes == code)
            assert epochs[mine].tolist() == [position // size for position in range(mine.sum())]
            pairs = list(zip(epochs[mine].tolist(), places[mine].tolist(), strict=True))
            assert len(set(pairs)) == len(pairs)


def test_a_weighted_list_without_rows_is_refused_and_one_of_weight_0_may_be_empty():
    buckets = make_buckets([30, 0], 3)
    assert make_groups(buckets, [1, 0], 3, 2).samples(0, 50)[1].max() < 30
    with pytest.raises(DataError, match="no rows"):
        make_groups(buckets, [1, 1], 3, 2)


@pytest.mark.parametrize("list_sizes, weights", [([250], None), ([200, 90], [1, 5])])
def test_what_follows_a_row_is_the_next_of_its_bucket(list_sizes, weights):
    buckets = make_buckets(list_sizes, 5)
    order, successors = make_groups(buckets, weights, 3, 4), Successors(list_sizes, weights, 3, buckets)
    epochs, places = order.samples(0, 12 * sum(list_sizes))
    lists = np.searchsorted(np.cumsum(list_sizes), places, side="right")
    for number, code in itertools.product(range(len(list_sizes)), range(5)):
        others = [
            place for place in range(sum(list_sizes))
            if buckets.codes[place] == code and np.searchsorted(np.cumsum(list_sizes), place, side="right") != number
        ]  # fmt: skip
        for epoch in (0, 2):
            sequence = places[(lists == number) & (buckets.codes[places] == code) & (epochs == epoch)].tolist()
            assert len(sequence) == buckets.sizes[number, code]
            for i in range(0, len(sequence), 9):
                following = list(successors.after(epoch, sequence[i]))
                own = sequence[i + 1 :] + sequence[:i]
                assert following[: len(own)] == own and sorted(following[len(own) :]) == others


def test_what_follows_a_row_is_never_of_a_list_of_weight_0():
    buckets = make_buckets([40, 60, 50], 3)
    successors = Successors([40, 60, 50], [1, 0, 1], 3, buckets)
    for place in (0, 39, 100, 149):
        following = list(successors.after(1, place))
        assert len(set(following)) == len(following) and not any(40 <= other < 100 for other in following)
        same = np.flatnonzero(buckets.codes == buckets.codes[place])
        assert len(following) == np.count_nonzero((same < 40) | (same >= 100)) - 1


def test_orders_and_successors_go_to_another_process():
    buckets = make_buckets([60], 3)
    order, successors = (Mix([60], None, 3, buckets, 4), Successors([60], None, 3, buckets))
    assert order.samples(0, 60)[1].tolist() == pickle.loads(pickle.dumps(order)).samples(0, 60)[1].tolist()
    assert list(successors.after(0, 5)) == list(pickle.loads(pickle.dumps(successors)).after(0, 5))


@pytest.mark.parametrize(
    "group_size, micro, ranks, fits",
    [(8, 8, 1, True), (8, 4, 2, True), (4, 4, 2, True), (16, 4, 2, False), (4, 8, 1, False), (5, 1, 1, False)],
)
def test_groups_that_do_not_fit_batches_are_refused_with_the_remedy(group_size, micro, ranks, fits):
    order, arguments = make_groups(make_buckets([100], 3), None, 5, group_size), (16, micro, World(0, ranks), 0, 1)
    if fits:
        assert len(list(StepSampler(order, *arguments))) == 16 // micro // ranks
        return
    with pytest.raises(ConfigError, match=f"groups of {group_size} rows .* --bucket_group_size {micro}, or another"):
        StepSampler(order, *arguments)


def test_what_an_order_needs_is_made_once_an_epoch_however_many_buckets_take_turns(monkeypatch):
    made, permutation = Counter(), order_module.permutation
    monkeypatch.setattr(order_module, "permutation", lambda *key: made.update([key]) or permutation(*key))
    order = make_groups(make_buckets([100_000], 40), None, 5, 8)
    for start in range(0, 100_000, 64):
        order.samples(start, start + 64)
    assert set(made.values()) == {1} and len(made) > 50


def test_a_look_up_among_20_million_rows_builds_nothing_of_that_size():
    codes = np.random.default_rng(0).integers(0, 40, 20_000_000, dtype=np.uint8)
    buckets = BucketIndex([(64, 64 + code) for code in range(40)], codes, [len(codes)])
    order = make_groups(buckets, None, 1, 32)
    tracemalloc.start()
    _, places = order.samples(10**9, 10**9 + 32)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(np.unique(codes[places])) == 1 and len(np.unique(places)) == 32 and peak < 20 << 20

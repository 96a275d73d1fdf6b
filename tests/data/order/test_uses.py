"""The law of uses: what a place was used for is what a walk over all positions finds, stand-ins included."""

from functools import cache
from itertools import chain

import numpy as np
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from ppldm.data.order import Mix, Successors, Use, first_use, uses_of
from ppldm.data.shapes import BucketIndex


def make(list_sizes, weights, num_shapes, group_size, seed):
    codes = np.random.default_rng(seed % 97).integers(0, num_shapes, sum(list_sizes)).astype(np.uint8)
    buckets = BucketIndex([(8, 8 * (code + 1)) for code in range(num_shapes)], codes, list_sizes)
    buckets = buckets if num_shapes > 1 else None
    order = Mix(list_sizes, weights, seed, buckets, group_size)
    return order, Successors(list_sizes, weights, seed, buckets)


def walk(order, successors, bad, stop) -> dict[int, set[Use]]:
    """By place, as training finds it: every sample that is asked for, and what stands in for it."""
    found = {}
    for position, (epoch, asked) in enumerate(zip(*map(np.ndarray.tolist, order.samples(0, stop)), strict=True)):
        candidates = chain([asked], successors.after(epoch, asked))
        used = next((one for one in candidates if one not in bad), None)
        found.setdefault(used, set()).add(Use(position, epoch, asked))
    return found


@settings(max_examples=25, deadline=None)
@given(
    list_sizes=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    weighted=st.booleans(),
    num_shapes=st.integers(1, 4),
    group_size=st.sampled_from([1, 2, 3]),
    seed=st.integers(0, 2**64 - 1),
    bad_share=st.sampled_from([0, 0.1, 0.6, 0.9]),
    stop=st.integers(0, 60),
)
@example([1, 2, 3], True, 2, 1, 0, 0.6, 60)
@example([4, 3], False, 2, 2, 5, 0.9, 60)
def test_uses_are_those_of_a_walk_over_all_positions(
    list_sizes, weighted, num_shapes, group_size, seed, bad_share, stop
):
    weights = list(range(len(list_sizes))) if weighted else None
    assume(not weighted or len(list_sizes) > 1)
    order, successors = make(list_sizes, weights, num_shapes, group_size, seed)
    places = range(sum(list_sizes))
    bad = {place for place in places if np.random.default_rng(place + seed % 1000).random() < bad_share}
    expected = walk(order, successors, bad, stop)

    @cache
    def used(epoch, place):
        return next((one for one in chain([place], successors.after(epoch, place)) if one not in bad), None)

    for place in places:
        found = list(uses_of(place, order, successors, stop, used))
        assert len(set(found)) == len(found) and set(found) == expected.get(place, set())
    several = [*places][::3]
    first = min((use.position for place in several for use in expected.get(place, ())), default=stop)
    assert first_use(several, order, successors, stop, used) == first
    asked = {place: set(uses_of(place, order, successors, stop, None)) for place in places}
    without_bad = walk(order, successors, (), stop)
    assert asked == {place: without_bad.get(place, set()) for place in places}


def test_a_row_costs_a_reading_an_epoch():
    order, successors = make([1000], None, 1, 1, 3)
    read = []

    def used(epoch, place):
        read.append((epoch, place))
        return place

    assert len(list(uses_of(7, order, successors, 10_000, used))) == 10
    assert len(read) <= 12

import pickle
import tracemalloc

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ppldm.data import shapes as module
from ppldm.data.shapes import BucketIndex


def make_shapes(count):
    return [(64 * (code + 1), 64) for code in range(count)]


@settings(max_examples=20, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([0, 1, 2047, 2048, 2049, 5000]), min_size=1, max_size=4),
    num_shapes=st.sampled_from([1, 2, 7, 40, 255]),
    rare=st.booleans(),
    seed=st.integers(0, 99),
)
def test_places_are_those_of_the_shape_in_their_order_and_index_is_the_way_back(sizes, num_shapes, rare, seed):
    draw = np.random.default_rng(seed)
    codes = draw.integers(0, num_shapes, sum(sizes)).astype(np.uint8)
    if rare:
        codes[draw.random(len(codes)) < 0.99] = 0
    buckets, starts = BucketIndex(make_shapes(num_shapes), codes, sizes), np.cumsum([0, *sizes])
    for number, (start, stop) in enumerate(zip(starts, starts[1:], strict=False)):
        for code in range(num_shapes):
            expected = start + np.flatnonzero(codes[start:stop] == code)
            assert buckets.sizes[number, code] == len(expected)
            indices = draw.permutation(len(expected))
            places = buckets.places(code, indices, number)
            assert places.dtype == np.int64 and places.tolist() == expected[indices].tolist()
            for index, place in zip(indices[:3].tolist(), places[:3].tolist(), strict=True):
                assert buckets.index(place, number) == index and buckets.shape(place) == make_shapes(256)[code]


def test_counts_that_are_made_in_several_rounds_are_those_of_one(monkeypatch):
    codes = np.random.default_rng(0).integers(0, 5, 20_000).astype(np.uint8)
    whole = BucketIndex(make_shapes(5), codes, [20_000])
    monkeypatch.setattr(module, "_COUNTED_AT_ONCE", 2 * module._BLOCK)
    assert np.array_equal(whole._before, BucketIndex(make_shapes(5), codes, [20_000])._before)


def test_buckets_go_to_another_process():
    buckets = BucketIndex(make_shapes(2), np.array([0, 1, 1, 0], dtype=np.uint8), [1, 3])
    again = pickle.loads(pickle.dumps(buckets))
    assert again.places(1, np.array([1, 0])).tolist() == [2, 1] and again.sizes.tolist() == [[1, 0], [1, 2]]


def test_beside_the_codes_little_memory_is_used():
    codes = np.random.default_rng(0).integers(0, 40, 10_000_000, dtype=np.uint8)
    tracemalloc.start()
    buckets = BucketIndex(make_shapes(40), codes, [len(codes)])
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert buckets.codes is codes and kept < 0.25 * len(codes) and peak < 4 * len(codes)

import multiprocessing

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ppldm.data.loader import Slots, Stored

SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=5)
DTYPES = ("uint8", "float32", "int64")


def make(shapes, seed):
    rng = np.random.default_rng(seed)
    arrays = {f"a{i}": rng.integers(0, 256, shape).astype(DTYPES[i % 3]) for i, shape in enumerate(shapes)}
    return {**arrays, "skipped": ["image"]}


@settings(deadline=None, max_examples=200)
@given(SHAPES, st.integers(1, 4), st.integers(0, 20))
def test_the_latest_batches_are_there_whole(shapes, num_slots, last):
    size = sum(value.nbytes for value in make(shapes, 0).values() if isinstance(value, np.ndarray))
    slots = Slots(num_slots, size)
    batches = [make(shapes, seed) for seed in range(last + 1)]
    put = [slots.put(number, batch) for number, batch in enumerate(batches)]
    for batch, stored in list(zip(batches, put, strict=True))[-num_slots:]:
        assert stored.pop("skipped") == ["image"]
        for name, value in stored.items():
            assert isinstance(value, Stored)
            array = slots.view(value)
            assert array.flags.aligned and array.dtype == batch[name].dtype and np.array_equal(array, batch[name])


def test_what_has_no_room_stays_as_it_is():
    slots = Slots(2, 0)
    large, small = np.zeros(slots.slot_bytes + 1, np.uint8), np.ones(5)
    put = slots.put(3, {"large": large, "small": small})
    assert put["large"] is large and np.array_equal(slots.view(put["small"]), small)


def test_another_process_writes_what_this_one_reads():
    slots = Slots(2, 1000)
    worker = multiprocessing.get_context("fork").Process(target=slots.put, args=(1, {"a": np.arange(100)}))
    worker.start()
    worker.join()
    assert np.array_equal(slots.view(Stored(slots.slot_bytes, "<i8", (100,))), np.arange(100))

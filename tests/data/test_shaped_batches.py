"""Batches of rows of several shapes: one shape each, and the same whoever makes them."""

import gzip
import itertools
import pickle

import numpy as np
import pytest

from ppldm.data.filelist import read_sources, write_filelist
from ppldm.data.formats.part import write_part
from ppldm.data.formats.row import BadRows, Row, encode_row
from ppldm.data.loader import BatchLoader
from ppldm.data.order import Mix, StepSampler
from ppldm.data.select.selection import select_rows
from ppldm.data.shapes import ShapeRule
from ppldm.utils.errors import DataError
from ppldm.utils.processes.ranks import World

SHAPES = ((16, 16), (16, 32), (24, 16))  # height, width
SIZES = [(20, 18), (40, 20), (20, 34), (34, 17), (18, 27), (16, 24)]  # width, height


@pytest.fixture(params=[0.0, 0.4], ids=["best", "random"])
def shaped(request, tmp_path, make_image, make_dataset):
    """A data set of two lists of 30 and 20 rows, of which the last is smaller than any shape."""

    def make(weights=None, **settings):
        for name, rows in (("a", range(30)), ("b", range(30, 50))):
            sizes = {row: (12, 12) if row == 49 else SIZES[row * row % 6] for row in rows}
            write_part(tmp_path / f"{name}.gz", [
                Row(f"picture {row}", make_image(row, size), {"width": size[0], "height": size[1]})
                for row, size in sizes.items()
            ])  # fmt: skip
            write_filelist(tmp_path / f"{name}.filelist", [f"{name}.gz"])
        named = zip("ab", weights or "ab", strict=True)
        lines = [f"{name}.filelist" + (f" {weight}" if weights else "") for name, weight in named]
        write_filelist(tmp_path / "l.list", lines)
        sources = read_sources(tmp_path / "l.list")
        selection = select_rows(sources, shapes=ShapeRule(SHAPES, random_share=request.param, seed=7))
        return make_dataset(sources, selection=selection, **settings)

    return make


def batches(dataset, workers=0, world=World(), start_step=0, max_steps=9):  # noqa: B008 (frozen)
    order = Mix(dataset.list_sizes, dataset.weights, 7, dataset.buckets, 2)
    sampler = StepSampler(order, 8, 2, world, start_step, max_steps)
    return [
        {key: value if key == "skipped" else value.numpy() for key, value in batch.items()}
        for batch in BatchLoader(dataset, sampler, workers)
    ]


def same(some, others):
    return len(some) == len(others) and all(
        a.keys() == b.keys() and all(np.array_equal(a[key], b[key]) for key in a)
        for a, b in zip(some, others, strict=True)
    )


@pytest.mark.parametrize("weights", [None, (1, 3)])
def test_each_batch_has_the_shape_of_its_rows_and_each_row_comes_once_an_epoch(shaped, weights):
    dataset = shaped(weights)
    assert len(dataset) == 49 and dataset.selection.skipped == {"too small": 1} and len(dataset.buckets.shapes) == 3
    whole = batches(dataset, max_steps=20)
    shapes = [batch["pixel_values"].shape[2:] for batch in whole]
    assert set(shapes) == set(SHAPES)
    for (height, width), batch in zip(shapes, whole, strict=True):
        assert batch["noise"].shape == batch["posterior_noise"].shape == (2, 4, height // 8, width // 8)
        for row in batch["row_ids"].tolist():
            assert dataset.shape(row) == (height, width)
    if weights is None:
        ids = np.concatenate([batch["row_ids"] for batch in whole]).tolist()
        counts = np.bincount(ids, minlength=49)  # 160 samples: three epochs and a part of one
        assert set(counts.tolist()) <= {2, 3, 4} and counts.sum() == 160


def test_workers_ranks_and_restarts_change_no_batch(shaped):
    dataset = shaped()
    whole = batches(dataset)
    for workers in (1, 4):
        assert same(batches(dataset, workers), whole)
    for ranks, workers in ((2, 0), (4, 1)):
        parts = [batches(dataset, workers if rank else 0, World(rank, ranks)) for rank in range(ranks)]
        per_rank = 4 // ranks
        joined = [
            batch for step in range(9) for part in parts for batch in part[step * per_rank : (step + 1) * per_rank]
        ]
        assert same(joined, whole)
    for start_step, workers in itertools.product((1, 6), (0, 1)):
        assert same(batches(dataset, workers, start_step=start_step), whole[4 * start_step :])


def test_a_sample_is_that_of_its_row_alone_at_its_shape(shaped):
    dataset = shaped()
    again = pickle.loads(pickle.dumps(dataset))
    for batch in dataset.split(list(range(49)), 4):
        made = dataset.make_batch([(1, place) for place in batch])
        for number, place in enumerate(batch):
            sample = again[1, place]
            assert all(np.array_equal(made[name][number], sample[name]) for name in dataset.inputs)


def test_places_are_split_by_shape_in_their_order(shaped, make_dataset):
    dataset, places = shaped(), [3, 40, 7, 1, 22, 35, 9, 48]
    split = dataset.split(places, 2)
    assert sorted(itertools.chain(*split)) == sorted(places) and {len(some) for some in split} <= {1, 2}
    by_shape = {}
    for some in split:
        (shape,) = {dataset.shape(place) for place in some}
        by_shape[shape] = by_shape.get(shape, []) + some
    assert all(some == [place for place in places if dataset.shape(place) == shape] for shape, some in by_shape.items())
    assert make_dataset().split(list(range(5)), 2) == [[0, 1], [2, 3], [4]]


def test_large_arrays_of_the_largest_shape_have_room_in_shared_memory(shaped):
    dataset = shaped(inputs={"factor": 1, "channels": 64})
    order = Mix(dataset.list_sizes, None, 7, dataset.buckets, 2)
    loader = BatchLoader(dataset, StepSampler(order, 8, 2, World(), 0, 3), 2)
    largest = max(SHAPES, key=lambda shape: shape[0] * shape[1])
    places = [(0, place) for place in range(49) if dataset.shape(place) == largest][:2]
    left = loader.make(0, places)
    assert not [name for name, value in left.items() if isinstance(value, np.ndarray)]


def test_a_bad_row_is_replaced_by_one_of_its_shape(tmp_path, make_image, make_dataset):
    rows = [
        Row(f"picture {row}", b"no image" if row % 5 == 0 else make_image(row, SIZES[row % 2]),
            {"width": SIZES[row % 2][0], "height": SIZES[row % 2][1]})
        for row in range(40)
    ]  # fmt: skip
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"".join(map(encode_row, rows))))
    write_filelist(tmp_path / "a.filelist", ["a.gz"])
    sources = read_sources(tmp_path / "a.filelist")
    selection = select_rows(sources, shapes=ShapeRule(SHAPES))
    if not selection.buckets or len(selection.buckets.shapes) < 2:
        pytest.fail("the rows must have two shapes")
    dataset = make_dataset(sources, selection=selection, bad_rows=BadRows())
    skipped = 0
    for batch in batches(dataset, max_steps=5):
        shape = batch["pixel_values"].shape[2:]
        skipped += len(batch["skipped"])
        assert all(row % 5 and dataset.shape(list(selection).index(row)) == shape for row in batch["row_ids"].tolist())
    assert skipped >= 8


def test_a_batch_of_two_shapes_cannot_be_asked_for(shaped):
    dataset = shaped()
    places = [next(place for place in range(49) if dataset.shape(place) == shape) for shape in SHAPES[:2]]
    with pytest.raises((DataError, ValueError)):
        dataset.make_batch([(0, place) for place in places])

import errno
import gc
import gzip
import itertools
import os
import signal
import time

import numpy as np
import paddle
import pytest

from ppldm.data.filelist import read_sources, write_filelist
from ppldm.data.formats.part import Part
from ppldm.data.formats.row import BadRows, encode_row
from ppldm.data.loader import BatchLoader
from ppldm.data.order import Mix, StepSampler
from ppldm.data.text.captions import CaptionRule
from ppldm.utils.errors import DataError
from ppldm.utils.processes.ranks import World


def batches(dataset, workers, world=World(), start_step=0, max_steps=9, micro=2):  # noqa: B008 (frozen)
    sampler = StepSampler(Mix(dataset.list_sizes, dataset.weights, 7), 4, micro, world, start_step, max_steps)
    loader = BatchLoader(dataset, sampler, workers)
    assert len(loader) == len(sampler)
    return [{key: getattr(value, "numpy", lambda v=value: v)() for key, value in batch.items()} for batch in loader]


def same(some, others):
    return len(some) == len(others) and all(
        a.keys() == b.keys() and all(np.array_equal(a[key], b[key]) for key in a)
        for a, b in zip(some, others, strict=True)
    )


def test_a_batch_is_a_dict_of_tensors(make_dataset):
    dataset = make_dataset()
    for workers in (0, 1):
        sampler = StepSampler(Mix(dataset.list_sizes, None, 7), 4, 2, World(), 0, 1)
        batch = next(iter(BatchLoader(dataset, sampler, workers)))
        assert batch.pop("skipped") == []
        assert all(isinstance(value, paddle.Tensor) and value.shape[0] == 2 for value in batch.values())
        assert batch["pixel_values"].dtype == paddle.uint8 and batch["row_ids"].dtype == paddle.int64
        assert batch["noise"].dtype == paddle.float32 and batch["input_ids"].shape == [2, 8]


def test_workers_ranks_and_restarts_change_no_batch(make_dataset):
    dataset = make_dataset()
    whole = batches(dataset, 0)
    assert len(whole) == 18
    assert same(batches(dataset, 2), whole)
    ranks = [batches(dataset, workers, World(rank, 2)) for rank, workers in ((0, 0), (1, 2))]
    assert same([batch for pair in zip(*ranks, strict=True) for batch in pair], whole)
    for start_step, workers in itertools.product([3, 8], [0, 2]):
        assert same(batches(dataset, workers, start_step=start_step), whole[2 * start_step :])
    joined = [{k: np.concatenate([a[k], b[k]]) for k in a} for a, b in zip(whole[::2], whole[1::2], strict=True)]
    for some, other in zip(batches(dataset, 0, micro=4), joined, strict=True):
        assert all(np.array_equal(some[key], other[key]) for key in some)
    ids = np.concatenate([batch["row_ids"] for batch in whole])
    assert sorted(ids[:24]) == list(range(24)) and len(set(ids[24:])) == 12


def test_workers_collect_garbage_though_the_training_process_does_not(make_dataset, monkeypatch):
    dataset = make_dataset()
    make_batch = dataset.make_batch
    tell = lambda *given: make_batch(*given) | {"collects": np.full(2, gc.isenabled())}  # noqa: E731
    monkeypatch.setattr(dataset, "make_batch", tell)
    gc.disable()
    try:
        assert all(batch["collects"].all() for batch in batches(dataset, 2, max_steps=2))
    finally:
        gc.enable()


def test_global_random_state_is_neither_read_nor_changed(make_dataset):
    dataset, results = make_dataset(), []
    for seed in (1, 2):
        np.random.seed(seed)
        paddle.seed(seed)
        results.append(batches(dataset, 0) + batches(dataset, 2))
    assert same(*results)


@pytest.fixture
def half_bad(tmp_path, make_rows, make_dataset):
    lines = [encode_row(row) for row in make_rows(0, 12)]
    lines[1::2] = [b"caption\n"] * 6
    (tmp_path / "bad.gz").write_bytes(gzip.compress(b"".join(lines)))
    write_filelist(tmp_path / "bad.filelist", ["bad.gz"])
    return lambda **settings: make_dataset(read_sources(tmp_path / "bad.filelist"), **settings)


@pytest.mark.parametrize("workers", [0, 2])
def test_every_bad_row_is_counted_whatever_the_workers(half_bad, workers):
    counted = [reason for batch in batches(half_bad(), workers, max_steps=3) for reason in batch["skipped"]]
    order = Mix([12], None, 7).samples(0, 12)[1].tolist()
    passed_over = [next(i for i, row in enumerate(order[at:] + order[:at]) if row % 2 == 0) for at in range(12)]
    assert counted == ["columns"] * sum(passed_over) and sum(passed_over) >= 6


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_arrives_as_itself(half_bad, workers):
    with pytest.raises(DataError, match=r"^bad row \(columns\): .*bad.gz row \d+: [^\n]*$"):
        batches(half_bad(bad_rows=BadRows("raise")), workers)


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_a_killed_worker_is_one_line(make_dataset, new_children, taken):
    dataset = make_dataset(resolution=16)
    sampler = StepSampler(Mix(dataset.list_sizes, None, 7), 4, 2, World(), 0, 1000)
    batches = iter(BatchLoader(dataset, sampler, 2))
    for _ in range(taken + 1):
        next(batches)
    pid = new_children()[taken % 2].pid
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(DataError, match=f"^data worker {pid} was killed by signal 9; [^\n]*$"):
        for _ in batches:
            pass
    assert not new_children()


@pytest.mark.parametrize("input_perturbation", [0.0, 0.1])
def test_large_arrays_do_not_go_through_pipes(make_dataset, input_perturbation):
    # Each noise is larger than what rounding up to pages leaves free.
    dataset = make_dataset(inputs={"input_perturbation": input_perturbation, "factor": 1, "channels": 64})
    sampler = StepSampler(Mix(dataset.list_sizes, None, 7), 4, 2, World(), 0, 1)
    loader = BatchLoader(dataset, sampler, 2)
    left = loader.make(0, next(iter(sampler)))
    assert not [name for name, value in left.items() if isinstance(value, np.ndarray)]


def test_workers_end_with_the_last_user_of_batches(make_dataset, new_children):
    dataset = make_dataset()
    sampler = StepSampler(Mix(dataset.list_sizes, None, 7), 4, 2, World(), 0, 1000)
    some, others = (iter(BatchLoader(dataset, sampler, 2)) for _ in range(2))
    next(some), next(others)  # whose workers have forked copies of the first ones' pipes
    before = time.monotonic()
    some.close()
    assert len(new_children()) == 2 and next(others)
    others.close()
    assert not new_children() and time.monotonic() - before < 5


def test_a_batch_may_be_kept(make_dataset):
    # Its memory must be its own, not that which later batches come through.
    dataset = make_dataset()
    sampler = StepSampler(Mix(dataset.list_sizes, None, 7), 4, 2, World(), 0, 9)
    kept = [list(BatchLoader(dataset, sampler, workers)) for workers in (0, 2)]
    assert len(kept[0]) == len(kept[1]) == 18
    for some, other in zip(*kept, strict=True):
        assert all(np.array_equal(some[name].numpy(), other[name].numpy()) for name in some if name != "skipped")


def disk_error(*_):
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_failing_disk_is_one_line_with_part_and_row(make_dataset, monkeypatch, workers):
    dataset = make_dataset()  # workers are forked, and read by the same os.pread
    whole = batches(dataset, 0, max_steps=1)
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda *place: pread(*place) if place[2] < 2500 else disk_error())
    with pytest.raises(DataError, match=r"^cannot read \S+\.gz row [1-9]\d* \(Input/output error\); check the file"):
        batches(dataset, workers)
    monkeypatch.undo()
    assert same(batches(dataset, workers, max_steps=1), whole)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_what_nobody_foresaw_in_a_row_names_part_and_row(make_dataset, monkeypatch, workers):
    dataset, decode = make_dataset(), Part._decode
    monkeypatch.setattr(
        Part, "_decode", lambda part, data, where: decode(part, data, where) if where.endswith("row 0") else {}["none"]
    )
    with pytest.raises(DataError, match=r"^\S+\.gz row [1-9]\d* cannot be read: KeyError: 'none'; see to its storage"):
        batches(dataset, workers)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_what_nobody_foresaw_in_a_batch_is_one_line(make_dataset, monkeypatch, workers):
    dataset = make_dataset()
    draw, calls = CaptionRule.draw, itertools.count()
    monkeypatch.setattr(CaptionRule, "draw", lambda *args: draw(*args) if next(calls) < 4 else {}["nothing"])
    with pytest.raises(DataError, match=r"^batch \d+ of samples \[\(0, \d+\), \(0, \d+\)\] cannot be made: KeyError:"):
        batches(dataset, workers)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_samples_that_cannot_be_listed_are_one_line(make_dataset, workers):
    dataset = make_dataset()

    class Broken(StepSampler):
        def __iter__(self):
            yield from itertools.islice(super().__iter__(), 3)
            raise OverflowError("no such sample")

    sampler = Broken(Mix(dataset.list_sizes, None, 7), 4, 2, World(), 0, 9)
    taken = []
    with pytest.raises(DataError, match="^the samples of batch 3 cannot be listed: OverflowError: no such sample$"):
        for batch in BatchLoader(dataset, sampler, workers):
            taken.append(batch)
    assert len(taken) == 3

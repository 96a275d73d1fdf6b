"""An interval's means are means, wherever a stop cuts it, and over all ranks."""

import json

import numpy as np
import paddle
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ppldm.networks.model import Loss
from ppldm.training import report as module
from ppldm.training.report import IntervalMetrics, Update
from ppldm.utils.processes.ranks import World

UPDATE = st.tuples(
    st.floats(0, 10),
    st.lists(st.tuples(st.integers(0, 999), st.floats(0, 4, width=32)), min_size=1, max_size=5),
    st.lists(st.sampled_from(["image", "base64"]), max_size=2),
)

SKIPPED = Update(float("nan"), float("inf"))


def seen(timesteps, errors):
    """The loss of a micro-batch of samples at these of 1,000 timesteps."""
    levels = paddle.to_tensor(timesteps).astype("float32") / 1000
    return [Loss(None, paddle.to_tensor(errors, dtype="float32"), levels)]


def feed(interval, updates):
    for loss, samples, skipped in updates:
        timesteps, errors = zip(*samples, strict=True)
        interval.add(Update(loss, 2 * loss, losses=seen(timesteps, errors)), len(samples))
        interval.see({"skipped": skipped, "checksums": [2**31 + timestep for timestep in timesteps]})


def numbers(values):
    return {name: v for name, v in values.items() if name.startswith(("loss", "grad_norm", "skipped", "data"))}


@given(st.lists(UPDATE, min_size=1, max_size=6), st.integers(0, 6))
@example([(0.0, [(0, 2.0), (0, 4.0)], []), (0.0, [(0, 2.0), (0, 1e-8), (0, 1e-8)], [])], 1)  # no digit, either
@settings(deadline=None, max_examples=30)
def test_a_stop_inside_changes_nothing(updates, cut):
    straight, first = IntervalMetrics(World(), True), IntervalMetrics(World(), True)
    feed(straight, updates)
    feed(first, updates[:cut])
    second = IntervalMetrics(World(), True, json.loads(json.dumps(first.state())))
    feed(second, updates[cut:])
    expected, found = numbers(straight.summary()), numbers(second.summary())
    np.testing.assert_array_equal(list(found.values()), list(expected.values()))
    assert found.keys() == expected.keys()
    samples = [sample for _, several, _ in updates for sample in several]
    for quarter in range(4):
        errors = [error for timestep, error in samples if timestep // 250 == quarter]
        wanted = np.mean(errors) if errors else np.nan
        np.testing.assert_allclose(expected[f"loss_quarter_{quarter + 1}"], wanted, rtol=1e-6, atol=1e-9)
    assert expected["loss"] == pytest.approx(np.mean([loss for loss, _, _ in updates]))
    assert expected["skipped_rows"] == sum(len(skipped) for _, _, skipped in updates)
    assert expected["data_crc32"] == sum(2**31 + timestep for timestep, _ in samples) % 2**32


def test_summary_starts_anew_but_rows_stay_skipped():
    interval = IntervalMetrics(World(), True)
    feed(interval, [(1.0, [(0, 1.0)], ["image"]), (3.0, [(999, 5.0)], ["image"])])
    interval.wait_seconds = 1e9
    values = interval.summary()
    assert values["loss"] == 2.0 and values["data_wait_share"] > 1 and values["grad_norm"] == 4.0
    assert values["avg_reader_cost"] == 5e8
    feed(interval, [(5.0, [(500, 1.0)], [])])
    values = interval.summary()
    assert values["loss"] == 5.0 and np.isnan(values["loss_quarter_1"]) and values["loss_quarter_3"] == 1.0
    assert values["skipped_rows_image"] == values["skipped_rows"] == 2
    assert 0 < values["peak_memory_gb"] < 1000 and "peak_device_memory_gb" not in values


def test_numbers_of_all_ranks_are_joined(monkeypatch):
    # The other rank: it saw one sample of the last quarter, skipped a row, and waited longer.
    theirs = [(np.array([[[0, 0, 0, 8.0], [0, 0, 0, 1.0]]]), {"image": 1}, 2**31), (7e8, 5_000_000_000_000, 0)]
    monkeypatch.setattr(module, "gather_objects", lambda value, world: [value, theirs.pop(0)])
    interval = IntervalMetrics(World(0, 2), True)
    feed(interval, [(1.0, [(999, 2.0)], ["base64"])])
    values = interval.summary()
    assert values["loss_quarter_4"] == 5.0 and values["skipped_rows"] == 2
    assert values["data_crc32"] == 999  # of 2**31 + 999 and 2**31
    assert values["avg_reader_cost"] == 7e8 and values["peak_memory_gb"] == 5000
    assert values["images_per_second"] == pytest.approx(2 * values["images_per_second_per_device"])


def test_a_skipped_update_enters_no_mean():
    interval = IntervalMetrics(World())
    interval.add(SKIPPED, 8)
    assert np.isnan(interval.summary()["loss"])
    interval.add(Update(2.0, 1.0), 8)
    interval.add(SKIPPED, 8)
    values = interval.summary()
    assert (values["loss"], values["grad_norm"], values["skipped_updates"]) == (2.0, 1.0, 2)


def test_what_a_skipped_update_saw_is_in_no_quarter_and_it_counts_over_a_stop():
    interval = IntervalMetrics(World(), True)
    interval.add(Update(1.0, 1.0, losses=seen([10], [1.0])), 1)
    bad = seen([20], [float("nan")]) + seen([900], [5.0])
    interval.add(Update(float("nan"), float("nan"), losses=bad), 2)
    interval = IntervalMetrics(World(), True, json.loads(json.dumps(interval.state())))
    interval.add(Update(3.0, 1.0, losses=seen([30], [3.0])), 1)
    interval.add(SKIPPED, 2)
    values = interval.summary()
    assert values["loss_quarter_1"] == 2.0 and np.isnan(values["loss_quarter_4"])
    assert values["skipped_updates"] == 2 and values["loss"] == 2.0


def test_pauses_do_not_count(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    interval = IntervalMetrics(World())
    now[0] += 2
    with interval.paused():
        now[0] += 50
    interval.add(Update(1.0, 1.0), 8)
    values = interval.summary()
    assert values["images_per_second"] == 4 and "loss_quarter_1" not in values

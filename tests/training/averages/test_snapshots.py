"""Snapshots are whole or absent, and hold the averages as far as their type can."""

import tracemalloc

import numpy as np
import paddle
import pytest
from safetensors.numpy import load_file

from ppldm.methods.averages.ema_posthoc import PowerDecay
from ppldm.networks.ema import ExponentialMovingAverage
from ppldm.training.averages import snapshots as module
from ppldm.training.averages.snapshots import (
    SNAPSHOTS,
    SnapshotWriter,
    list_snapshots,
    remove_later,
    write_snapshot,
)
from ppldm.training.checkpoint import POSTHOC_STATE, TrainingState
from ppldm.training.resume import load_model
from ppldm.utils.errors import CheckpointError, ModelError


def averages(values, updates=3):
    """Two averages of one weight, which was `values` after each update."""
    weight = paddle.to_tensor(np.asarray(values, np.float32))
    found = {std: ExponentialMovingAverage({"net.w": weight}, PowerDecay(std)) for std in (0.05, 0.1)}
    for _ in range(updates):
        for one in found.values():
            one.update({})
    return found


@pytest.mark.parametrize(("dtype", "error"), [("float16", 2**-11), ("float32", 0)])
def test_read_as_written(tmp_path, dtype, error):
    values = np.random.default_rng(0).normal(size=(50, 4))
    writer = SnapshotWriter(tmp_path, averages(values), 5, dtype)
    for step in (5, 10):
        writer.write(step)
    found = list_snapshots(tmp_path)
    assert [(one.std, one.step, one.num_updates) for one in found] == [(0.05, 5, 3), (0.1, 5, 3), (0.05, 10, 3),
                                                                        (0.1, 10, 3)]  # fmt: skip
    array = found[0].read()["net.w"]
    assert array.dtype == dtype and (abs(array - values.astype("float32")) <= error * abs(values)).all()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_snapshot_takes_memory_for_a_few_arrays_and_not_for_the_average(tmp_path, dtype):
    weights = {f"net.{number}": paddle.ones([64, 1024]) for number in range(40)}
    average = ExponentialMovingAverage(weights, PowerDecay(0.05))
    average.update({})
    tracemalloc.start()
    write_snapshot(tmp_path / "0.05-1.safetensors", average, dtype)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5 * 4 * 64 * 1024


def test_another_reader_finds_each_array_where_the_file_says(tmp_path):
    values = {"net.b": [1e5, 1.0, 2.0], "net.a": [[0.5], [0.25]], "net.c": 3.0}
    average = ExponentialMovingAverage({name: paddle.to_tensor(one) for name, one in values.items()}, PowerDecay(0.05))
    average.update({})
    write_snapshot(tmp_path / "0.05-1.safetensors", average, "float16")
    found = load_file(tmp_path / "0.05-1.safetensors")
    assert {name: (one.dtype.name, one.tolist()) for name, one in found.items()} == {
        "net.a": ("float16", values["net.a"]), "net.b": ("float32", values["net.b"]),
        "net.c": ("float16", values["net.c"]),
    }  # fmt: skip


def test_a_number_too_large_for_float16_is_kept(tmp_path):
    SnapshotWriter(tmp_path, averages([1e5, 1.0]), 1, "float16").write(1)
    np.testing.assert_allclose(list_snapshots(tmp_path)[0].read()["net.w"], [1e5, 1.0])


def test_nothing_is_written_before_the_first_update(tmp_path):
    SnapshotWriter(tmp_path, averages([1.0], updates=0), 1, "float16").write(1)
    assert not list_snapshots(tmp_path)


def test_a_changed_byte_is_seen(tmp_path):
    SnapshotWriter(tmp_path, averages([1.0, 2.0]), 1, "float16").write(1)
    path = list_snapshots(tmp_path)[0].path
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ModelError, match="0.05-1.safetensors has changed"):
        list_snapshots(tmp_path)[0].read()


def test_a_full_disk_does_not_end_the_run(tmp_path, monkeypatch, caplog):
    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "atomic_write", full)
    SnapshotWriter(tmp_path, averages([1.0]), 1, "float16").write(1)
    assert "training goes on without a snapshot" in caplog.text and not list_snapshots(tmp_path)


def test_later_ones_go_with_what_a_killed_process_left(tmp_path):
    writer = SnapshotWriter(tmp_path, averages([1.0]), 1, "float16")
    for step in (8, 9, 10):
        writer.write(step)
    (tmp_path / SNAPSHOTS / ".0.05-11.safetensors.x.tmp").write_bytes(b"half")
    remove_later(tmp_path, 9)
    assert {one.step for one in list_snapshots(tmp_path)} == {8, 9}
    assert len(list((tmp_path / SNAPSHOTS).iterdir())) == 4
    remove_later(tmp_path / "new", 0)


def test_a_resumed_run_goes_on_from_both_averages(tmp_path):
    layer = paddle.nn.Linear(2, 2)
    values = np.arange(5, dtype=np.float32)

    def state(stds=(0.05, 0.1)):
        return TrainingState(
            layer, None, None, posthoc={std: one for std, one in averages(values).items() if std in stds}
        )

    saved, again = state(), state()
    for one in saved.posthoc.values():
        one.parameters["net.w"].set_value(values + 1)
        one.update({})
    paddle.save(layer.state_dict(), str(tmp_path / "model_state.pdparams"))
    with pytest.raises(CheckpointError, match="holds no average of --ema_posthoc 0.05"):
        load_model(tmp_path, again)
    paddle.save(saved.posthoc_state(), str(tmp_path / POSTHOC_STATE))
    load_model(tmp_path, again)
    for one, other in zip(saved.posthoc.values(), again.posthoc.values(), strict=True):
        assert one.num_updates == other.num_updates == 4
        assert (one.shadow["net.w"].numpy() == other.shadow["net.w"].numpy()).all()
        assert (one.shadow["net.w"].numpy() != values).any()


@pytest.mark.parametrize(("every", "due"), [(1, [1, 2, 3, 4, 5, 6, 7]), (3, [3, 6, 7]), (7, [7]), (50, [7])])
def test_when_they_are_due(tmp_path, every, due):
    writer = SnapshotWriter(tmp_path, {}, every, "float16")
    assert [step for step in range(1, 8) if writer.are_due(step, 7)] == due


@pytest.mark.parametrize(
    ("every", "start", "gigabytes"), [(10, 0, 4), (10, 20, 2), (15, 0, 3), (40, 0, 1), (100, 0, 1)]
)
def test_the_room_that_a_run_will_take_is_said(tmp_path, monkeypatch, caplog, every, start, gigabytes):
    """Of 40 updates, with 2 averages of 125 million numbers of 4 bytes each."""
    found = averages([1.0])
    for one in found.values():
        monkeypatch.setattr(one, "parameters", {"w": np.broadcast_to(np.float32(0), 125_000_000)})
    monkeypatch.setattr(module, "count_free_bytes", lambda folder: 2.5e9)
    with caplog.at_level("INFO"):
        SnapshotWriter(tmp_path, found, every, "float32").announce(start, 40)
    assert f"{gigabytes:.3f} GB until update 40" in caplog.text
    assert ("raise --ema_posthoc_every" in caplog.text) == (gigabytes > 2.5)

"""Hours on a CPU: some updates of the very recipe are timed, or of a smaller one that is scaled; nothing is left."""

import json
import logging
import tempfile
from dataclasses import replace
from types import SimpleNamespace

import pytest

from ppldm.training.commands.train import read_recipe
from ppldm.training.doctor import timed
from ppldm.training.doctor.command import doctor
from ppldm.utils.errors import ConfigError
from ppldm.utils.log import get_logger


@pytest.fixture
def recipe(tiny, tmp_path):
    return read_recipe(tiny.flags(tmp_path / "out", per_device_train_batch_size=4, max_steps=9), True, None)


@pytest.fixture
def clock(monkeypatch, tmp_path):
    """Each look at it is two seconds later; temporary folders lie in a folder of their own."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    now = [0.0]
    monkeypatch.setattr(timed, "time", SimpleNamespace(perf_counter=lambda: now.__setitem__(0, now[0] + 2) or now[0]))


def test_updates_of_the_run_are_timed_and_nothing_is_left(recipe, clock, tmp_path):
    training = replace(recipe.training, gradient_accumulation_steps=3)
    level = get_logger().level
    found = timed.time_updates(replace(recipe, training=training), 1, 10**6, 10**6, 1e9)
    assert found == (6.0, "5 updates timed on this CPU")  # two seconds for each of three batches
    assert not (tmp_path / "out").exists() and not [*(tmp_path / "temporary").iterdir()]
    assert get_logger().level == level != logging.ERROR


@pytest.mark.turn("a forecast of doctor holds", 2)
def test_the_forecast_is_made_of_them(tiny, tmp_path, clock, capsys):
    doctor(["--json", *tiny.flags(tmp_path / "out", max_steps=1800, gradient_accumulation_steps=1)])
    report = json.loads(capsys.readouterr().out)
    assert "forecast" in report, [one for one in report["findings"] if one["name"] == "forecast"]
    assert report["forecast"]["seconds_an_update"] == 2.0 and report["forecast"]["hours"] == 1.0
    assert (
        "2 s an update (5 updates timed on this CPU), 1 h"
        in {one["name"]: one["text"] for one in report["findings"]}["forecast"]
    )


@pytest.mark.turn("a forecast of doctor holds", 2)
def test_the_operations_of_an_update_are_those_of_all_its_batches(tiny, tmp_path, capsys):
    found = []
    for said in ({"gradient_accumulation_steps": 3}, {"global_batch_size": 6}):
        flags = tiny.flags(tmp_path / "out", **{"gradient_accumulation_steps": 1} | said, per_device_train_batch_size=2)
        doctor(["--json", "--no_timing", *flags])
        found.append(json.loads(capsys.readouterr().out)["operations_an_update"])
    assert found[0] == found[1] > 0


@pytest.mark.parametrize(
    "free, speed, batch, side, share",
    [(1 << 40, 1e12, 4, 64, 1), (1 << 40, 1e4, 1, 64, 4), (30_000, 1e12, 2, 64, 2), (1 << 40, 2.1e3, 1, 32, 16),
     (2000, 1e12, 1, 16, 64)],
)  # fmt: skip
def test_what_is_too_large_is_timed_smaller_and_scaled(recipe, monkeypatch, free, speed, batch, side, share):
    """With one byte and ten operations for each pixel of a batch."""

    def measure(one):
        pixels = one.training.per_device_train_batch_size * one.data.resolution**2
        return 10 * pixels, pixels

    def estimate(one, _num_devices):
        operations, total = measure(one)
        return SimpleNamespace(operations=operations, total=total)

    recipe = replace(recipe, data=replace(recipe.data, resolution=64))
    monkeypatch.setattr(timed, "estimate", estimate)
    monkeypatch.setattr(timed, "available_memory_bytes", lambda: free)
    monkeypatch.setattr(timed, "_LONGEST_SECONDS", 5.0)
    small, found = timed._affordable(recipe, 2, *measure(recipe), speed)
    assert (small.training.per_device_train_batch_size, small.data.resolution, found) == (batch, side, share)


def test_what_cannot_be_timed_is_said(recipe, monkeypatch):
    monkeypatch.setattr(timed, "estimate", lambda *_: SimpleNamespace(operations=10**12, total=10**12))
    with pytest.raises(ConfigError, match="too large to be timed on this machine"):
        timed._affordable(recipe, 1, 10**12, 10**12, 1.0)


def test_what_a_smaller_batch_takes_is_scaled(recipe, monkeypatch):
    monkeypatch.setattr(timed, "_affordable", lambda *_: (recipe, 8.0))
    monkeypatch.setattr(timed, "_time", lambda *_: (0.5, 7))
    side = recipe.data.resolution
    words = f"7 updates timed on this CPU, with 4 samples of {side} px and scaled"
    assert timed.time_updates(recipe, 1, 10**6, 1, 1e9) == (4.0, words)

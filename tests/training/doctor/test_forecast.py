"""Hours, disk and cost from a run's log; the quick look before a training."""

import json
from types import SimpleNamespace

import pytest
from small_disk import fill, small_disk

from ppldm.training.averages.snapshots import DEFAULT_NUMBER, SnapshotWriter
from ppldm.training.commands.train import check_early
from ppldm.training.doctor.machine import look_quickly
from ppldm.training.doctor.run import (
    count_checkpoints,
    forecast,
    least_hours,
    other_bytes,
    seconds_an_update,
    tell,
)
from ppldm.utils.errors import ConfigError


def test_the_log_says_how_long_an_update_takes(tmp_path):
    lines = [{"step": step, "avg_batch_cost": cost} for step, cost in ((10, 60.0), (20, 2.0), (30, 3.0), (40, 2.5))]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert seconds_an_update(tmp_path) == 2.5  # of all but the first, the median
    with pytest.raises(ConfigError, match="has no metrics.jsonl"):
        seconds_an_update(tmp_path / "other")


def test_the_forecast_is_what_it_says():
    found = forecast(1.8, 2000, 5_000_000_000, 8, 2.5)
    assert found == {"seconds_an_update": 1.8, "hours": 1.0, "disk_gb": 5.0, "cost": 20.0}
    assert "cost" not in forecast(1.8, 2000, 0, 8, None)
    assert "cost 20.00" in str(next(tell(found))) and "--run FOLDER" in str(next(tell(None)))


@pytest.mark.parametrize(("every", "steps"), [(None, 4), (None, 120), (3, 10), (5, 10), (20, 10)])
def test_a_run_leaves_its_model_and_the_snapshots_that_are_due(every, steps):
    own = every or max(1, steps // DEFAULT_NUMBER)
    due = sum(SnapshotWriter(None, {}, own, "float16").are_due(step, steps) for step in range(1, steps + 1))
    config = SimpleNamespace(ema_posthoc_every=every)
    assert other_bytes(config, {"exported": 7, "snapshots": 100}, steps) == 7 + 100 * due


def test_a_run_of_days_on_a_cpu_is_a_warning():
    assert [next(tell(None, hours, True)).status for hours in (0.0, 40.0, 60.0)] == ["ok", "ok", "warning"]
    assert "at least 2 days" in str(next(tell(None, 60.0, True))) and "--max_steps" in next(tell(None, 60.0, True)).fix
    measured = forecast(360.0, 1000, 0, 1, None)
    assert next(tell(measured, is_cpu=True)).status == "warning" and next(tell(measured)).status == "ok"
    assert least_hours(10**12, 2000) == pytest.approx(2 * least_hours(10**12, 1000), rel=0.9)


@pytest.mark.parametrize(
    ("save", "at", "limit", "backup", "count"),
    [
        (10, (), None, 0, 10),
        (10, (), 2, 0, 2),
        (30, (), None, 0, 4),
        (10, (), 2, 50, 3),
        (30, (0, 1, 30, 500), None, 0, 6),
    ],
)
def test_a_run_keeps_so_many_checkpoints(save, at, limit, backup, count):
    arguments = SimpleNamespace(save_steps=save, save_at=at, save_total_limit=limit, backup_every=backup)
    assert count_checkpoints(arguments, 100) == count


def test_the_quick_look_warns_before_a_training_and_is_silent_otherwise(tiny, tmp_path, caplog):
    look_quickly(check_early(tiny.flags(tmp_path / "out")).training)
    assert not caplog.records
    with small_disk(tmp_path / "disk", "8m") as folder:
        fill(folder, 1 << 18)
        look_quickly(check_early(tiny.flags(folder / "run")).training)
    assert "doctor: disk: " in caplog.text

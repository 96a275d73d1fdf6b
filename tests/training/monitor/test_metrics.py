"""One curve over any number of resumes, in every place that shows it."""

import json
import math

import pytest

from ppldm.training.metrics import (
    METRICS_FILE,
    drop_after,
    last_step,
    read_metrics,
)
from ppldm.training.report import describe, describe_costs, log_metrics


def write(folder, start, steps):
    path = folder / METRICS_FILE
    past = drop_after(path, start)
    for step in steps:
        log_metrics(path, step, {"loss": 1.0 / step})
    return past


@pytest.mark.parametrize("resume_at", [0, 3, 5, 9])
def test_resuming_drops_what_is_past_the_step(tmp_path, resume_at):
    assert write(tmp_path, 0, range(1, 10)) == []
    past = write(tmp_path, resume_at, range(resume_at + 1, 13))
    assert [record["global_step"] for record in past] == list(range(1, resume_at + 1))
    records = read_metrics(tmp_path / METRICS_FILE)
    assert [record["global_step"] for record in records] == list(range(1, 13))
    times = [record["time"] for record in records]
    assert times == sorted(times)


def test_a_line_cut_short_by_a_kill_goes(tmp_path):
    write(tmp_path, 0, range(1, 4))
    path = tmp_path / METRICS_FILE
    path.write_text(path.read_text()[:-9])
    write(tmp_path, 2, [3])
    assert [record["global_step"] for record in read_metrics(path)] == [1, 2, 3]


def test_not_a_number_is_null(tmp_path):
    log_metrics(tmp_path / METRICS_FILE, 1, {"loss": math.nan, "lr_abs": 0.5})
    record = json.loads((tmp_path / METRICS_FILE).read_text())
    assert record.pop("time") > 0
    assert record == {"global_step": 1, "loss": None, "lr_abs": 0.5}


def test_the_line_for_people():
    values = {
        "loss": 0.98765,
        "loss_quarter_1": 1.25,
        "loss_quarter_2": math.nan,
        "grad_norm": 0.5,
        "lr_abs": 4.6875e-5,
    }
    values |= {"images_per_second": 123.4, "data_wait_share": 0.0123, "skipped_rows": 3, "something_else": 9.0}
    assert describe(50, values) == (
        "step 50  loss 0.9877  by timestep 1.250 -  gradient 0.5  lr 4.69e-05  123 images/s  "
        "waited for data 1.2%  skipped 3 rows"
    )
    for devices, words in ((1, "123 images/s  waited"), (2, "123 images/s (61.7 a device)  waited")):
        assert words in describe(50, values | {"images_per_second_per_device": 123.4 / devices})
    assert describe(5, {"validation_loss": 0.5}) == "step 5  validation loss 0.5000"


def test_the_line_of_the_benchmark():
    values = {"avg_reader_cost": 0.01, "avg_batch_cost": 0.5, "images_per_second": 64.0}
    assert describe_costs(values, 32) == (
        "avg_reader_cost: 0.01000 sec, avg_batch_cost: 0.50000 sec, avg_samples: 32, ips: 64.00000 images/sec"
    )


STEPS = [1, 2, 4]


@pytest.mark.parametrize(
    "change, step, ends, kept, words",
    [
        (lambda text: text, 4, 4, [1, 2, 4], None),
        (lambda text: text, 3, 2, [1, 2], None),
        (lambda text: text, 9, None, [1, 2, 4], None),
        (lambda text: text[:-3], 3, 2, [1, 2], None),  # what a kill leaves
        (lambda text: text[:-3], 4, 4, [1, 2], "ends at update 2 and reached 4 when its checkpoint was written"),
        (lambda text: text + text, 4, 4, [1, 2, 4], "line 4 is not a line of metrics"),
        (lambda text: b"\x80" + text, 4, 4, [2, 4], "line 1 is not UTF-8 text"),
        (lambda text: b"3\n" + text, 4, 4, [1, 2, 4], "line 1 is not a line of metrics"),
        (lambda text: text.replace(b'"global_step": 2', b'"global_step": "2"'), 4, 4, [1, 4], "line 2 is not a line"),
    ],
)
def test_what_is_kept_of_a_curve_and_said_of_it(tmp_path, caplog, change, step, ends, kept, words):
    write(tmp_path, 0, STEPS)
    path = tmp_path / METRICS_FILE
    assert last_step(path) == 4
    path.write_bytes(before := change(path.read_bytes()))
    caplog.clear()
    assert [record["global_step"] for record in drop_after(path, step, ends)] == kept
    assert [record["global_step"] for record in read_metrics(path)] == kept and last_step(path) == kept[-1]
    said = [message for message in caplog.messages if METRICS_FILE in message]
    assert len(said) == (words is not None) and (words is None or words in said[0])
    damaged = tmp_path / f"damaged-{METRICS_FILE}"
    assert damaged.exists() is ("line" in (words or "") and "ends" not in words)
    assert not damaged.exists() or damaged.read_bytes() == before


def test_a_curve_that_is_gone_is_said(tmp_path, caplog):
    path = tmp_path / METRICS_FILE
    assert last_step(path) == 0 and drop_after(path, 4, 0) == drop_after(path, 4) == [] and not caplog.messages
    assert drop_after(path, 4, 4) == []
    assert "is not there: the curve up to update 4 is lost" in caplog.text

"""One curve over any number of resumes, and means that are means."""

import json
import math

import pytest
from PIL import Image

from ppldm.training.metrics import METRICS_FILE, Interval, MetricsWriter, plot_loss, read_metrics
from ppldm.utils.errors import DataError


def write(folder, start, steps, reporters=()):
    writer = MetricsWriter(folder, reporters, folder / "logs", start)
    for step in steps:
        writer.log(step, {"loss": 1.0 / step})
    writer.close()


@pytest.mark.parametrize("resume_at", [0, 3, 5, 9])
def test_resuming_drops_what_is_past_the_step(tmp_path, resume_at):
    write(tmp_path, 0, range(1, 10))
    write(tmp_path, resume_at, range(resume_at + 1, 13))
    assert [record["global_step"] for record in read_metrics(tmp_path / METRICS_FILE)] == list(range(1, 13))


def test_a_line_cut_short_by_a_kill_goes(tmp_path):
    write(tmp_path, 0, range(1, 4))
    path = tmp_path / METRICS_FILE
    path.write_text(path.read_text()[:-9])
    write(tmp_path, 2, [3])
    assert [record["global_step"] for record in read_metrics(path)] == [1, 2, 3]


def test_not_a_number_is_null(tmp_path):
    MetricsWriter(tmp_path, (), tmp_path, 0).log(1, {"loss": math.nan, "lr_abs": 0.5})
    assert json.loads((tmp_path / METRICS_FILE).read_text()) == {"global_step": 1, "loss": None, "lr_abs": 0.5}


def test_visualdl_has_curves_and_pictures(tmp_path):
    import numpy as np
    from visualdl import LogReader

    writer = MetricsWriter(tmp_path, ("visualdl",), tmp_path / "logs", 0)
    for step in (1, 2):
        writer.log(step, {"loss": step / 2})
    writer.pictures(2, {"reconstruction": np.zeros((4, 8, 3), dtype=np.uint8)})
    writer.close()
    reader = LogReader(file_path=str(next((tmp_path / "logs").iterdir())))
    assert [(record.id, record.value) for record in reader.get_data("scalar", "train/loss")] == [(1, 0.5), (2, 1.0)]
    assert "reconstruction" in reader.get_tags()["image"]


def test_interval_means():
    interval = Interval([])
    interval.add(1.0, 8)
    interval.add(3.0, 8)
    interval.wait_seconds = 1e9
    values = interval.summary(world_size=4)
    assert values["loss"] == 2.0 and values["data_wait_share"] > 1
    assert values["images_per_second"] == pytest.approx(4 * values["images_per_second_per_device"])
    interval.add(5.0, 8)
    assert interval.summary(1)["loss"] == 5.0


def test_loss_curve(tmp_path):
    write(tmp_path, 0, range(1, 60))
    plot_loss(str(tmp_path))
    assert Image.open(tmp_path / "loss.png").size[0] > 300
    with pytest.raises(DataError, match="no losses"):
        (tmp_path / "empty").mkdir()
        (tmp_path / "empty" / METRICS_FILE).write_text("")
        plot_loss(str(tmp_path / "empty"))
    with pytest.raises(DataError, match="cannot read"):
        plot_loss(str(tmp_path / "nowhere.jsonl"))

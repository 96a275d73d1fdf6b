"""`ppldm plot-loss`: a run's losses as a picture."""

import json

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from ppldm.runs.page import draw_loss, plot_loss
from ppldm.utils.errors import DataError


def test_loss_curve(tmp_path):
    records = [{"global_step": step, "loss": 1 / step} for step in range(1, 60)]
    records.append({"global_step": 60, "loss": 0.02, "validation_loss": 0.5})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    plot_loss(str(tmp_path))
    assert Image.open(tmp_path / "loss.png").size[0] > 300
    shown = np.asarray(Image.open(tmp_path / "loss.png").convert("RGB")).reshape(-1, 3)
    assert (shown == (0xE6, 0x55, 0x0D)).all(axis=1).any()
    with pytest.raises(DataError, match="no losses"):
        (tmp_path / "empty").mkdir()
        (tmp_path / "empty/metrics.jsonl").write_text("")
        plot_loss(str(tmp_path / "empty"))
    with pytest.raises(DataError, match="cannot read"):
        plot_loss(str(tmp_path / "nowhere.jsonl"))


def test_a_curve_of_one_point_shows_it():
    axes = Figure().subplots()
    draw_loss(axes, [{"global_step": 3, "loss": 0.5}], "run")
    assert axes.lines[0].get_marker() == "o"
    axes = Figure().subplots()
    draw_loss(axes, [{"global_step": step, "loss": 0.5} for step in (3, 4)], "run")
    assert axes.lines[0].get_marker() in ("None", "")

"""The tiny model overfits eight pictures along a recorded curve.

A band of 3 % around each recorded mean is wide enough for other processors' rounding, and too narrow for a loss that is
off by 5 %.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from command_line import parse_arguments

from ppldm.training.metrics import read_metrics
from ppldm.training.prepare import prepare
from ppldm.training.train import run_loop

RECORDED = Path(__file__).with_name("learning.json")
BAND = 0.03
NUM_STEPS, WINDOW = 80, 40

pytestmark = pytest.mark.slow


def learn(tiny, folder, **changes) -> list[float]:
    """Mean losses over windows of `WINDOW` updates."""
    eight = ", ".join(f'"picture {number}"' for number in range(8))
    settings = {"where": f"caption in ({eight})", "per_device_train_batch_size": 8, "learning_rate": 4e-3,
                "max_steps": NUM_STEPS, "logging_steps": WINDOW, "save_steps": NUM_STEPS}  # fmt: skip
    run_loop(prepare(*parse_arguments(tiny.flags(folder, **settings | changes), loop=True)))
    return [record["loss"] for record in read_metrics(folder / "metrics.jsonl")]


def leaves_the_band(losses, recorded) -> bool:
    return bool((np.abs(np.array(losses) / np.array(recorded) - 1) > BAND).any())


def test_eight_pictures_are_learned_along_the_recorded_curve(tiny, tmp_path):
    recorded = json.loads(RECORDED.read_text())["losses"]
    assert recorded[-1] < 0.6 * recorded[0]
    losses = learn(tiny, tmp_path)
    assert not leaves_the_band(losses, recorded), losses
    for wrong in (0.95, 1.05):
        assert leaves_the_band([wrong * loss for loss in losses], recorded)

"""What a first training is said to take."""

from dataclasses import replace
from pathlib import Path

import pytest

from ppldm.data.text.survey import Survey
from ppldm.families.first_training import FirstTraining

CHOSEN = FirstTraining(Survey(Path(), "names", None, {}, (), (), {}), 1400, 800, 48, None, 0.0, True)


@pytest.mark.parametrize("family, steps", [("ldm", "steps"), ("autoencoder", "autoencoder_steps")])
def test_the_time_of_a_training_grows_with_its_updates_and_its_pictures(family, steps):
    def seconds(**changes) -> float:
        return replace(CHOSEN, **changes).seconds(family) - replace(CHOSEN, **(changes | {steps: 0})).seconds(family)

    usual, updates = seconds(), getattr(CHOSEN, steps)
    assert seconds(**{steps: 3 * updates}) == pytest.approx(3 * usual)
    # At most by the pixels, of which twice the side has four times as many.
    assert usual == seconds(resolution=32) and 2 * usual < seconds(resolution=96) < 4 * usual
    assert seconds(resolution=96, **{steps: 3 * updates}) == pytest.approx(3 * seconds(resolution=96))

"""What a drawing says, what it refuses in one line, and guidance with a part of its contrast taken back."""

import json
import re
from dataclasses import fields, replace

import numpy as np
import paddle
import pytest

from ppldm.diffusion.drawing import ALIASES, SAMPLERS, Drawing, samplers_of
from ppldm.diffusion.guided import _guide
from ppldm.diffusion.process import PREDICTION_TYPES, Process
from ppldm.diffusion.samplers import make_sampler
from ppldm.utils.errors import ConfigError


def test_a_record_says_what_is_not_the_default_and_makes_the_same_drawing():
    assert Drawing(3, 2.0, "ddim").as_dict() == {
        "sampler": "ddim",
        "num_inference_steps": 3,
        "guidance_scale": 2.0,
    }
    other = Drawing(3, 2.0, "ddim", 0.5, 0.25, "trailing")
    assert Drawing(**other.as_dict()) == other
    assert {one.name for one in fields(Drawing) if one.name not in other.as_dict()} == {
        "sigma_schedule",
        "strength",
        "guidance_interval",
        "cfg_zero",
    }
    limited = Drawing(3, 2.0, "flow-euler", guidance_interval=(0.25, 1), cfg_zero=True)
    kept = json.loads(json.dumps(limited.as_dict()))
    assert kept == limited.as_dict() and Drawing(**kept) == limited and kept["guidance_interval"] == [0.25, 1]


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"num_inference_steps": 0}, "--num_inference_steps 0 must be above 0"),
        ({"num_inference_steps": 2.5}, "--num_inference_steps 2.5 is not a whole number"),
        ({"num_inference_steps": True}, "--num_inference_steps True is not a whole number"),
        ({"guidance_scale": float("inf")}, "--guidance_scale inf is not a number; 7.5 is usual"),
        ({"guidance_scale": "7"}, "--guidance_scale 7 is not a number"),
        ({"guidance_rescale": -0.1}, "--guidance_rescale -0.1 must be from 0 to 1"),
        ({"eta": 1.5}, "--eta 1.5 must be from 0 to 1"),
        ({"eta": 0.5, "sampler": "euler"}, "--eta 0.5 is for the sampler ddim, and euler has none"),
        ({"sampler": "dream"}, "--sampler dream is not one of ddim"),
        ({"timestep_spacing": "odd"}, "--timestep_spacing odd is not one of leading, trailing, linspace"),
        ({"timestep_spacing": "leading", "sampler": "flow-euler"}, "--timestep_spacing is not for flow-euler"),
        ({"sigma_schedule": "odd"}, "--sigma_schedule odd is not one of karras, exponential"),
        ({"sigma_schedule": "karras", "sampler": "ddim"}, "the sampler ddim takes no karras sigmas"),
        ({"guidance_interval": (0.8, 0.2)}, "--guidance_interval '(0.8, 0.2)' must be two shares of noise from 0 to 1"),
        ({"guidance_interval": [0, 1.5]}, "--guidance_interval '(0, 1.5)' must be two shares of noise from 0 to 1"),
        ({"guidance_interval": (0.2,)}, "--guidance_interval '(0.2,)' must be two shares of noise"),
        ({"guidance_interval": (float("nan"), 1)}, "--guidance_interval '(nan, 1)' must be two shares of noise"),
        ({"guidance_interval": (False, True)}, "--guidance_interval '(False, True)' must be two shares of noise"),
        ({"guidance_interval": 0.5}, "--guidance_interval '0.5' must be two shares of noise"),
        ({"cfg_zero": 1}, "--cfg_zero '1' is neither true nor false"),
        ({"cfg_zero": True, "sampler": "ddim"}, "--cfg_zero scales the direction of flow, and ddim is for other"),
        ({"cfg_zero": True, "num_inference_steps": 1}, "--cfg_zero leaves out the first step, and"),
    ],
)
def test_what_no_model_can_be_drawn_with_is_one_line(settings, message):
    with pytest.raises(ConfigError) as caught:
        Drawing(**settings).check()
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_every_sampler_that_fits_is_chosen_by_its_names():
    for kind in PREDICTION_TYPES:
        process = Process(prediction_type=kind)
        fit = samplers_of(process)
        assert Drawing().fit(process).sampler == fit[0]
        names = {name: name for name in SAMPLERS} | ALIASES
        for name, sampler in names.items():
            if sampler in fit:
                assert Drawing(sampler=name).fit(process) == Drawing(50, 7.5, sampler)
            else:
                with pytest.raises(ConfigError, match=re.escape(f"the sampler {sampler} does not draw with")):
                    Drawing(sampler=name).fit(process)
    with pytest.raises(ConfigError, match="--num_inference_steps 1001 must be from 1 to 1000, the steps that"):
        Drawing(1001).fit(Process())
    with pytest.raises(ConfigError, match="--cfg_zero scales the direction of flow, and ddim is for other models"):
        Drawing(cfg_zero=True).fit(Process())
    with pytest.raises(ConfigError, match="--eta 1 is for the sampler ddim, and flow-euler has none"):
        Drawing(eta=1).fit(Process(prediction_type="flow"))


def test_rescaled_guidance_has_the_deviation_of_the_prompts_branch():
    """Equations 15 and 16 of arXiv:2305.08891, written out in numpy."""
    rng = np.random.default_rng(0)
    without, said = rng.standard_normal((2, 3, 4, 5, 6), dtype=np.float32)
    guided = without + 7.5 * (said - without)
    for share in (0.0, 0.7, 1.0):
        found = _guide(
            paddle.to_tensor(without), paddle.to_tensor(said), Drawing(guidance_scale=7.5, guidance_rescale=share)
        ).numpy()
        deviations = [one.reshape(3, -1).std(axis=1) for one in (said, guided)]
        alike = guided * (deviations[0] / deviations[1])[:, None, None, None]
        np.testing.assert_allclose(found, share * alike + (1 - share) * guided, rtol=1e-5, atol=1e-5)
    assert replace(Drawing(), guidance_rescale=1.0).fit(Process()).guidance_scale == 7.5


@pytest.mark.parametrize("steps, strength", [(1, 1.0), (2, 1.0), (3, 1.0), (10, 0.5), (4, 0.3)])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_passes_are_those_of_the_run(sampler, steps, strength):
    process = Process.of({"prediction_type": "flow" if sampler == "flow-euler" else "epsilon"})
    drawing = Drawing(steps, 1.0, sampler, strength=strength)
    assert len(make_sampler(process, drawing).timesteps) == drawing.num_passes()

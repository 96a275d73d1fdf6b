"""`generate` and its kin take anything at all: pictures, or one sentence of what is wrong."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_weights import small_weights

from ppldm.data.text.tokenizer import CaptionTokenizer, build_vocab
from ppldm.families.ldm_build import build_model
from ppldm.inference.pipeline import TextToImage
from ppldm.utils.errors import ConfigError, PpldmError

FEW = {"num_inference_steps": 1, "guidance_scale": 1.0, "size": (16, 16)}
ODD = [None, True, -1, 0, 1.5, float("nan"), 10**30, "", "x", b"x", [], [None], ["x", 3], (1, 2, 3), {}, {"a": 1},
       object(), np.zeros(3), np.float32(2), 1j, lambda: 0, "\0", "\ud800", "x" * 300]  # fmt: skip
NAMES = ["negative_prompt", "num_samples", "size", "height", "width", "seed", "sampler", "num_inference_steps",
         "guidance_scale", "guidance_rescale", "eta", "timestep_spacing", "sigma_schedule", "prompt_syntax", 
         "wildcards", "image", "mask", "strength", "control", "control_filter", "control_scale", "latents", 
         "batch_size", "callback", "output", "guidance_interval", "cfg_zero"]  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return TextToImage(build_model(small_weights(3), "small"), CaptionTokenizer(build_vocab(["a red heart"]), 77), 16)


def drawn(model, prompt, **given) -> None:
    try:
        model.generate(prompt, **given)
    except PpldmError as error:
        assert "\n" not in str(error) and len(str(error)) < 2000


@pytest.mark.parametrize("value", ODD, ids=lambda value: repr(value)[:20].encode("unicode-escape").decode())
def test_any_prompt(model, value):
    drawn(model, value, **FEW)


@pytest.mark.parametrize("name", NAMES)
def test_any_value_of_any_setting(model, name):
    for value in ODD:
        rest = {key: one for key, one in FEW.items() if not (key == "size" and name in ("height", "width"))}
        if not (name == "callback" and callable(value)):  # what it raises is its own
            drawn(model, "a", **rest | {name: value})


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.tuples(*[st.sampled_from([0, 7, 8, -8, 65536, 2**31, 2**63, "64", 64.0, None])] * 2))
def test_any_size(model, sides):
    if sides not in ((8, 8), (None, None), (8, None), (None, 8)):
        with pytest.raises(ConfigError):
            model.generate("a", num_inference_steps=1, size=sides)


@pytest.mark.parametrize("size", [(65536, 65536), (16, 65536), (10**30, 16)])
def test_no_size_takes_all_memory(model, size, tmp_path):
    image = np.zeros((8, 8, 3), np.uint8)
    for more in ({}, {"image": image}, {"image": image, "mask": image}):
        with pytest.raises(ConfigError, match="must be a whole number from 1 to 16384"):
            model.generate("a", size=size, **more)


@pytest.mark.parametrize("value", ODD, ids=lambda value: repr(value)[:20].encode("unicode-escape").decode())
def test_any_pictures_and_latents(model, value):
    for method in (model.encode, model.decode):
        with pytest.raises(ConfigError):
            method(value)

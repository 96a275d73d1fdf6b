"""Half precision: what is cast, on a device that has it; one line where it has not."""

from dataclasses import replace

import paddle
import pytest
from small_weights import small_weights

import ppldm
from ppldm.data.text.tokenizer import CaptionTokenizer, build_vocab
from ppldm.networks import engine
from ppldm.utils.errors import ConfigError
from ppldm.utils.machine.devices import current_device
from ppldm.weights.write import write_weights

FEW = {"num_inference_steps": 2, "guidance_scale": 3.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "small"
    weights = small_weights(4)
    weights.tokenizer = CaptionTokenizer(build_vocab(["a red heart", "two blue boats"]), 77)
    write_weights(weights, "ppdiffusers", folder)
    return folder


def test_what_is_drawn_with_is_cast_and_drawn_under_autocast(folder, monkeypatch):
    """On a device that is said to have it: on a CPU Paddle's casts have no effect, so that they are only seen here."""
    cast, entered = [], []
    monkeypatch.setattr("ppldm.inference.load.current_device", lambda: replace(current_device(), bfloat16=True))
    monkeypatch.setattr("paddle.amp.decorate", lambda **given: cast.append(given))
    autocast = paddle.amp.auto_cast
    monkeypatch.setattr(
        "paddle.amp.auto_cast", lambda *args, **given: entered.append(given) or autocast(*args, **given)
    )
    model = ppldm.load(folder, dtype="bfloat16")
    ((layers, level, dtype),) = [(one["models"], one["level"], one["dtype"]) for one in cast]
    assert (level, dtype) == ("O2", "bfloat16") and model.computed == {"dtype": "bfloat16"}
    assert {id(one) for one in layers} == {id(model.model.unet), id(model.model.text_encoder)}
    model.generate("a red heart", **FEW)
    assert {"level": "O2", "dtype": "bfloat16"} in entered


@pytest.mark.parametrize(
    "has, dtype, says",
    [
        ({}, "bfloat16", "--dtype bfloat16: Paddle does not compute in it on .*; use --engine openvino-bfloat16"),
        ({"float16": True}, "int8", "--dtype int8 is not one of float32, float16, bfloat16"),
    ],
)
def test_what_a_device_has_not_is_one_line(has, dtype, says):
    with pytest.raises(ConfigError, match=says):
        engine.check_dtype(dtype, replace(current_device(), **has))


def test_float32_changes_nothing(folder):
    pictures = [ppldm.load(folder, **how).generate("a red heart", **FEW) for how in ({}, {"dtype": "float32"})]
    assert (pictures[0] == pictures[1]).all()

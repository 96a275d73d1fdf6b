"""An engine computes what Paddle computes: networks of every family that draws by them, and whole pictures."""

import subprocess
import sys

import needs
import numpy as np
import paddle
import pytest
from small_weights import small_weights

from ppldm.data.text.tokenizer import CaptionTokenizer, build_vocab
from ppldm.families.ldm_build import build_model
from ppldm.inference.pipeline import TextToImage
from ppldm.networks import engine, openvino_graph
from ppldm.utils.errors import ConfigError

needs.need("engine")
BAR = 1e-4


def both(layer, *args, **kwargs):
    """(of the engine, eager)"""
    with paddle.no_grad():
        eager = layer(*args, **kwargs)
        found = engine.Compiled(layer.forward, "f32")(*args, **kwargs)
    return (one.sample if hasattr(one, "sample") else one for one in (found, eager))


def gap(found, expected) -> float:
    assert found.shape == expected.shape and found.dtype == expected.dtype
    return float((found - expected).abs().max())


def normal(*shape):
    return paddle.to_tensor(np.random.default_rng(len(shape)).standard_normal(shape, dtype=np.float32))


@pytest.mark.turn("an engine computes what Paddle does", 1)
@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"use_linear_projection": True, "attention_head_dim": [1, 2, 2]}])
def test_a_unet_at_any_step(changes):
    """Timesteps are inputs and not part of what is compiled."""
    model = build_model(small_weights(1, changes), "small")
    compiled = engine.Compiled(model.unet.forward, "f32")
    for step in (paddle.to_tensor(0), paddle.to_tensor(999), paddle.to_tensor(501)):
        given = {"encoder_hidden_states": normal(2, 77, 32), "encoder_attention_mask": None}
        with paddle.no_grad():
            expected = model.unet(normal(2, 4, 8, 8), step, **given).sample
            assert gap(compiled(normal(2, 4, 8, 8), step, **given).sample, expected) <= BAR
    assert len(compiled._requests) == 1


def test_the_last_two_shapes_are_kept():
    compiled = engine.Compiled(lambda values: values * 2, "f32")
    for shape in ((1, 2), (1, 2), (1, 3), (1, 4), (1, 2)):
        assert gap(compiled(normal(*shape)), normal(*shape) * 2) == 0
        assert len(compiled._requests) <= 2


def test_the_stack_that_signals_are_handled_on_is_the_one_before():
    """OpenVINO's first compilation gives the thread a small one, on which Python's handlers end in a fault."""
    code = """
import ctypes, faulthandler
import paddle
from ppldm.networks.engine import Compiled
faulthandler.enable()
before, after = (ctypes.c_size_t * 3)(), (ctypes.c_size_t * 3)()
ctypes.CDLL(None).sigaltstack(None, before)
compiled = Compiled(lambda values: values * 2, "f32")
compiled(paddle.ones([2]))
ctypes.CDLL(None).sigaltstack(None, after)
assert list(before) == list(after), (list(before), list(after))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.turn("an engine computes what Paddle does", 1)
@pytest.mark.slow
def test_pictures_and_latents_are_those_of_paddle():
    weights = small_weights(2)
    tokenizer = CaptionTokenizer(build_vocab(["a red heart"]), 77)
    eager, other = (TextToImage(build_model(weights, "small"), tokenizer, 64) for _ in range(2))
    engine.use_engine(engine.drawing_layers(other.model), "openvino")
    few = {"num_inference_steps": 3, "num_samples": 2}
    pictures = np.asarray(eager.generate("a red heart", **few)).astype(int)
    assert pictures.std() > 5
    assert np.abs(pictures - np.asarray(other.generate("a red heart", **few))).max() <= 1
    latents = eager.encode(pictures[0].astype(np.uint8))
    assert np.abs(latents - other.encode(pictures[0].astype(np.uint8))).max() <= BAR
    half = TextToImage(build_model(weights, "small"), tokenizer, 64)
    engine.use_engine(engine.drawing_layers(half.model), "openvino-bfloat16")
    drift = np.abs(pictures - np.asarray(half.generate("a red heart", **few)))
    assert drift.mean() < 10


def test_one_line_for_what_cannot_be(monkeypatch):
    with pytest.raises(ConfigError, match="--engine tensorrt is not one of eager, openvino"):
        engine.check_engine("tensorrt")
    with pytest.raises(ConfigError, match="does not know the operation cumsum of this network; omit --engine"):
        engine.Compiled(lambda values: values.cumsum(), "f32")(normal(3))
    monkeypatch.setitem(__import__("sys").modules, "openvino", None)
    with pytest.raises(ConfigError, match="needs OpenVINO"):
        engine.check_engine("openvino")


OPERATIONS = {
    "slice": lambda x: x[:, 1:3, ::1],
    "expand": lambda x: x[:1].expand([2, -1, -1]),
    "split": lambda x: paddle.concat(x.chunk(2, axis=1), axis=2),
    "stack": lambda x: paddle.stack([x, x * 2 + 1], axis=1),
    "scale before": lambda x: paddle.scale(x, 3.0, 0.5, bias_after_scale=False),
    "unsqueeze": lambda x: x.unsqueeze(1).squeeze(1).flatten(1).reshape([0, -1, 2]),
    "gelu": lambda x: paddle.nn.functional.gelu(x) + paddle.nn.functional.gelu(x, approximate=True),
    "norm": lambda x: paddle.nn.functional.layer_norm(x, x.shape[1:]),
    "matmul": lambda x: paddle.matmul(x, x, transpose_y=True) @ x,
    "pad": lambda x: paddle.nn.functional.pad(x.unsqueeze(0), [0, 1, 0, 1]),
    "softmax": lambda x: paddle.nn.functional.softmax(x, axis=1) / (1 + x.abs()),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(name):
    values = normal(2, 4, 6)
    assert gap(engine.Compiled(OPERATIONS[name], "f32")(values), OPERATIONS[name](values)) <= 1e-5
    assert openvino_graph.to_openvino(OPERATIONS[name], [values]).inputs[0].shape == [2, 4, 6]


@pytest.mark.parametrize("height, width", [(8, 9), (5, 5), (9, 5), (1, 1), (3, 16), (7, 10)])
def test_latents_that_do_not_halve_evenly(height, width):
    """They are brought back to the sizes that they had on the way down, as Paddle does."""
    model = build_model(small_weights(1), "small")
    given = {"encoder_hidden_states": normal(1, 77, 32), "encoder_attention_mask": None}
    found, eager = both(model.unet, normal(1, 4, height, width), paddle.to_tensor(5), **given)
    assert gap(found, eager) <= BAR


@pytest.mark.turn("an engine computes what Paddle does", 1)
@pytest.mark.slow
@pytest.mark.parametrize("height, width", [(72, 40), (24, 16), (40, 40)])
def test_an_autoencoder_of_sides_that_do_not_halve_evenly(height, width):
    vae = build_model(small_weights(1), "small").vae
    for found, eager in (both(vae.encoder, normal(1, 3, height, width)),
                         both(vae.decoder, normal(1, 4, height // 8, width // 8))):  # fmt: skip
        assert gap(found, eager) <= BAR

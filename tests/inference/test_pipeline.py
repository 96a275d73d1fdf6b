"""The Python API: shapes, ranges, and the same pictures whatever form the weights are in."""

import json
import shutil

import numpy as np
import pytest
from small_weights import small_weights

import ppldm
from ppldm.data.text.tokenizer import CaptionTokenizer, build_vocab
from ppldm.utils.errors import ConfigError, ModelError
from ppldm.weights.write import write_weights

FEW = {"num_inference_steps": 2, "guidance_scale": 3.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    weights = small_weights(4)
    weights.tokenizer = CaptionTokenizer(build_vocab(["a red heart", "two blue boats"]), 77)
    for form in ("ppdiffusers", "diffusers", "compvis"):
        write_weights(weights, form, folder / form)
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return ppldm.load(folder / "ppdiffusers")


def test_generate(model):
    pictures = model.generate(["a red heart", "two boats"], num_samples=3, **FEW)
    assert pictures.shape == (2, 3, 64, 64, 3) and pictures.dtype == np.uint8
    for batch_size in (1, 2, 5):
        other = model.generate(["a red heart", "two boats"], num_samples=3, batch_size=batch_size, **FEW)
        assert np.abs(other.astype(int) - pictures).max() <= 1
    alone = model.generate("two boats", num_samples=1, **FEW)
    assert np.abs(alone[0, 0].astype(int) - pictures[1, 0]).max() <= 1
    assert model.generate("boats", height=32, width=48, **FEW).shape == (1, 1, 32, 48, 3)
    assert model.generate([], **FEW).shape == (0, 1, 64, 64, 3)


def test_encode_and_decode(model):
    rng = np.random.default_rng(0)
    pictures = rng.integers(0, 256, (2, 32, 48, 3), dtype=np.uint8)
    latents = model.encode(pictures)
    assert latents.shape == (2, 4, 4, 6) and latents.dtype == np.float32
    decoded = model.decode(latents)
    assert decoded.shape == pictures.shape and decoded.dtype == np.uint8


@pytest.mark.parametrize("form", ["diffusers", "compvis", "compvis/model.ckpt"])
def test_every_form_draws_the_same(model, folder, form):
    other = ppldm.load(folder / form)
    assert other.fingerprint == model.fingerprint
    assert (other.generate("a red heart", **FEW) == model.generate("a red heart", **FEW)).all()


def test_another_kind_of_stored_scheduler_is_named(folder, tmp_path, capfd):
    shutil.copytree(folder / "diffusers", tmp_path / "d")
    ppldm.load(tmp_path / "d")
    assert "brings a" not in capfd.readouterr().err
    path = tmp_path / "d" / "scheduler" / "scheduler_config.json"
    settings = json.loads(path.read_text()) | {"_class_name": "PNDMScheduler", "timestep_spacing": "trailing"}
    path.write_text(json.dumps(settings))
    assert ppldm.load(tmp_path / "d").model.sampling["timestep_spacing"] == "trailing"
    assert "brings a PNDMScheduler; pictures are drawn" in capfd.readouterr().err
    for name, value in (("timestep_spacing", "odd"), ("steps_offset", -1), ("clip_sample", 3), ("sample_max_value", 0)):
        path.write_text(json.dumps(settings | {name: value}))
        with pytest.raises(ModelError, match=f"{name} {value!r}"):
            ppldm.load(tmp_path / "d")


def test_words_for_what_cannot_work(model, folder, tmp_path):
    for name in ("model.ckpt", "model.yaml"):
        shutil.copy(folder / "compvis" / name, tmp_path)
    with pytest.raises(ModelError, match="brings no tokenizer"):
        ppldm.load(tmp_path / "model.ckpt")
    assert ppldm.load(tmp_path, tokenizer=folder / "compvis" / "tokenizer").fingerprint == model.fingerprint
    with pytest.raises(ModelError, match="no folder or file"):
        ppldm.load(tmp_path / "none")
    with pytest.raises(ConfigError, match="--height 30 must be a multiple of 8"):
        model.generate("x", height=30, **FEW)
    with pytest.raises(ConfigError, match="--sampler dream is not one of"):
        model.generate("x", sampler="dream", **FEW)
    with pytest.raises(ConfigError, match="2 negative prompts for 1 prompts"):
        model.generate("x", negative_prompts=["y", "z"], **FEW)
    for settings in ({"num_samples": 0}, {"batch_size": 0}, {"batch_size": 1.5}, {"seed": -1}, {"seed": 1 << 64}):
        (name,) = settings
        with pytest.raises(ConfigError, match=f"{name} .* must be a whole number from"):
            model.generate("x", **settings, **FEW)
    assert model.generate("x", seed=(1 << 64) - 1, num_inference_steps=1).shape == (1, 1, 64, 64, 3)
    for side in ({"height": 0}, {"width": 0}):
        with pytest.raises(ConfigError, match="0 must be a multiple of 8"):
            model.generate("x", **side, **FEW)
    with pytest.raises(ConfigError, match="the prompt is not UTF-8 text, after 'a'"):
        model.generate("a\udcffb", **FEW)
    for scale in (float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="--guidance_scale .* is not a number"):
            model.generate("x", guidance_scale=scale, num_inference_steps=1)
    for steps in (0, 1001):
        with pytest.raises(ConfigError, match=f"--num_inference_steps {steps} must be (above 0|from 1 to 1000)"):
            model.generate("x", num_inference_steps=steps)
    with pytest.raises(ConfigError, match="the prompt 3 is not text"):
        model.generate(["x", 3], **FEW)
    for pictures in (np.zeros((1, 16, 16, 3)), np.zeros((16, 16, 3), np.uint8), np.zeros((1, 3, 16, 16), np.uint8)):
        with pytest.raises(ConfigError, match=r"\[B, H, W, 3\] of uint8 is due"):
            model.encode(pictures)
    for latents in (np.zeros((4, 2, 2), np.float32), np.zeros((1, 3, 2, 2), np.float32), np.zeros((1, 4, 2, 2), int)):
        with pytest.raises(ConfigError, match=r"\[B, 4, h, w\] of float32 is due"):
            model.decode(latents)

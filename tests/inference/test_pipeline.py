"""The Python API: shapes, ranges, and the same pictures whatever form the weights are in."""

import inspect
import json
import shutil
from dataclasses import fields

import numpy as np
import pytest
from PIL import Image
from small_weights import small_weights

import ppldm
from ppldm.cli.main import run
from ppldm.data.text.tokenizer import CaptionTokenizer, build_vocab
from ppldm.diffusion.drawing import Drawing
from ppldm.inference.pictures import ask
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


def test_defaults_are_stated_once(model):
    """Those of the signature, which editors and help show, are those of `Drawing` and of `ppldm generate`."""
    shown = {name: one.default for name, one in inspect.signature(model.generate).parameters.items()}
    for one in fields(Drawing):
        assert shown.pop(one.name) == (None if one.name == "strength" else one.default), one.name
    for name, value in ask._DEFAULTS.items():
        assert (shown[name] or "") == value or name == "num_samples", name
    assert {"lora", "dtype", "engine"} <= inspect.signature(ppldm.load).parameters.keys()
    with pytest.raises(ConfigError, match="load has no setting lroa; did you mean lora?"):
        ppldm.load("x", lroa=[])


def test_weighted_prompts_and_wildcards_draw_as_on_the_command_line(model, folder, tmp_path):
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists" / "what.txt").write_text("heart\nboats\n")
    prompts = ["a {red|blue} (heart:1.4) BREAK [two] boats", "two __what__", "(a) red __what__"]
    flags = {"model": folder / "ppdiffusers", "out": tmp_path / "out", "wildcards": tmp_path / "lists", "seed": 9,
             "prompt-syntax": "weighted", "negative-prompt": "blue BREAK (heart)", "num-samples": 2,
             "num-inference-steps": 2, "guidance-scale": 3}  # fmt: skip
    run(
        [
            "generate",
            *(word for name, value in flags.items() for word in (f"--{name}", str(value))),
            "--prompt",
            *prompts,
        ]
    )
    said = {"negative_prompt": "blue BREAK (heart)", "prompt_syntax": "weighted", "wildcards": tmp_path / "lists"}
    drawn = model.generate(prompts, seed=9, num_samples=2, **said, **FEW)
    for number, index in np.ndindex(3, 2):
        with Image.open(tmp_path / "out" / f"{number:03d}-{index:02d}.png") as picture:
            assert (np.asarray(picture) == drawn[number, index]).all()
    plain = model.generate(prompts[2], seed=9, **{**said, "prompt_syntax": "plain"}, **FEW)[0, 0]
    assert np.abs(plain.astype(int) - drawn[2, 0]).max() > 1
    # Pictures of other numbers of chunks are drawn apart, so that none is padded because of another.
    mixed, few = ["a red heart", "a BREAK red BREAK heart"], {"prompt_syntax": "weighted", **FEW}
    together = model.generate(mixed, **few).astype(int)
    for number, one in enumerate(mixed):
        assert np.abs(model.generate(one, **few)[0] - together[number]).max() <= 1
    with pytest.raises(ConfigError, match="__none__: cannot read .*none.txt"):
        model.generate("a __none__", wildcards=tmp_path / "lists", **FEW)


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
    with pytest.raises(ConfigError, match="width 64, height 30: choose multiples of 8, as the VAE needs"):
        model.generate("x", height=30, **FEW)
    with pytest.raises(ConfigError, match="--sampler dream is not one of"):
        model.generate("x", sampler="dream", **FEW)
    with pytest.raises(ConfigError, match="2 negative prompts for 1 prompts"):
        model.generate("x", negative_prompt=["y", "z"], **FEW)
    for settings in ({"num_samples": 0}, {"batch_size": 0}, {"batch_size": 1.5}, {"seed": -1}, {"seed": 1 << 64}):
        (name,) = settings
        with pytest.raises(ConfigError, match=f"{name} .* must be a whole number from"):
            model.generate("x", **settings, **FEW)
    assert model.generate("x", seed=(1 << 64) - 1, num_inference_steps=1).shape == (1, 1, 64, 64, 3)
    for side in ({"height": 0}, {"width": 0}):
        with pytest.raises(ConfigError, match=" 0.*: choose multiples of 8"):
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

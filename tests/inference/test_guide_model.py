"""Ways to guide, by commands and from Python: what a picture says of them, what draws it again, and what is refused."""

import json

import numpy as np
import pytest
from PIL import Image
from small_weights import UNET, small_weights

import ppldm
from ppldm.cli.main import run
from ppldm.data.text.tokenizer import CaptionTokenizer, build_vocab
from ppldm.inference.pipeline import TextToImage
from ppldm.inference.serving.paint import Painter
from ppldm.inference.serving.parameters import make_parameters, read_request
from ppldm.networks.controlnet import ControlledDiffusionModel
from ppldm.utils.errors import ConfigError
from ppldm.weights.write import write_weights

FEW = {"num_inference_steps": 3, "size": (32, 32), "guidance_scale": 3.0}


def write(folder, seed, words="a red heart", vae=4, unet=None, prediction_type="epsilon", **scheduler) -> str:
    weights = small_weights(seed, unet, prediction_type)
    weights.components["vae"] = small_weights(vae).components["vae"]
    weights.scheduler |= scheduler
    weights.tokenizer = CaptionTokenizer(build_vocab([words]), 77)
    write_weights(weights, "ppdiffusers", folder)
    return str(folder)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return write(tmp_path_factory.mktemp("good") / "model", 4)


@pytest.fixture(scope="module")
def bad(tmp_path_factory):
    return write(tmp_path_factory.mktemp("bad") / "model", 5)


@pytest.fixture(scope="module")
def flow(tmp_path_factory):
    return write(tmp_path_factory.mktemp("flow") / "model", 4, prediction_type="flow")


def pictures(folder):
    return {path.name: np.asarray(Image.open(path)) for path in sorted(folder.glob("*-*.png"))}


def said(path) -> dict:
    return json.loads(Image.open(path).text["ppldm"])


def test_a_guide_is_told_the_prompt_by_itself_and_is_a_part_of_what_draws(good, bad):
    plain, guided, turned = (
        ppldm.load(one, guide_model=guide) for one, guide in ((good, None), (good, bad), (bad, good))
    )
    assert len({plain.fingerprint, guided.fingerprint, turned.fingerprint, ppldm.load(bad).fingerprint}) == 4
    own = {scale: guided.generate("a red heart", **FEW | {"guidance_scale": scale}) for scale in (0.0, 1.0, 3.0)}
    for scale, model in ((0.0, ppldm.load(bad)), (1.0, plain)):
        assert (own[scale] == model.generate("a red heart", **FEW | {"guidance_scale": 1.0})).all()
    assert (own[3.0] != plain.generate("a red heart", **FEW)).any()
    by_itself = ppldm.load(good, guide_model=good).generate("a red heart", **FEW)
    assert (by_itself == own[1.0]).all()
    weighted = [guided.generate(one, prompt_syntax="weighted", **FEW) for one in ("a red heart", "a (red:1.5) heart")]
    assert (weighted[0] == own[3.0]).all() and (weighted[0] != weighted[1]).any()


def test_a_picture_by_two_models_is_drawn_again(good, bad, tmp_path, capfd):
    run(["generate", "--model", good, "--guide_model", bad, "--prompt", "a red heart", "--num-samples", "2",
         "--size", "32x32", "--num-inference-steps", "3", "--guidance-interval", "0.1", "0.95",
         "--out", str(tmp_path / "a")])  # fmt: skip
    first = tmp_path / "a" / "000-01.png"
    assert said(first)["source"]["guide_model"] == bad and said(first)["guidance_interval"] == [0.1, 0.95]
    assert "CFG interval: 0.1..0.95" in Image.open(first).text["parameters"]
    run(["generate", "--like", str(first), "--same-weights", "--out", str(tmp_path / "b")])
    assert (pictures(tmp_path / "b")["000-01.png"] == pictures(tmp_path / "a")["000-01.png"]).all()
    assert said(tmp_path / "b" / "000-01.png") == said(first)
    with pytest.raises(SystemExit):
        run(["generate", "--like", str(first), "--model", good, "--same-weights", "--out", str(tmp_path / "c")])
    assert "was drawn with other weights" in capfd.readouterr().err


def test_a_flow_model_is_drawn_by_cfg_zero_and_again(flow, tmp_path):
    run(["generate", "--model", flow, "--prompt", "a red heart", "--num-samples", "1", "--size", "32x32", "--out",
         str(tmp_path / "a"), "--num-inference-steps", "3", "--cfg_zero"])  # fmt: skip
    first = tmp_path / "a" / "000-00.png"
    assert said(first)["cfg_zero"] is True and "CFG-Zero: True" in Image.open(first).text["parameters"]
    run(["generate", "--like", str(first), "--same-weights", "--out", str(tmp_path / "b")])
    assert said(tmp_path / "b" / "000-00.png") == said(first)
    own = ppldm.load(flow).generate("a red heart", num_inference_steps=3, size=(32, 32), cfg_zero=True)[0, 0]
    plain = ppldm.load(flow).generate("a red heart", num_inference_steps=3, size=(32, 32))[0, 0]
    assert (pictures(tmp_path / "b")["000-00.png"] == own).all() and (own != plain).any()


def test_intervals_are_compared_in_a_grid(flow, tmp_path):
    run(["generate", "--model", flow, "--prompt", "a red heart", "--num-samples", "1", "--size", "32x32", "--out",
         str(tmp_path), "--num-inference-steps", "2", "--grid", "guidance_interval=0..1,0..0.6",
         "cfg_zero=off,on"])  # fmt: skip
    names = {path.relative_to(tmp_path).parent.name for path in tmp_path.rglob("000-00.png")}
    assert names == {f"guidance_interval={one},cfg_zero={two}" for one in ("0..1", "0..0.6") for two in (True, False)}
    with pytest.raises(ConfigError, match="'x' is not a number; write guidance_interval=0..1,0.2..0.8"):
        run(["generate", "--model", flow, "--prompt", "a", "--grid", "guidance_interval=x"])


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--guidance-interval 0.8 0.2", "--guidance-interval '(0.8, 0.2)' must be two shares of noise from 0 to 1"),
        ("--cfg-zero --sampler ddim", "--cfg-zero scales the direction of flow, and ddim is for other models"),
        ("--guide-model m --cfg-zero", "--cfg-zero scales the branch without caption, which --guide-model replaces"),
        ("--guide-model m --negative-prompt red", "a negative prompt is for the branch that --guide-model replaces"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_loaded(flags, message):
    with pytest.raises(ConfigError) as caught:
        run(["generate", "--model", "nowhere", "--prompt", "x", *flags.split()])
    assert str(caught.value).startswith(message)


def test_a_guide_that_does_not_fit_is_refused_in_a_line(good, flow, tmp_path):
    other = {name: str(tmp_path / name) for name in ("words", "schedule", "mask", "vae", "scale")}
    write(other["words"], 5, words="a blue boat")
    write(other["schedule"], 5, beta_schedule="linear")
    write(other["mask"], 5, unet={**UNET, "in_channels": 9})
    write(other["vae"], 5, vae=5)
    write(other["scale"], 5)
    config = tmp_path / "scale" / "vqvae" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"scaling_factor": 0.5}))
    (tmp_path / "scale" / "ppldm.json").unlink()
    for guide, what in (
        (flow, "prediction_type"),
        (other["words"], "vocabulary of captions"),
        (other["schedule"], "noise schedule"),
        (other["mask"], r"number of channels \(inpainting\)"),
    ):
        with pytest.raises(ConfigError, match=f"^--guide_model {guide} has another {what} than the model; give one of"):
            ppldm.load(good, guide_model=guide)
    for guide in (other["vae"], other["scale"]):
        with pytest.raises(
            ConfigError, match=f"^--guide_model {guide} makes other latents of a picture than the model;"
        ):
            ppldm.load(good, guide_model=guide)
    guided = ppldm.load(good, guide_model=good)
    base = guided.model
    parts = {"vae": base.vae, "text_encoder": base.text_encoder, "unet": base.unet, "controlnet": base.unet}
    with pytest.raises(ConfigError, match="^--guide_model here is of another family than the model; give one of the"):
        guided.guide_by(TextToImage(ControlledDiffusionModel(base.process, **parts), guided.tokenizer, 32), "here")
    with pytest.raises(ConfigError, match="a negative prompt is for the branch"):
        guided.generate("a", negative_prompt="red", **FEW)
    asked = {"prompt": "a", "negative_prompt": "red", "width": 32, "height": 32}
    with pytest.raises(ConfigError, match="a negative prompt is for the branch that guide_model replaces"):
        Painter({"m": guided}).prepare(read_request(asked, make_parameters(("m",))))

"""One model has one guidance scale by which it is drawn, wherever that is done, unless another is asked for."""

import json
import shutil

import pytest

import ppldm
from ppldm.cli.main import run
from ppldm.diffusion import guided
from ppldm.inference import pipeline
from ppldm.inference.pictures.draw import read_settings
from ppldm.inference.serving.limits import Limits
from ppldm.inference.serving.paint import Painter
from ppldm.inference.serving.parameters import make_parameters, read_request
from ppldm.training.commands.arguments import parse_arguments
from ppldm.training.loop import run_loop
from ppldm.training.prepare import prepare
from ppldm.utils.errors import ModelError

FEW = {"num_inference_steps": 1, "seed": 5}


def train(tiny, folder, **changes):
    flags = tiny.flags(folder, max_steps=1, **changes)
    run_loop(prepare(*parse_arguments(flags, loop=True)))
    return folder


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    """A run whose settings say 2, and draw sample pictures."""
    return train(tiny, tmp_path_factory.mktemp("run") / "run", guidance_scale=2, image_logging_steps=1)


@pytest.fixture(scope="module")
def places(trained, tmp_path_factory):
    """Models of that run in every form that is drawn with, and one that says nothing, each with its scale."""
    folder = tmp_path_factory.mktemp("forms")
    for form in ("ppdiffusers", "diffusers"):
        run(["export", str(trained / "pipeline"), "--out", str(folder / form), "--to", form])
    shutil.copytree(trained / "pipeline", folder / "older")
    said = json.loads((folder / "older/ppldm.json").read_text())
    (folder / "older/ppldm.json").write_text(json.dumps({k: v for k, v in said.items() if k != "guidance_scale"}))
    own = (trained / "pipeline", trained / "checkpoint-1", folder / "ppdiffusers", folder / "diffusers")
    return [*((place, 2.0) for place in own), (folder / "older", 7.5)]


def drawn_by_command(place, tmp_path, *flags):
    out = tmp_path / "drawn"
    run(["generate", "--model", str(place), "--prompt", "picture 1", "--num-samples", "1", "--num-inference-steps",
         "1", "--seed", "5", "--out", str(out), *flags])  # fmt: skip
    return read_settings(out / "000-00.png")["guidance_scale"]


def test_every_door_draws_a_model_by_its_own_scale(places, tmp_path, monkeypatch):
    scales = []

    def draw_latents(*args, **settings):
        scales.append(args[6].guidance_scale)
        return guided.draw_latents(*args, **settings)

    monkeypatch.setattr(pipeline, "draw_latents", draw_latents)
    for number, (place, scale) in enumerate(places):
        model = ppldm.load(place)
        for asked, expected in (({}, scale), ({"guidance_scale": 3.5}, 3.5)):
            model.generate("picture 1", **FEW, **asked)
            assert scales.pop() == expected
        painter, parameters = Painter({"it": model}), make_parameters(("it",), Limits())
        for asked, expected in (({}, scale), ({"guidance_scale": None}, scale), ({"guidance_scale": 3}, 3)):
            values = read_request({"prompt": "picture 1", **asked}, parameters)
            assert painter.prepare(values)[0]["guidance_scale"] == expected
        assert [one["guidance_scale"] for one in painter.describe()] == [scale]
        assert drawn_by_command(place, tmp_path / f"{number}") == scale
        assert drawn_by_command(place, tmp_path / f"{number}-own", "--guidance-scale", "3") == 3
        again = tmp_path / f"{number}-again"
        run(["generate", "--like", str(tmp_path / f"{number}-own/drawn/000-00.png"), "--out", str(again)])
        assert read_settings(again / "000-00.png")["guidance_scale"] == 3


def test_sample_pictures_and_what_is_trained_further_follow_the_model(tiny, trained, tmp_path):
    tags = {path.name for path in (trained / "samples").iterdir()}
    assert {"step-000001-ddim-samples-1.0.png", "step-000001-ddim-samples-2.0.png"} < tags and len(tags) == 3
    start = {"vae_name_or_path": None, "text_encoder_config_file": None, "unet_config_file": None}
    start |= {"model_name_or_path": trained / "pipeline", "image_logging_steps": 1}
    kept = train(tiny, tmp_path / "kept", **start)
    assert json.loads((kept / "pipeline/ppldm.json").read_text())["guidance_scale"] == 2
    assert (kept / "samples/step-000001-ddim-samples-2.0.png").is_file()
    other = train(tiny, tmp_path / "other", **start, guidance_scale=4.5)
    assert ppldm.load(other / "pipeline").model.guidance_scale == 4.5
    assert "guidance_scale=4.5" in (other / "pipeline/README.md").read_text()


@pytest.mark.parametrize("value", ["2", True, None, -1, 51, [2], {}, float("nan"), float("inf"), 10**400])
def test_what_is_no_scale_is_refused_in_one_line(places, tmp_path, value):
    shutil.copytree(places[-1][0], tmp_path / "odd")
    said = json.loads((tmp_path / "odd/ppldm.json").read_text())
    (tmp_path / "odd/ppldm.json").write_text(json.dumps(said | {"guidance_scale": value}))
    with pytest.raises(ModelError, match="guidance_scale .* must be a number from 0 to 50; copy it again") as caught:
        ppldm.load(tmp_path / "odd")
    assert len(str(caught.value)) < 300 + len(str(tmp_path))

"""One model has one guidance scale, number of steps and sampler, wherever it is drawn, unless others are asked for."""

import json
import shutil

import pytest
from command_line import parse_arguments

import ppldm
from ppldm.cli.main import run
from ppldm.diffusion import guided
from ppldm.diffusion.drawing import KEPT, Drawing, drawing_of
from ppldm.diffusion.process import Process
from ppldm.inference import pipeline
from ppldm.inference.pictures.draw import read_settings
from ppldm.inference.serving.paint import Painter
from ppldm.inference.serving.parameters import make_parameters, read_request
from ppldm.runs.read import RunFolder
from ppldm.training.metrics import old_pictures
from ppldm.training.prepare import prepare
from ppldm.training.train import run_loop
from ppldm.utils.errors import ConfigError, ModelError

OWN, USUAL = {"guidance_scale": 2.0, "num_inference_steps": 3, "sampler": "euler"}, (7.5, 50, "ddim")
OTHER = {"guidance_scale": 3.5, "num_inference_steps": 2, "sampler": "unipc"}


def train(tiny, folder, **changes):
    flags = tiny.flags(folder, max_steps=1, **changes)
    run_loop(prepare(*parse_arguments(flags, loop=True)))
    return folder


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    """A run whose settings say how its model is drawn, and draw sample pictures."""
    return train(tiny, tmp_path_factory.mktemp("run") / "run", **OWN, image_logging_steps=1)


@pytest.fixture(scope="module")
def places(trained, tmp_path_factory):
    """Models of that run in every form that is drawn with, and one that says nothing, each with how it is drawn."""
    folder = tmp_path_factory.mktemp("forms")
    for form in ("ppdiffusers", "diffusers"):
        run(["export", str(trained / "pipeline"), "--out", str(folder / form), "--to", form])
    shutil.copytree(trained / "pipeline", folder / "older")
    said = json.loads((folder / "older/ppldm.json").read_text())
    (folder / "older/ppldm.json").write_text(json.dumps({k: v for k, v in said.items() if k not in KEPT}))
    own = (trained / "pipeline", trained / "checkpoint-1", folder / "ppdiffusers", folder / "diffusers")
    return [*((place, tuple(OWN.values())) for place in own), (folder / "older", USUAL)]


def test_every_door_draws_a_model_in_its_own_way(places, tmp_path, monkeypatch):
    """The Python API, the page's and the interface's requests, `ppldm generate`."""
    asked_for = []

    def draw_latents(model, *_args, **_settings):
        drawing = _args[5].fit(model.process, model.usual)
        asked_for.append(tuple(getattr(drawing, name) for name in KEPT))
        return guided.draw_latents(model, *_args[:5], Drawing(1, drawing.guidance_scale), *_args[6:], **_settings)

    monkeypatch.setattr(pipeline, "draw_latents", draw_latents)
    for number, (place, expected) in enumerate(places):
        model = ppldm.load(place)
        model.generate("picture 1", seed=5)
        model.generate("picture 1", seed=5, **OTHER)
        painter, parameters = Painter({"it": model}), make_parameters(("it",))
        for asked in ({}, dict.fromkeys(KEPT), OTHER):
            prepared = painter.prepare(read_request({"prompt": "picture 1", **asked}, parameters))[0]
            asked_for.append(tuple(prepared[name] for name in KEPT))
        (described,) = painter.describe()
        asked_for.append((described["guidance_scale"], described["num_inference_steps"], described["samplers"][0]))
        words = [word for name, value in OTHER.items() for word in (f"--{name}", str(value))]
        for name, more in (("drawn", []), ("own", words)):
            run(["generate", "--model", str(place), "--prompt", "picture 1", "--num-samples", "1", "--seed", "5",
                 "--out", str(tmp_path / f"{number}/{name}"), *more])  # fmt: skip
            asked_for.pop()
            record = read_settings(tmp_path / f"{number}/{name}/000-00.png")
            asked_for.append(tuple(record[name] for name in KEPT))
        other = tuple(OTHER.values())
        assert asked_for == [expected, other, expected, expected, other, expected, expected, other], place
        asked_for.clear()


def test_sample_pictures_and_what_is_trained_further_follow_the_model(tiny, trained, tmp_path, caplog):
    tags = {path.name for path in (trained / "samples").iterdir()}
    assert {"step-000001-euler-samples-1.0.png", "step-000001-euler-samples-2.0.png"} < tags and len(tags) == 3
    start = {"vae_name_or_path": None, "text_encoder_config_file": None, "unet_config_file": None}
    start |= {"model_name_or_path": trained / "pipeline", "image_logging_steps": 1, "num_inference_steps": None}
    kept = train(tiny, tmp_path / "kept", **start)
    said = json.loads((kept / "pipeline/ppldm.json").read_text())
    assert {name: said.get(name) for name in KEPT} == OWN
    assert (kept / "samples/step-000001-euler-samples-2.0.png").is_file()
    told = [line for line in caplog.messages if line.startswith("sample pictures: ")]
    assert [line.rpartition("euler-samples-")[2] for line in told[:2]] == ["2.0.png", "1.0.png"]
    assert told[0].startswith(f"sample pictures: {kept}/samples/step-000001-")
    assert [tag for _, tag, _ in old_pictures(kept, 1)] == ["euler-samples-2.0", "euler-samples-1.0", "reconstruction"]
    assert list(RunFolder(kept).pictures()) == ["euler-samples-2.0", "euler-samples-1.0", "reconstruction"]
    other = train(tiny, tmp_path / "other", **start, guidance_scale=4.5, sampler="ddpm", validation_prompts=None)
    usual = ppldm.load(other / "pipeline").model.usual
    assert (usual.guidance_scale, usual.num_inference_steps, usual.sampler) == (4.5, 3, "ddpm")
    assert "guidance_scale=4.5" in (other / "pipeline/README.md").read_text()
    with pytest.raises(ConfigError, match="the sampler flow-euler does not draw with a model of"):
        train(tiny, tmp_path / "odd", **start, sampler="flow-euler")


@pytest.mark.parametrize("value", ["2", True, None, -1, 51, [2], {}, float("nan"), float("inf"), 10**400])
def test_what_is_no_scale_is_refused_in_one_line(places, tmp_path, value):
    shutil.copytree(places[-1][0], tmp_path / "odd")
    said = json.loads((tmp_path / "odd/ppldm.json").read_text())
    (tmp_path / "odd/ppldm.json").write_text(json.dumps(said | {"guidance_scale": value}))
    with pytest.raises(ModelError, match="guidance_scale .* must be a number from 0 to 50; copy it again") as caught:
        ppldm.load(tmp_path / "odd")
    assert len(str(caught.value)) < 300 + len(str(tmp_path))


@pytest.mark.parametrize(
    "said, words",
    [
        *(({"num_inference_steps": value}, "must be a whole number from 1 to 1000") for value in (0, 1001, 2.0, True)),
        *(({"sampler": value}, "must be one of ddim, ddpm") for value in ("dream", 3, ["ddim"], "flow-euler")),
    ],
)
def test_steps_and_samplers_that_are_none_are_refused_in_one_line(said, words):
    with pytest.raises(ModelError, match=f"model: {next(iter(said))} .* {words}.*; copy it again"):
        drawing_of(said, Process(), "model")

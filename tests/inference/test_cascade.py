"""Stages C and B of Stable Cascade draw together: from checkpoints and pipelines, by the command line."""

import json
import re
import zlib

import numpy as np
import paddle
import pytest
from command_line import parse_arguments
from PIL import Image

import ppldm
from ppldm.cli.main import run
from ppldm.diffusion.drawing import Drawing
from ppldm.families.base import get_family
from ppldm.inference.pictures.draw import SOURCE, read_settings
from ppldm.training.prepare import prepare
from ppldm.training.train import run_loop
from ppldm.utils.errors import ConfigError, ModelError
from ppldm.utils.rng import Stream, make_rng, pyramid

STAGES = {
    "cascade_prior": {"prior_config_file": "cascade_c", "ema_start_iters": 0},
    "cascade_decoder": {"vqgan_config_file": "vqgan_tiny", "decoder_config_file": "cascade_b"},
}


def train(tiny, folder, name, **own):
    """A checkpoint after an update."""
    settings = {
        **{"output_dir": folder / name, "file_list": tiny.file_list, "resolution": 32, "max_steps": 1, "seed": 5},
        **{"effnet_config_file": "effnet_tiny", "text_encoder_config_file": tiny.config("clip")},
        **{"tokenizer_name": tiny.tokenizer, "model_max_length": 12, "image_logging_steps": 0, "save_steps": 1},
        **{"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1},
        **{key: tiny.config(value) if value in ("cascade_c", "cascade_b") else value for key, value in own.items()},
    }
    words = [str(word) for key, value in settings.items() for word in (f"--{key}", value)]
    run_loop(prepare(*parse_arguments(words, True, get_family(name).Config)))
    return folder / name / "checkpoint-1"


@pytest.fixture(scope="module")
def stages(tiny, tmp_path_factory):
    """A checkpoint of each."""
    folder = tmp_path_factory.mktemp("stages")
    return [train(tiny, folder, name, **own) for name, own in STAGES.items()]


def tell_something(model):
    """Weights for the last layers, which are zero in new networks."""
    for layer in (model.model.prior.clf[1], model.decoder.decoder.clf[1]):
        layer.weight.set_value(0.1 * np.random.default_rng(0).standard_normal(layer.weight.shape).astype("float32"))


def test_pictures_are_functions_of_both_stages_prompt_and_seed(stages):
    prior, decoder = stages
    model = ppldm.load(prior, decoder=decoder)
    tell_something(model)
    settings = {"num_inference_steps": 2, "guidance_scale": 3.0}
    pictures = model.generate(["picture 1", "picture 2"], num_samples=2, **settings)
    assert pictures.shape == (2, 2, 32, 32, 3) and pictures.dtype == np.uint8
    alone = model.generate("picture 2", num_samples=2, **settings)
    assert np.abs(alone[0].astype(int) - pictures[1]).max() <= 1
    flat = [*pictures.reshape([4, -1]), model.generate("picture 1", seed=6, **settings).ravel()]
    assert len({one.tobytes() for one in flat}) == 5
    first = model.model.prior.clf[1].weight
    first.set_value(paddle.zeros_like(first))  # other small latents
    assert (model.generate("picture 1", **settings)[0, 0] != pictures[0, 0]).any()
    assert model.generate("picture 1", height=64, width=96, **settings).shape == (1, 1, 64, 96, 3)
    with pytest.raises(ConfigError, match="and this one is also told one of the whole prompt; omit it"):
        model.draw(["picture"], [0], [1], negative_prompts=[""], drawing=Drawing(1), size=(32, 32), weighted=True)


def test_what_leads_stage_b_are_the_latents_of_stage_c(stages, monkeypatch):
    model, told = ppldm.load(stages[0], decoder=stages[1]), []
    denoise = model.decoder.denoise

    def see(latents, *args, **given):
        told.append(given | {"latents": latents.numpy()})
        return denoise(latents, *args, **given)

    monkeypatch.setattr(model.decoder, "denoise", see)
    model.generate("picture 1", num_inference_steps=1, guidance_scale=1.0, seed=9)
    # A new stage C says that all is noise: one step of DDIM from noise leaves what that has.
    assert len(told) == 10 and told[0]["effnet"].shape == [1, 16, 1, 1] and float(told[0]["effnet"].abs().sum()) > 0
    assert told[0]["clip_text_pooled"].shape == [1, 1, 32]
    rng = make_rng(9, Stream.SAMPLE_DECODER, epoch=zlib.crc32(b"picture 1"))
    normals = rng.standard_normal((4, 8, 8), dtype=np.float32)
    assert (told[0]["latents"][0] == pyramid(normals, rng)).all()


def test_by_the_command_line_and_of_exported_pipelines(stages, tmp_path):
    pipelines = [tmp_path / name for name in STAGES]
    for checkpoint, folder in zip(stages, pipelines, strict=True):
        run(["export", str(checkpoint), "--to", "diffusers", "--out", str(folder)])
    drawn = []
    for prior, decoder in (stages, pipelines):
        out = tmp_path / f"drawn-{len(drawn)}"
        run(["generate", "--model", str(prior), "--decoder", str(decoder), "--prompt", "picture 1", "--out", str(out),
             "--num-samples", "1", "--num-inference-steps", "2"])  # fmt: skip
        drawn.append(np.asarray(Image.open(out / "000-00.png")))
        assert json.loads((out / "pictures.jsonl").read_text())["height"] == 32
    assert (drawn[0] == drawn[1]).all()


@pytest.mark.parametrize(
    "model, settings, message",
    [
        (0, {}, "is stage C of Stable Cascade, which draws latents; name stage B too: --decoder"),
        (1, {"decoder": 0}, "is stage B of Stable Cascade; name it as --decoder, and stage C as the model"),
        (0, {"decoder": 0}, "is not stage B of Stable Cascade; give a checkpoint or a pipeline"),
        (0, {"decoder": 1, "lora": ["x"]}, "--lora is not there for Stable Cascade"),
        (0, {"decoder": 1, "guide_model": "x"}, "--guide-model is not for Stable Cascade; omit it"),
    ],
)
def test_what_is_no_pair_of_stages_is_refused(stages, model, settings, message):
    if "decoder" in settings:
        settings = {**settings, "decoder": stages[settings["decoder"]]}
    with pytest.raises(ConfigError, match=re.escape(message)):
        ppldm.load(stages[model], **settings)


def test_sides_must_divide(stages):
    model = ppldm.load(*stages[:1], decoder=stages[1])
    with pytest.raises(ConfigError, match=re.escape("width 80, height 64: choose multiples of 32")):
        model.generate("x", height=64, width=80)


def test_a_control_image_leads_stage_c(tiny, stages, tmp_path):
    """By the control network of a checkpoint, or of the folder that is exported; without one it is the base."""
    own = {"prior_name_or_path": stages[0].parent / "prior", "controlnet_blocks": 2, "learning_rate": 0.1}
    folders = [train(tiny, tmp_path, "cascade_controlnet", **own), tmp_path / "cascade_controlnet/controlnet"]
    picture = np.random.default_rng(0).integers(0, 256, (48, 40, 3), dtype=np.uint8)
    Image.fromarray(picture).save(tmp_path / "lead.png")
    settings = {"num_inference_steps": 2, "guidance_scale": 3.0}
    plain, *led = (ppldm.load(stages[0], decoder=stages[1], controlnet=one) for one in (None, *folders))
    rng = np.random.default_rng(0)
    for model in (plain, *led):
        tell_something(model)
    last = led[0].model.controlnet.projections[0][-1].weight
    last.set_value(rng.standard_normal(last.shape, dtype=np.float32))
    expected = plain.generate("picture 1", **settings)
    assert np.array_equal(led[0].generate("picture 1", **settings), expected)
    control = {"control": tmp_path / "lead.png", "control_filter": "canny,resize=0"}
    drawn = led[0].generate("picture 1", **settings, **control)
    assert (drawn != expected).any()
    assert np.array_equal(led[0].generate("picture 1", **settings, **control, control_scale=0.0), expected)
    assert not np.array_equal(led[1].model.controlnet.projections[0][-1].weight.numpy(), last.numpy())
    with pytest.raises(ConfigError, match="--control is for models with a ControlNet, and this one has none; omit it"):
        plain.generate("picture 1", **settings, **control)
    run(["generate", "--model", str(stages[0]), "--decoder", str(stages[1]), "--controlnet", str(folders[0]),
         "--control", str(tmp_path / "lead.png"), "--control_filter", "canny,resize=0", "--prompt", "picture 1",
         "--out", str(tmp_path / "out"), "--num-samples", "1", "--num-inference-steps", "2"])  # fmt: skip
    assert read_settings(tmp_path / "out/000-00.png")[SOURCE]["controlnet"] == str(folders[0])


def test_the_control_image_has_the_sides_that_stage_c_draws_for(tiny, stages, tmp_path):
    """Which may be others than those of the picture: 768 and 1024, as published."""
    own = {"prior_name_or_path": stages[0].parent / "prior", "controlnet_blocks": 2}
    model = ppldm.load(stages[0], decoder=stages[1], controlnet=train(tiny, tmp_path, "cascade_controlnet", **own))
    model._share = 0.5
    Image.new("RGB", (64, 64)).save(tmp_path / "lead.png")
    assert model.read_control(tmp_path / "lead.png", (128, 64)).shape == (3, 64, 32)


def test_a_control_network_of_another_stage_c_is_refused(tiny, stages, tmp_path):
    own = {"prior_name_or_path": stages[0].parent / "prior", "controlnet_blocks": 2}
    checkpoint = train(tiny, tmp_path, "cascade_controlnet", **own)
    folder = tmp_path / "cascade_controlnet/controlnet"
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"blocks": [63]}))
    with pytest.raises(ModelError, match="for block 63, and the prior has 0 .. .*; give --controlnet the one that was"):
        ppldm.load(stages[0], decoder=stages[1], controlnet=folder)
    with pytest.raises(ModelError, match="cascade_controlnet"):
        ppldm.load(checkpoint, decoder=stages[1])

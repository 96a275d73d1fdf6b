"""Stages C and B of Stable Cascade draw together: from checkpoints and pipelines, by the command line."""

import json
import re
import zlib

import numpy as np
import paddle
import pytest
from PIL import Image

import ppldm
from ppldm.cli.main import run
from ppldm.diffusion.drawing import Drawing
from ppldm.families.base import get_family
from ppldm.training.commands.arguments import parse_arguments
from ppldm.training.loop import run_loop
from ppldm.training.prepare import prepare
from ppldm.utils.errors import ConfigError
from ppldm.utils.rng import Stream, make_rng, pyramid

STAGES = {
    "cascade_prior": {"prior_config_file": "cascade_c", "ema_start_iters": 0},
    "cascade_decoder": {"vqgan_config_file": "vqgan_tiny", "decoder_config_file": "cascade_b"},
}


@pytest.fixture(scope="module")
def stages(tiny, tmp_path_factory):
    """A checkpoint of each after an update."""
    folder, found = tmp_path_factory.mktemp("stages"), []
    for name, own in STAGES.items():
        settings = {
            **{"output_dir": folder / name, "file_list": tiny.file_list, "resolution": 32, "max_steps": 1, "seed": 5},
            **{"effnet_config_file": "effnet_tiny", "text_encoder_config_file": tiny.config("clip")},
            **{"tokenizer_name": tiny.tokenizer, "model_max_length": 12, "image_logging_steps": 0, "save_steps": 1},
            **{"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1},
            **{key: tiny.config(value) if value in ("cascade_c", "cascade_b") else value for key, value in own.items()},
        }
        words = [str(word) for key, value in settings.items() for word in (f"--{key}", value)]
        run_loop(prepare(*parse_arguments(words, True, get_family(name).Config)))
        found.append(folder / name / "checkpoint-1")
    return found


def test_pictures_are_functions_of_both_stages_prompt_and_seed(stages):
    prior, decoder = stages
    model = ppldm.load(prior, decoder=decoder)
    for layer in (
        model.model.prior.clf[1],
        model.decoder.decoder.clf[1],
    ):  # it is zero in a new network, and tells nothing
        layer.weight.set_value(0.1 * np.random.default_rng(0).standard_normal(layer.weight.shape).astype("float32"))
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
    ],
)
def test_what_is_no_pair_of_stages_is_refused(stages, model, settings, message):
    if "decoder" in settings:
        settings = {**settings, "decoder": stages[settings["decoder"]]}
    with pytest.raises(ConfigError, match=re.escape(message)):
        ppldm.load(stages[model], **settings)


def test_sides_must_divide(stages):
    model = ppldm.load(*stages[:1], decoder=stages[1])
    with pytest.raises(ConfigError, match=re.escape("80 x 64: sides must be multiples of 32; change the size")):
        model.generate("x", height=64, width=80)

"""A frozen CLIP text encoder in place of LDMBert: trained with, exported as Stable Diffusion's pipeline, drawn with."""

import json

import needs
import numpy as np
import paddle
import pytest
from command_line import parse_arguments
from noise import initial_noise
from small_weights import UNET, write_clip

import ppldm
from ppldm.training.prepare import prepare
from ppldm.training.train import run_loop
from ppldm.utils.errors import ConfigError, ModelError
from ppldm.weights.source import open_model
from ppldm.weights.write import write_weights

FEW = {"num_inference_steps": 2, "guidance_scale": 3.0}


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("clip")
    (folder / "unet.json").write_text(json.dumps(UNET | {"sample_size": 4, "in_channels": 4, "out_channels": 4}))
    clip = write_clip(folder)
    flags = tiny.flags(folder / "run", pretrained_text_encoder_name=clip, text_encoder_config_file=None, max_steps=2,
                       unet_config_file=folder / "unet.json", tokenizer_name=None, model_max_length=77)  # fmt: skip
    run = prepare(*parse_arguments(flags, loop=True))
    before = {name: value.numpy() for name, value in run.state.model.text_encoder.state_dict().items()}
    assert not any(name.startswith("text_encoder") for name in run.state.model.trained_parameters())
    run_loop(run)
    after = run.state.model.text_encoder.state_dict()
    assert all((before[name] == after[name].numpy()).all() for name in before)
    return folder


def test_the_frozen_encoder_is_the_one_given(trained):
    exported = open_model(trained / "run" / "pipeline").read().components["text_encoder"]
    given = open_model(trained).read(("text_encoder",)).components["text_encoder"]
    assert exported.config == given.config
    assert all((exported.arrays[name] == given.arrays[name]).all() for name in given.arrays)


def test_plain_stable_diffusion_pipelines_draw_the_same(trained, tmp_path):
    from ppdiffusers import StableDiffusionPipeline

    model = ppldm.load(trained / "run" / "pipeline")
    ours = model.generate("red blue", seed=4, **FEW)[0, 0].astype(int)
    noise = initial_noise(4, "red blue", 0, (4, 4, 4))[None]
    settings = {"height": 32, "width": 32, **FEW}
    theirs = StableDiffusionPipeline.from_pretrained(str(trained / "run" / "pipeline"))(
        "red blue", latents=paddle.to_tensor(noise), **settings
    ).images[0]
    assert np.abs(np.asarray(theirs).astype(int) - ours).mean() < 1
    needs.need("parity")
    import diffusers
    import torch

    write_weights(open_model(trained / "run" / "pipeline").read(), "diffusers", tmp_path / "d")
    theirs = diffusers.StableDiffusionPipeline.from_pretrained(str(tmp_path / "d"))(
        "red blue", latents=torch.tensor(noise), **settings
    ).images[0]
    assert np.abs(np.asarray(theirs).astype(int) - ours).mean() < 1


def test_the_same_hidden_states_as_pytorch(trained):
    needs.need("parity")
    import torch
    import transformers

    theirs = transformers.CLIPTextModel.from_pretrained(str(trained / "text_encoder")).eval()
    model = ppldm.load(trained / "run" / "pipeline").model
    ids = np.random.default_rng(0).integers(0, 520, (2, 77))
    with torch.no_grad(), paddle.no_grad():
        gap = model.encode_text(paddle.to_tensor(ids)).numpy() - theirs(torch.tensor(ids))[0].numpy()
    assert np.abs(gap).max() <= 1e-4


def test_what_does_not_go_together(tiny, trained, tmp_path):
    flags = tiny.flags(tmp_path / "x", pretrained_text_encoder_name=trained / "text_encoder")
    with pytest.raises(ConfigError, match="brings its own config"):
        parse_arguments(flags, loop=True)
    with pytest.raises(ModelError, match="CLIP text encoder is not written for CompVis"):
        write_weights(open_model(trained / "run" / "pipeline").read(), "compvis", tmp_path / "c")

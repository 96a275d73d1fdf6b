"""A UNet that pools captions into its timestep is the same in diffusers, learns, and takes no masked captions."""

import json
from dataclasses import replace
from pathlib import Path

import needs
import numpy as np
import paddle
import pytest
from tiny_model import load_pipeline, make_batch

from ppldm.data.text.tokenizer import load_tokenizer
from ppldm.families.ldm import LdmConfig
from ppldm.families.ldm_build import build_ldm, weights_of
from ppldm.utils.errors import ConfigError, ModelError
from ppldm.weights.write import write_weights


@pytest.fixture
def config(tiny, tmp_path):
    own = json.loads(Path(tiny.config("unet")).read_text())
    own |= {"addition_embed_type": "text", "addition_embed_type_num_heads": 4}
    (tmp_path / "unet.json").write_text(json.dumps(own))
    return LdmConfig(
        vae_name_or_path=tiny.vae, text_encoder_config_file=tiny.config("ldmbert"), model_max_length=12,
        unet_config_file=str(tmp_path / "unet.json"),
    )  # fmt: skip


@pytest.fixture
def model(config):
    """With weights in its last layers, which begin as zeros."""
    model = build_ldm(config, 100, 3)
    rng = np.random.default_rng(0)
    for parameter in model.unet.parameters():
        parameter.set_value(parameter + paddle.to_tensor(rng.standard_normal(parameter.shape, dtype=np.float32) * 0.05))
    model.eval()
    return model


def write(model, tiny, form, folder):
    weights = weights_of(model)
    weights.tokenizer = load_tokenizer(tiny.tokenizer, 12)
    write_weights(weights, form, folder)
    return folder


def test_what_is_exported_computes_the_same_there_and_here(model, tiny, tmp_path):
    needs.need("parity")
    import diffusers
    import torch

    batch = make_batch(3)
    with paddle.no_grad():
        hidden = model.encode_text(batch["input_ids"])
        found = model.unet(batch["noise"], batch["timesteps"], hidden).sample.numpy()
    folder = write(model, tiny, "diffusers", tmp_path / "out")
    theirs = diffusers.UNet2DConditionModel.from_pretrained(folder / "unet").eval()
    assert theirs.config.addition_embed_type == "text"
    given = (torch.tensor(one.numpy()) for one in (batch["noise"], batch["timesteps"], hidden))
    with torch.no_grad():
        expected = theirs(*given).sample.numpy()
    assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()
    again = load_pipeline(folder).unet.state_dict()
    assert all(np.array_equal(again[name], value) for name, value in model.unet.state_dict().items())


def test_each_word_moves_the_timestep_and_learns(model):
    batch = make_batch(2)
    hidden = model.encode_text(batch["input_ids"]).detach()
    hidden.stop_gradient = False
    model.unet.add_embedding(hidden).square().sum().backward()
    assert (hidden.grad.abs().sum(-1) > 0).all()
    assert all(one.grad is not None for one in model.unet.add_embedding.parameters())


def test_padding_is_not_masked_and_compvis_has_no_such_network(config, model, tiny, tmp_path):
    with pytest.raises(ConfigError, match="the UNet pools captions with their padding; omit --mask_pad_tokens"):
        build_ldm(replace(config, mask_pad_tokens=True), 100, 3)
    with pytest.raises(ModelError, match="pools captions; export it to diffusers"):
        write(model, tiny, "compvis", tmp_path / "out")

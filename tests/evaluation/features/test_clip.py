"""CLIP's embeddings of pictures and texts are those of transformers."""

import json
import shutil

import numpy as np
import pytest
from small_weights import write_clip

from ppldm.evaluation.features.base import load_features
from ppldm.utils.errors import ModelError
from ppldm.weights.components import turn_linear
from ppldm.weights.formats.files import read_arrays, write_safetensors

TEXTS = ["a red blue heart", "", "12 blue " * 40, "é 红心"]
TEXT_CONFIG = {"vocab_size": 520, "eos_token_id": 519, "bos_token_id": 518, "pad_token_id": 519}
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
PICTURES = [np.random.default_rng(i).integers(0, 256, (40 + i, 40 + i, 3), np.uint8) for i in range(3)]


def write_model(folder, small=True, **vision):
    """A CLIP of transformers with random weights, its files beside the tokenizer's; gives the model."""
    import torch
    from transformers import CLIPConfig, CLIPModel

    write_clip(folder)
    sizes = SMALL if small else {}
    config = CLIPConfig(
        text_config=TEXT_CONFIG | sizes, vision_config=sizes | vision, projection_dim=48 if small else 512
    )
    torch.manual_seed(0)
    model = CLIPModel(config).eval()
    for name, weight in model.named_parameters():
        if "norm" in name or "nrm" in name or name.endswith("bias"):
            torch.nn.init.normal_(weight, float("bias" not in name), 0.1)
    model.save_pretrained(folder)
    return model


def compare(folder, model, texts):
    """Both give the same embeddings of length 1, of pictures and of texts."""
    import torch
    from transformers import CLIPImageProcessor, CLIPTokenizerFast

    network = load_features("clip", folder)
    side = model.config.vision_config.image_size
    processor = CLIPImageProcessor(size={"shortest_edge": side}, crop_size=side)
    tokens = CLIPTokenizerFast.from_pretrained(str(folder / "tokenizer"))(
        texts, padding="max_length", max_length=77, truncation=True, return_tensors="pt"
    )
    with torch.no_grad():
        pictures = model.get_image_features(processor(PICTURES, return_tensors="pt")["pixel_values"])
        expected = model.get_text_features(tokens["input_ids"])
    for ours, theirs in ((network(PICTURES), pictures), (network.embed_texts(texts), expected)):
        np.testing.assert_allclose(ours, (theirs / theirs.norm(dim=-1, keepdim=True)).numpy(), rtol=0, atol=1e-4)
        assert ours.dtype == np.float32
        assert np.ptp(ours, axis=0).max() > 0.01  # they tell pictures, and texts, apart
    np.testing.assert_allclose(network.logit_scale, float(model.logit_scale.exp()), rtol=1e-6)
    assert network.dim == model.config.projection_dim
    return network


@pytest.mark.needs("parity")
def test_small_ones_of_any_side_and_activation(tmp_path):
    model = write_model(tmp_path, image_size=32, patch_size=8, hidden_act="gelu")
    network = compare(tmp_path, model, TEXTS)
    assert "the shorter side to 32" in network.convention
    assert (network.embed_texts(TEXTS)[1:2] == network.embed_texts(TEXTS[1:2])).all()
    # The same weights as Paddle's libraries write them: the same network.
    paddles = tmp_path / "paddles"
    shutil.copytree(tmp_path / "tokenizer", paddles / "tokenizer")
    shutil.copyfile(tmp_path / "config.json", paddles / "config.json")
    arrays = turn_linear(read_arrays(tmp_path / "model.safetensors"))
    arrays["logit_scale"] = arrays["logit_scale"].reshape(1)
    write_safetensors(paddles / "model.safetensors", arrays, "pd")
    assert load_features("clip", paddles).digest == network.digest


@pytest.mark.slow
@pytest.mark.needs("parity")
def test_vit_b_32_in_its_true_shape(tmp_path):
    compare(tmp_path, write_model(tmp_path, small=False), TEXTS)


def test_what_is_not_a_clip_is_named(tmp_path):
    with pytest.raises(ModelError, match="has no tokenizer .*; give its whole folder"):
        load_features("clip", tmp_path)
    text_encoder = write_clip(tmp_path)
    with pytest.raises(ModelError, match="config.json is not the config of a CLIP with both encoders"):
        load_features("clip", text_encoder)
    (text_encoder / "config.json").write_text(json.dumps({"text_config": {}, "vision_config": {"image_size": "x"}}))
    with pytest.raises(ModelError, match="text_encoder"):
        load_features("clip", text_encoder)

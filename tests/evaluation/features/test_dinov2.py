"""DINOv2's features are those of transformers, its table of positions is resized as by Meta's code."""

import re

import needs
import numpy as np
import paddle
import pytest

from ppldm.evaluation.features.base import load_features
from ppldm.networks.dinov2 import _cubic, resize_positions
from ppldm.utils.errors import ModelError
from ppldm.utils.pictures import bicubic_filter
from ppldm.weights.losses import load_dinov2, rename_dinov2

PICTURES = [np.random.default_rng(i).integers(0, 256, (300 + i, 270, 3), np.uint8) for i in range(3)]
SIZES = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}


def meta_names(weights):
    """The weights of transformers' model as Meta's files name them."""
    found = {}
    for name, value in weights.items():
        name = name.replace("embeddings.", "").replace("encoder.layer", "blocks").replace("layernorm", "norm")
        name = name.replace("position_embeddings", "pos_embed").replace("patch_pos_embed", "patch_embed.proj")
        name = name.replace("patch_projection", "patch_embed.proj").replace("attention.output.dense", "attn.proj")
        name = re.sub(r"layer_scale(.).lambda1", r"ls\1.gamma", name)
        found[name] = value
    for name in [name for name in found if "attention.attention.query" in name]:
        thirds = [found.pop(name.replace("query", third)) for third in ("query", "key", "value")]
        found[name.replace("attention.attention.query", "attn.qkv")] = np.concatenate(thirds)
    return found


def make(with_registers=False, **config):
    """transformers' model with random weights, and a table of positions that need not be resized."""
    import torch
    import transformers

    kind = "Dinov2WithRegisters" if with_registers else "Dinov2"
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{"image_size": 224, "patch_size": 14} | config)
    model = getattr(transformers, f"{kind}Model")(config).eval()
    for name, weight in model.named_parameters():
        if "norm" in name or "lambda" in name or name.endswith("bias"):
            torch.nn.init.normal_(weight, float("bias" not in name), 0.1)
    return model


def compare(folder, model):
    import torch
    from transformers import BitImageProcessor

    model.save_pretrained(folder)
    processor = BitImageProcessor(size={"shortest_edge": 256}, crop_size=224, resample=3,
                                  image_mean=[0.485, 0.456, 0.406], image_std=[0.229, 0.224, 0.225])  # fmt: skip
    with torch.no_grad():
        expected = model(processor(PICTURES, return_tensors="pt")["pixel_values"]).pooler_output.numpy()
    network = load_features("dinov2", folder)
    np.testing.assert_allclose(network(PICTURES), expected, rtol=0, atol=1e-4)
    assert np.ptp(expected, axis=0).max() > 0.01
    assert network.dim == model.config.hidden_size
    return network


@pytest.mark.needs("parity")
@pytest.mark.parametrize("with_registers", [False, True])
def test_small_ones_under_both_kinds_of_names(with_registers, tmp_path):
    import torch

    model = make(with_registers, **SIZES)
    network = compare(tmp_path / "theirs", model)
    weights = meta_names({name: value.numpy() for name, value in model.state_dict().items()})
    torch.save({name: torch.tensor(value) for name, value in weights.items()}, tmp_path / "meta.pth")
    assert load_features("dinov2", tmp_path / "meta.pth").digest == network.digest


@pytest.mark.slow
@pytest.mark.needs("parity")
def test_vit_s_14_in_its_true_shape(tmp_path):
    compare(tmp_path, make(hidden_size=384, num_attention_heads=6))


@pytest.mark.needs("parity")
@pytest.mark.parametrize("with_registers", [False, True])
@pytest.mark.parametrize("size", [(64, 96), (32, 32)])
def test_features_of_places_are_those_of_transformers(with_registers, size, tmp_path):
    """The grid of their positions is here as large as the pictures', so that nothing resizes it but another shape."""
    import torch

    model = make(with_registers, **SIZES, image_size=14 * size[0] // 16)
    model.save_pretrained(tmp_path)
    pictures = np.random.default_rng(0).integers(0, 256, (2, 3, size[0], size[0]), np.uint8)
    resized = torch.nn.functional.interpolate(torch.tensor(pictures) / 255, 14 * size[0] // 16, mode="bicubic")
    mean, std = (torch.tensor(one).reshape(3, 1, 1) for one in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    with torch.no_grad():
        found = model((resized - mean) / std).last_hidden_state
    expected = found[:, 1 + 4 * with_registers :].permute(0, 2, 1).reshape(2, -1, size[0] // 16, size[0] // 16)
    network = load_dinov2(tmp_path).eval()
    np.testing.assert_allclose(network.features(paddle.to_tensor(pictures)).numpy(), expected, rtol=0, atol=1e-4)
    wide = np.random.default_rng(0).integers(0, 256, (1, 3, *size), np.uint8)
    assert network.features(paddle.to_tensor(wide)).shape[2:] == [side // 16 for side in size]


@pytest.mark.parametrize("filtered", [False, True])
def test_positions_are_resized_as_by_pytorch(filtered):
    needs.need("parity")
    import torch

    table = np.random.default_rng(0).standard_normal((1, 1 + 37 * 37, 5), np.float32)
    grid = torch.tensor(table[:, 1:].reshape(1, 37, 37, 5)).permute(0, 3, 1, 2)
    how = {"size": (16, 16), "antialias": True} if filtered else {"scale_factor": (16.1 / 37, 16.1 / 37)}
    expected = torch.nn.functional.interpolate(grid, mode="bicubic", **how).permute(0, 2, 3, 1).numpy()
    resized = resize_positions(paddle.to_tensor(table), [16, 16], filtered).numpy()
    assert (resized[:, 0] == table[:, 0]).all()
    np.testing.assert_allclose(resized[:, 1:].reshape(1, 16, 16, 5), expected, rtol=0, atol=2e-5)
    assert resize_positions(table, [37, 37], filtered) is table


@pytest.mark.parametrize("matrix", [_cubic, bicubic_filter])
def test_a_table_of_equal_positions_stays_so(matrix):
    np.testing.assert_allclose(matrix(37, 16).sum(1), 1, rtol=1e-5)


def test_what_is_not_a_dinov2_is_named(tmp_path):
    paddle.save({"fc.weight": paddle.ones([2, 2])}, str(tmp_path / "a.pdparams"))
    with pytest.raises(ModelError, match="a.pdparams holds no DINOv2; give Meta's file"):
        load_features("dinov2", tmp_path / "a.pdparams")
    arrays = {"cls_token": np.ones((1, 1, 64)), "pos_embed": np.ones((1, 5, 64)), "mask_token": np.ones((1, 64)),
              "patch_embed.proj.weight": np.ones((64, 3, 14, 14)), "blocks.0.mlp.fc1.bias": np.ones(3)}  # fmt: skip
    assert "mask_token" not in rename_dinov2(arrays)
    paddle.save(
        {name: paddle.to_tensor(value, "float32") for name, value in arrays.items()}, str(tmp_path / "b.pdparams")
    )
    with pytest.raises(ModelError, match="do not fit a DINOv2 of their size: .* missing: .*blocks.0.*of another shape"):
        load_features("dinov2", tmp_path / "b.pdparams")

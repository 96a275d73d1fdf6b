"""Stable Cascade's networks: initial weights, recomputing, noise levels, the encoder of pictures."""

import math

import numpy as np
import paddle
import pytest

from ppldm.networks.build import build_network
from ppldm.networks.configs import read_new_config

KINDS = {"cascade_c_tiny": "cascade_prior", "cascade_b_tiny": "cascade_decoder"}


def build(name: str, seed: int = 3, **changes):
    return build_network(KINDS[name], read_new_config(KINDS[name], name, "") | changes, seed)


def inputs_of(unet, batch: int = 2, side: int = 8) -> dict:
    rng, config = np.random.default_rng(4), unet.config
    shapes = {
        "sample": [batch, config.in_channels, side, side],
        "clip_text_pooled": [batch, 1, config.clip_text_pooled_in_channels],
    }
    if config.effnet_in_channels:
        shapes["effnet"] = [batch, config.effnet_in_channels, 3, 3]
    else:
        shapes["clip_text"] = [batch, 5, config.clip_text_in_channels]
        shapes["clip_img"] = [batch, 1, config.clip_image_in_channels]
    drawn = {name: paddle.to_tensor(rng.standard_normal(shape, np.float32)) for name, shape in shapes.items()}
    return {**drawn, "timestep_ratio": paddle.to_tensor(rng.random(batch, np.float32))}


@pytest.mark.parametrize("name", KINDS)
def test_a_fresh_network_gives_zero_and_is_a_function_of_the_seed(name):
    one, same, other = (build(name, seed) for seed in (3, 3, 4))
    assert not one(**inputs_of(one)).any()
    first, second, third = (unet.state_dict() for unet in (one, same, other))
    assert all((first[key].numpy() == second[key].numpy()).all() for key in first)
    assert any((first[key].numpy() != third[key].numpy()).any() for key in first)


@pytest.mark.parametrize("name", KINDS)
def test_the_published_rules(name):
    unet = build(name)
    config, weights = unet.config, {key: value.numpy() for key, value in unet.state_dict().items()}
    damping = math.sqrt(1 / sum(config.down_num_layers_per_block))

    def bound(key):
        return float(np.abs(weights[key]).max())

    def is_uniform(key, most):
        assert 0.93 * most < bound(key) <= most * 1.000001, key
        assert abs(weights[key].mean()) < 0.1 * most, key

    width, last = config.block_out_channels[0], len(config.block_out_channels) - 1
    is_uniform("embedding.1.weight", 0.02 * math.sqrt(6 / (weights["embedding.1.weight"].shape[1] + width)))
    is_uniform("down_blocks.0.0.depthwise.weight", math.sqrt(6 / (9 * (1 + width))))
    is_uniform("down_blocks.0.0.channelwise.0.weight", math.sqrt(6 / (5 * width)))
    is_uniform("down_blocks.0.0.channelwise.4.weight", damping * math.sqrt(6 / (5 * width)))
    deep = config.block_out_channels[last]
    is_uniform(f"down_blocks.{last}.2.attention.to_q.weight", math.sqrt(6 / (4 * deep)))
    is_uniform(f"down_blocks.{last}.2.attention.to_out.0.weight", math.sqrt(6 / (2 * deep)))
    is_uniform(f"down_blocks.{last}.2.kv_mapper.1.weight", math.sqrt(6 / (deep + config.conditioning_dim)))
    assert abs(weights["clip_txt_pooled_mapper.weight"].std() / 0.02 - 1) < 0.05
    zero = [key for key in weights if key.endswith((".bias", ".gamma", ".beta")) and "upscaler" not in key]
    zero += ["clf.1.weight", "down_blocks.0.1.mapper.weight", "up_blocks.0.1.mapper_sca.weight"]
    assert all(not weights[key].any() for key in zero) and len(zero) > 60
    if name == "cascade_b_tiny":
        is_uniform("up_upscalers.0.1.weight", 1 / math.sqrt(4 * config.block_out_channels[last - 1]))
        assert abs(weights["effnet_mapper.2.weight"].std() / 0.02 - 1) < 0.05


@pytest.mark.parametrize("name", KINDS)
def test_recomputing_changes_no_gradient(name):
    unet, found = build(name), []
    for value in unet.clf[1].parameters():
        value.set_value(np.full(value.shape, 0.01, np.float32))
    unet.train()
    for recompute in (False, True):
        if recompute:
            unet.enable_gradient_checkpointing()
        paddle.seed(5)  # of the dropout
        unet(**inputs_of(unet)).square().mean().backward()
        found.append({key: one.grad.numpy() for key, one in unet.named_parameters() if one.grad is not None})
        unet.clear_gradients()
    assert found[0].keys() == found[1].keys() and len(found[0]) > 100
    assert all((found[0][key] == found[1][key]).all() for key in found[0])
    dropped = unet(**inputs_of(unet))
    unet.eval()
    assert (dropped != unet(**inputs_of(unet))).any()


def test_the_sinusoids_of_a_noise_level():
    unet, ratios = build("cascade_c_tiny"), paddle.to_tensor([0.5, 0.5001, 1.0])
    angles = ratios.numpy()[:, None].astype(np.float64) * 10000 * 10000.0 ** (-np.arange(32) / 31)
    expected = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    assert np.abs(unet._embed_ratio(ratios).numpy() - expected).max() < 2e-3


def test_a_picture_is_encoded_alike_while_training_and_in_any_batch():
    encoder = build_network("effnet", read_new_config("effnet", "effnet_tiny", ""), seed=3)
    pixels = paddle.to_tensor(np.random.default_rng(1).random([2, 3, 64, 80], np.float32))
    encoder.eval()
    expected = encoder(pixels)
    assert expected.shape == [2, 16, 2, 3] and expected.dtype == paddle.float32 and float(expected.std()) > 0.05
    encoder.train()  # statistics are neither used nor changed
    assert (encoder(pixels) == expected).all()
    assert (encoder(pixels[:1]) - expected[:1]).abs().max() < 1e-5

"""What a network is said to keep and to need is what Paddle's allocator counts while it trains."""

from dataclasses import replace

import paddle
import pytest
from paddle import nn
from paddle.base import core
from ppdiffusers.models.attention_processor import AttnProcessor

from ppldm.diffusion.process import Process
from ppldm.networks.build import build_network
from ppldm.networks.configs import controlnet_config, read_new_config
from ppldm.networks.controlnet import ControlledDiffusionModel, new_controlnet
from ppldm.networks.transformers.transform import transform
from ppldm.training.doctor.memory import (
    _RECOMPUTED,
    LOADER_BYTES,
    Activations,
    Memory,
    Shapes,
    _peak,
    count_activations,
    loader_bytes,
)
from ppldm.weights.fill import bare_network, config_of

SHAPES = Shapes(2, (3, 256, 256), (4, 32, 32), 12, 128)
OF_UNET = replace(SHAPES, latents=(8, 32, 32))


def measure(network, call) -> Activations:
    """Bytes that are kept behind the forward pass, and the most that there are, beside weights and gradients."""
    call().mean().backward()  # from now on there are gradients
    network.clear_gradients()
    before = core.host_memory_stat_current_value("Allocated", 0)
    core.host_memory_stat_reset_peak_value("Allocated", 0)
    loss = call().mean()
    kept = core.host_memory_stat_current_value("Allocated", 0) - before
    loss.backward()
    return Activations(kept, core.host_memory_stat_peak_value("Allocated", 0) - before)


def built(kind: str, name: str):
    """(network, function that calls it, its config)."""
    config = read_new_config(kind, name, "--config")
    noisy = paddle.randn([SHAPES.samples, *(OF_UNET if kind == "unet" else SHAPES).latents])
    states = paddle.randn([SHAPES.samples, SHAPES.tokens, SHAPES.width])
    states.stop_gradient = False
    levels = paddle.zeros([SHAPES.samples], "int64")
    if kind == "text_encoder":
        network = build_network("text_encoder", config | {"max_position_embeddings": SHAPES.tokens}, 1)
        ids = paddle.zeros([SHAPES.samples, SHAPES.tokens], "int64")
        return network, lambda: network(ids)[0], config
    if kind == "transformer":
        network = build_network("transformer", config, 1)
        return network, lambda: transform(network, noisy, levels, states), config
    network = build_network("unet", config, 1)
    network.set_attn_processor(AttnProcessor())
    return network, lambda: network(noisy, levels, encoder_hidden_states=states).sample, config


@pytest.fixture(autouse=True)
def operators_of_paddle(monkeypatch):
    """What is counted are those of every device; ours for CPUs take less."""
    monkeypatch.setenv("PPLDM_NO_CPU_TUNING", "1")


@pytest.mark.parametrize("recompute", [False, True])
def test_what_is_counted_of_a_text_encoder_is_what_is_allocated(recompute):
    network, call, config = built("text_encoder", "ldmbert_tiny")
    network.train()
    if recompute:
        _RECOMPUTED["text_encoder"](network)
    found, told = measure(network, call), count_activations("text_encoder", config, SHAPES, True, recompute)
    assert told.peak == pytest.approx(found.peak, rel=0.1)
    assert recompute or told.kept == pytest.approx(found.kept, rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name", "recompute"), [
    ("unet", "unet_tiny", False), ("unet", "unet_tiny", True), ("transformer", "dit_tiny", False),
])  # fmt: skip
def test_what_is_counted_is_what_is_allocated(kind, name, recompute):
    network, call, config = built(kind, name)
    network.train()
    if recompute:
        network.enable_gradient_checkpointing()
    shapes = OF_UNET if kind == "unet" else SHAPES
    found, told = measure(network, call), count_activations(kind, config, shapes, True, recompute)
    assert told.peak == pytest.approx(found.peak, rel=0.1)
    assert told.kept == pytest.approx(found.kept, rel=0.15)


@pytest.mark.turn("a forecast of doctor holds", 2)
@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
def test_what_is_counted_of_a_control_network_is_what_is_allocated_with_its_unet(recompute):
    unet, control = build_network("unet", read_new_config("unet", "unet_tiny", "--config"), 1), (3, 128, 128)
    shapes = replace(SHAPES, picture=control, latents=(8, 16, 16))
    vae = read_new_config("vae", "vae_tiny", "--config")
    config = controlnet_config(config_of("unet", unet), vae, control[0])
    network = new_controlnet(unet, config, 1)
    parts = ControlledDiffusionModel(
        Process(), vae=bare_network("vae", vae), text_encoder=nn.Linear(1, 1), unet=unet, controlnet=network
    )
    for one in (unet, network):
        one.set_attn_processor(AttnProcessor())
    network.train()
    if recompute:
        network.enable_gradient_checkpointing()
    noisy, states = paddle.randn([shapes.samples, *shapes.latents]), paddle.randn([shapes.samples, 12, 128])
    batch = {"control": paddle.zeros([shapes.samples, *control], "uint8"), "encoder_hidden_states": states}
    found = measure(network, lambda: parts.denoise(noisy, paddle.zeros([shapes.samples], "int64"), **batch))
    told = count_activations("controlnet", config, replace(shapes, base=config_of("unet", unet)), True, recompute)
    assert told.peak == pytest.approx(found.peak, rel=0.1)
    assert recompute or told.kept == pytest.approx(found.kept, rel=0.15)


def test_what_is_counted_of_an_autoencoder_that_is_trained_is_what_is_allocated():
    config, pictures = read_new_config("vae", "vae_tiny", "--config"), paddle.randn([2, 3, 64, 64])
    network = build_network("vae", config, 1)
    found = measure(network, lambda: network.decode(network.encode(pictures).latent_dist.mean).sample)
    told = count_activations("vae", config, replace(SHAPES, picture=(3, 64, 64)), True, False)
    assert told.peak == pytest.approx(found.peak, rel=0.1)
    assert told.kept == pytest.approx(found.kept, rel=0.15)


def test_twice_the_samples_keep_twice_as_much_and_less_if_computed_again():
    config = read_new_config("text_encoder", "ldmbert_tiny", "--config")
    one = count_activations("text_encoder", config, SHAPES, True, False)
    double = Shapes(4, *[getattr(SHAPES, name) for name in ("picture", "latents", "tokens", "width")])
    two = count_activations("text_encoder", config, double, True, False)
    assert two.kept == pytest.approx(2 * one.kept, rel=0.02)
    assert count_activations("text_encoder", config, SHAPES, True, True).kept < one.kept / 3
    assert count_activations("text_encoder", config, SHAPES, False, False).kept == 0
    assert paddle.in_dynamic_mode()


def test_networks_that_run_one_after_the_other_share_what_is_passing():
    assert _peak([Activations(5, 8), Activations(10, 11), Activations(0, 4)]) == 15 + 4
    assert count_activations("no such kind", {}, SHAPES, True, False) is None


def test_loaders_hold_what_they_were_forked_with_once_and_each_its_own():
    on_device = Memory({"weights": 5_000, "average": 300}, batch_bytes=40)
    on_host = Memory({**on_device.by_purpose, "process": 1}, batch_bytes=40)
    for memory, inherited in ((on_device, 1_000), (on_host, 6_300)):
        found = [loader_bytes(memory, number, 1_000) for number in (0, 1, 2, 5)]
        assert found == [0, *(inherited + number * (LOADER_BYTES + 80) for number in (1, 2, 5))]


def test_operations_of_a_text_encoder_are_those_of_its_matrices():
    config = read_new_config("text_encoder", "ldmbert_tiny", "--config") | {"max_position_embeddings": SHAPES.tokens}
    counted = count_activations("text_encoder", config, SHAPES, False, False).operations
    width, inner = config["d_model"], config["encoder_attention_heads"] * config["head_dim"]
    a_token = 4 * width * inner + 2 * width * config["encoder_ffn_dim"] + 2 * SHAPES.tokens * inner
    matrices = config["encoder_layers"] * SHAPES.samples * SHAPES.tokens * a_token
    logits = SHAPES.samples * SHAPES.tokens * width * config["vocab_size"]
    assert counted in (2 * matrices, 2 * (matrices + logits))

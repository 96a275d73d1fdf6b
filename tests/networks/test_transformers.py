"""Transformers in the place of the UNet: what they compute, and what becomes of patches that are left out."""

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from overfit import overfit

from ppldm.data.inputs import KeptPatches
from ppldm.diffusion.process import Process
from ppldm.networks.build import build_text_encoder, build_transformer
from ppldm.networks.configs import check_config
from ppldm.networks.transformers import TransformerDiffusionModel, grid_of, make_transformer, take_patches, transform
from ppldm.utils.rng import Generators
from ppldm.weights.components import turn_linear
from ppldm.weights.fill import component_of, load_vae
from ppldm.weights.noise_schedule import PUBLISHED_SCHEDULE
from tests.conftest import DIT_CONFIG, TEXT_ENCODER_CONFIG, UVIT_CONFIG

CONFIGS = {"uvit": UVIT_CONFIG, "dit": DIT_CONFIG}
LENGTH, WIDTH = 12, 32


def config_of(name, **changes):
    return check_config("transformer", CONFIGS[name] | changes, name)


def randomised(name, **changes):
    """A network of which no weight is zero."""
    network = make_transformer(config_of(name, **changes))
    rng = np.random.default_rng(3)
    for parameter in network.parameters():
        parameter.set_value(rng.normal(0, 0.1, parameter.shape).astype(np.float32))
    network.eval()
    return network


def given_for(height=8, width=8, batch=3):
    rng = np.random.default_rng(4)
    noisy = rng.standard_normal((batch, 4, height, width), np.float32)
    hidden = rng.standard_normal((batch, LENGTH, WIDTH), np.float32)
    mask = (np.arange(LENGTH) < rng.integers(1, LENGTH, (batch, 1))).astype(np.int64)
    timesteps = rng.integers(0, 1000, batch)
    return [paddle.to_tensor(one) for one in (noisy, timesteps, hidden, mask)]


@pytest.fixture(params=CONFIGS)
def name(request):
    return request.param


@paddle.no_grad()
def test_the_forward_is_that_of_ppdiffusers_to_the_bit(name):
    network, (noisy, timesteps, hidden, mask) = randomised(name, sample_size=8), given_for()
    if name == "uvit":
        theirs = network(noisy, timesteps, hidden).sample
        ours = transform(network, noisy, timesteps, hidden)
    else:
        sizes = {"resolution": None, "aspect_ratio": None}
        theirs = network(noisy, hidden, timesteps, sizes, encoder_attention_mask=mask).sample
        ours = transform(network, noisy, timesteps, hidden, mask)
    assert ours.shape == [3, 4, 8, 8] and (ours == theirs).all() and ours.std() > 0.01


@paddle.no_grad()
def test_a_network_of_twice_the_channels_gives_the_mean():
    network, (noisy, timesteps, hidden, _) = randomised("dit", sample_size=8, out_channels=8), given_for()
    theirs = network(noisy, hidden, timesteps, {"resolution": None, "aspect_ratio": None}).sample
    assert (transform(network, noisy, timesteps, hidden) == theirs[:, :4]).all()


@paddle.no_grad()
def test_positions_of_other_sides_lie_between_those_of_the_table():
    table = randomised("uvit", sample_size=8)
    height = paddle.arange(4, dtype="float32").reshape([1, 4, 1, 1]).expand([1, 4, 4, 32]).flatten(1, 2)
    table.pos_embed.set_value(paddle.concat([paddle.zeros([1, 13, 32]), height], 1))
    seen = []
    table.in_blocks[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    noisy, timesteps, hidden, _ = given_for(16, 12)
    for parameter in table.patch_embed.parameters():
        parameter.set_value(paddle.zeros_like(parameter))
    out = transform(table, noisy, timesteps, hidden)
    rows = seen[0][0, 13:].reshape([8, 6, 32])
    expected = np.array([0, 0.25, 0.75, 1.25, 1.75, 2.25, 2.75, 3])
    assert out.shape == [3, 4, 16, 12]
    np.testing.assert_allclose(rows, np.broadcast_to(expected[:, None, None], (8, 6, 32)), atol=1e-6)


@paddle.no_grad()
def test_patches_that_are_left_out_reach_nothing(name):
    network, (noisy, timesteps, hidden, _) = randomised(name, sample_size=8), given_for()
    kept = paddle.to_tensor([[0, 5, 6], [1, 2, 15], [3, 4, 9]])
    grid = grid_of(network, noisy)
    one = transform(network, noisy, timesteps, hidden, kept=kept)
    inside = np.zeros((3, 16, 1), np.float32)
    np.put_along_axis(inside, kept.numpy()[:, :, None], 1, 1)
    inside = grid.join(paddle.to_tensor(inside).expand([3, 16, 16]), None)
    other = transform(network, noisy + 100 * (1 - inside), timesteps, hidden, kept=kept)
    assert (one == other).all()
    assert (transform(network, noisy + inside, timesteps, hidden, kept=kept) != one).any()
    every = paddle.arange(16).expand([3, 16])
    whole = transform(network, noisy, timesteps, hidden)
    np.testing.assert_array_equal(transform(network, noisy, timesteps, hidden, kept=every), whole)
    lengths = []
    block = network.mid_block if name == "uvit" else network.transformer_blocks[1]
    block.register_forward_pre_hook(lambda _, inputs: lengths.append(inputs[0].shape[1]))
    transform(network, noisy, timesteps, hidden, kept=kept)
    assert lengths == [3 + (13 if name == "uvit" else 0)]


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 3), st.data())
@settings(max_examples=40, deadline=None)
def test_patches_are_put_back_where_they_were(height, width, side, data):
    from ppldm.networks.transformers import Grid

    grid = Grid(height, width, side)
    latents = paddle.to_tensor(
        np.random.default_rng(0).standard_normal((2, 3, height * side, width * side), np.float32)
    )
    patches = grid.split(latents)
    assert (grid.join(patches, None) == latents).all()
    kept = data.draw(st.lists(st.integers(0, height * width - 1), min_size=1, unique=True).map(sorted))
    kept = paddle.to_tensor([kept, kept])
    joined = grid.split(grid.join(take_patches(patches, kept), kept))
    assert (take_patches(joined, kept) == take_patches(patches, kept)).all()
    assert abs(float(joined.abs().sum() - take_patches(patches, kept).abs().sum())) < 1e-3


@given(st.integers(1, 6), st.integers(1, 6), st.floats(0, 0.99), st.integers(0, 2**40))
@settings(max_examples=50, deadline=None)
def test_which_patches_are_kept_depends_on_seed_epoch_and_row_alone(height, width, masked, seed):
    one, size = KeptPatches(16, masked), (16 * height, 16 * width)
    (count,), keys = one.shape(*size), [(0, 3), (1, 3), (0, 4)]
    drawn = one.draw(keys, size, Generators(seed), {})
    assert drawn.shape == (3, count) and count == height * width - int(height * width * masked) >= 1
    assert (np.diff(drawn) > 0).all() and drawn.min() >= 0 and drawn.max() < height * width
    for number, key in enumerate(keys):
        assert (one.draw([key], size, Generators(seed), {}) == drawn[number]).all()


def test_masks_of_epochs_differ():
    drawn = KeptPatches(8, 0.75).draw([(epoch, 7) for epoch in range(20)], (64, 64), Generators(1), {})
    assert len({tuple(row) for row in drawn}) == 20


def test_every_patch_is_kept_equally_often():
    drawn = KeptPatches(8, 0.75).draw([(0, row) for row in range(4000)], (32, 32), Generators(1), {})
    counts = np.bincount(drawn.ravel(), minlength=16)
    assert drawn.shape == (4000, 4) and abs(counts - 1000).max() < 5 * np.sqrt(1000)


def test_a_new_dit_starts_from_zero():
    """So that the first loss of epsilon prediction is the mean square of the noise; a UViT, as published, does not."""
    noisy, timesteps, hidden, _ = given_for(4, 4)
    for name in CONFIGS:
        network, again = (build_transformer(config_of(name), 1) for _ in range(2))
        mine, theirs = network.state_dict(), again.state_dict()
        assert mine.keys() == theirs.keys() and all((mine[key] == theirs[key]).all() for key in mine)
        with paddle.no_grad():
            assert (transform(network, noisy, timesteps, hidden) == 0).all() == (name == "dit")


def make_model(tiny, name):
    text_encoder = build_text_encoder(check_config("text_encoder", TEXT_ENCODER_CONFIG, "x"), 1)
    transformer = build_transformer(config_of(name), 1)
    return TransformerDiffusionModel(load_vae(tiny.vae), text_encoder, transformer, Process.of(PUBLISHED_SCHEDULE))


def batch_of(rng, count=4):
    moments = rng.standard_normal((count, 2, 4, 4, 4), dtype=np.float32)
    noise = rng.standard_normal((count, 4, 4, 4), dtype=np.float32)
    batch = {"moments": moments, "noise": noise, "posterior_noise": noise}
    batch |= {"input_ids": rng.integers(0, 50, (count, 12)), "timesteps": rng.integers(0, 1000, count)}
    return {key: paddle.to_tensor(value) for key, value in batch.items()}


def test_the_loss_is_over_the_patches_that_are_kept(tiny, name):
    model, batch = make_model(tiny, name), batch_of(np.random.default_rng(0))
    kept = paddle.to_tensor([[0, 1], [2, 3], [0, 3], [1, 2]])
    model.train()
    before = model(**batch, kept_patches=kept)
    inside = np.zeros((4, 4, 1), np.float32)
    np.put_along_axis(inside, kept.numpy()[:, :, None], 1, 1)
    inside = grid_of(model.transformer, batch["noise"]).join(paddle.to_tensor(inside).expand([4, 4, 16]), None)
    changed = {**batch, "noise": batch["noise"] + 5 * (1 - inside)}
    after = model(**changed, kept_patches=kept)
    assert float(before.value) == float(after.value) and (before.per_sample == after.per_sample).all()
    np.testing.assert_allclose(float(before.value), float(before.per_sample.mean()), rtol=1e-6)
    level = model.levels[batch["timesteps"]]
    scales = model.process.scales(level.reshape([-1, 1, 1, 1]))
    latents = model.latents(batch["posterior_noise"], moments=batch["moments"])
    from ppldm.diffusion.process import add_noise

    noisy = add_noise(latents, batch["noise"], scales)
    with paddle.no_grad():
        predicted = model.predict(noisy, batch["timesteps"], batch["input_ids"], kept=kept)
    error = ((predicted - batch["noise"]).square() * inside).sum([1, 2, 3]) / inside.sum([1, 2, 3])
    np.testing.assert_allclose(before.per_sample, error, rtol=1e-5)
    model.eval()
    assert float(model(**batch, kept_patches=kept).value) == float(model(**batch).value)


@pytest.mark.slow
def test_it_overfits(tiny, name):
    assert overfit(make_model(tiny, name)) < 0.5


@pytest.mark.needs("parity")
def test_a_dit_is_pixart_s_of_diffusers():
    import torch
    from diffusers import PixArtTransformer2DModel

    from ppldm.weights.components import to_torch_config

    for changes in ({}, {"out_channels": 8}, {"sample_size": 16}):
        network, (noisy, timesteps, hidden, mask) = randomised("dit", **{"sample_size": 8} | changes), given_for()
        own = component_of("transformer", network)
        theirs = PixArtTransformer2DModel(**to_torch_config("transformer", own.config, "x")).eval()
        state = {key: torch.tensor(np.ascontiguousarray(value)) for key, value in turn_linear(own.arrays).items()}
        theirs.load_state_dict(state)
        with torch.no_grad():
            expected = theirs(
                *(torch.tensor(one.numpy()) for one in (noisy, hidden, timesteps)),
                {"resolution": None, "aspect_ratio": None},
                encoder_attention_mask=torch.tensor(mask.numpy()),
            ).sample.numpy()  # fmt: skip
        with paddle.no_grad():
            found = transform(network, noisy, timesteps, hidden, mask)
        np.testing.assert_allclose(found, expected[:, :4], atol=1e-4)


def uvit_in_pytorch(config, state, noisy, timesteps, hidden):
    """U-ViT as published (arXiv:2209.12152, section 3 and figure 1), stated once more: [B, C, h, w]."""
    import torch
    from torch.nn import functional as F

    width, patch = config["num_attention_heads"] * config["attention_head_dim"], config["patch_size"]

    def linear(name, x):
        return F.linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))

    def norm(name, x):
        return F.layer_norm(x, (width,), state[f"{name}.weight"], state[f"{name}.bias"])

    def block(name, x):
        parts = linear(f"{name}.attn.qkv", norm(f"{name}.norm1", x)).chunk(3, -1)
        q, k, v = (one.unflatten(-1, (config["num_attention_heads"], -1)).transpose(1, 2) for one in parts)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + linear(f"{name}.attn.proj", mixed)
        return x + linear(f"{name}.mlp.fc2", F.gelu(linear(f"{name}.mlp.fc1", norm(f"{name}.norm2", x))))

    patches = F.conv2d(noisy, state["patch_embed.proj.weight"], state["patch_embed.proj.bias"], stride=patch)
    angles = timesteps[:, None] * 10000.0 ** -(torch.arange(width // 2) / (width // 2))
    time = torch.cat([angles.cos(), angles.sin()], -1)
    x = torch.cat([time[:, None], linear("context_embed", hidden), patches.flatten(2).transpose(1, 2)], 1)
    x, skips, half = x + state["pos_embed"], [], config["num_layers"] // 2
    for number in range(half):
        x = block(f"in_blocks.{number}", x)
        skips.append(x)
    x = block("mid_block", x)
    for number in range(half):
        x = block(f"out_blocks.{number}", linear(f"out_blocks.{number}.skip_linear", torch.cat([x, skips.pop()], -1)))
    x = linear("decoder_pred", norm("norm", x))[:, 1 + hidden.shape[1] :]
    x = x.unflatten(1, (noisy.shape[2] // patch, -1)).unflatten(-1, (patch, patch, -1))
    x = x.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)
    return F.conv2d(x, state["final_layer.weight"], state["final_layer.bias"], padding=1)


@pytest.mark.needs("parity")
@pytest.mark.parametrize("layers", [2, 6])
def test_a_uvit_is_the_published_one(layers):
    import torch

    network, (noisy, timesteps, hidden, _) = randomised("uvit", sample_size=8, num_layers=layers), given_for()
    own = component_of("transformer", network)
    state = {key: torch.tensor(np.ascontiguousarray(value)) for key, value in turn_linear(own.arrays).items()}
    given = [torch.tensor(one.numpy()) for one in (noisy, timesteps, hidden)]
    with paddle.no_grad():
        found = transform(network, noisy, timesteps, hidden)
    np.testing.assert_allclose(found, uvit_in_pytorch(own.config, state, *given), atol=1e-4)

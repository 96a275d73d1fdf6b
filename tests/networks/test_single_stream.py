"""The single-stream transformer: its mathematics."""

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppldm.networks.build import build_network
from ppldm.networks.configs import check_config
from ppldm.networks.cpu_operators.layers import operators_are_usable, use_cpu_operators
from ppldm.networks.transformers.single_stream import RMSNorm, SingleStreamTransformer, rotations, turn
from ppldm.networks.transformers.transform import transform
from ppldm.weights.components import turn_linear
from ppldm.weights.fill import component_of
from tests.conftest import SINGLE_STREAM_CONFIG

WORDS = 12


def randomised(**changes) -> SingleStreamTransformer:
    """A network of which no weight is zero."""
    network = SingleStreamTransformer(**check_config("transformer", SINGLE_STREAM_CONFIG | changes, "x"))
    rng = np.random.default_rng(3)
    for parameter in network.parameters():
        parameter.set_value(rng.normal(0, 0.1, parameter.shape).astype(np.float32))
    network.eval()
    return network


def given_for(height=8, width=8, batch=3):
    rng = np.random.default_rng(4)
    noisy = rng.standard_normal((batch, 4, height, width), np.float32)
    hidden = rng.standard_normal((batch, WORDS, 32), np.float32)
    mask = (np.arange(WORDS) < rng.integers(1, WORDS, (batch, 1))).astype(np.int64)
    return [paddle.to_tensor(one) for one in (noisy, rng.integers(0, 1000, batch), hidden, mask)]


def scores(rows, columns, head_dim, theta) -> np.ndarray:
    """[N, N] of one query and one key that stand at every place."""
    rng = np.random.default_rng(5)
    query, key = (
        paddle.to_tensor(rng.standard_normal((1, 1, 1, head_dim), np.float32)).expand([1, rows * columns, 1, -1])
        for _ in range(2)
    )
    turns = paddle.to_tensor(rotations(rows, columns, head_dim, theta))
    return (turn(query, turns)[0, :, 0] @ turn(key, turns)[0, :, 0].T).numpy()


@given(st.integers(1, 6), st.integers(1, 6), st.sampled_from([4, 8, 32]), st.sampled_from([10.0, 100.0, 10000.0]))
@settings(max_examples=30, deadline=None)
def test_scores_depend_on_how_far_patches_are_apart(rows, columns, head_dim, theta):
    found = scores(rows, columns, head_dim, theta)
    places = np.stack(np.divmod(np.arange(rows * columns), columns), 1)
    apart = places[:, None] - places[None]
    for one in np.unique(apart.reshape(-1, 2), axis=0):
        alike = found[(apart == one).all(2)]
        np.testing.assert_allclose(alike, alike[0], atol=1e-4)


def test_scores_tell_rows_from_columns_and_one_side_from_the_other():
    found = scores(4, 4, 32, 100.0)[5]
    assert np.unique(found[[1, 4, 6, 9]].round(4)).size == 4


@paddle.no_grad()
def test_patches_that_are_moved_together_are_predicted_alike():
    """Where no word is looked at: words stand still."""
    network, (noisy, timesteps, hidden, mask) = randomised(), given_for(12, 16)
    here = np.array([[0, 1, 9, 19]] * 3)  # of 6 x 8 patches
    there = here + 2 * 8 + 3
    moved = paddle.roll(noisy, [4, 6], [2, 3])
    nothing = paddle.zeros_like(mask)
    one = transform(network, noisy, timesteps, hidden, nothing, paddle.to_tensor(here))
    other = transform(network, moved, timesteps, hidden, nothing, paddle.to_tensor(there))
    np.testing.assert_allclose(paddle.roll(one, [4, 6], [2, 3]), other, atol=1e-5)
    assert (one != 0).any()
    turned_over = transform(network, noisy, timesteps, hidden, nothing, paddle.to_tensor(here[:, ::-1].copy()))
    np.testing.assert_allclose(turned_over, one, atol=1e-5)
    swapped = transform(network, noisy.transpose([0, 1, 3, 2]), timesteps, hidden, nothing).transpose([0, 1, 3, 2])
    assert float((swapped - transform(network, noisy, timesteps, hidden, nothing)).abs().max()) > 1e-3


@paddle.no_grad()
@pytest.mark.parametrize("masks", [False, True])
def test_a_row_is_predicted_alike_among_any_others(masks):
    network, (noisy, timesteps, hidden, mask) = use_cpu_operators(randomised()), given_for(8, 12)
    mask = mask if masks else None
    whole = transform(network, noisy, timesteps, hidden, mask)
    for row in range(3):
        own = [None if one is None else one[row : row + 1] for one in (noisy, timesteps, hidden, mask)]
        rounding = 0 if operators_are_usable() else 1e-6  # Paddle's operators add up a batch in another order
        np.testing.assert_allclose(transform(network, *own)[0], whole[row], rtol=0, atol=rounding)


@paddle.no_grad()
def test_what_is_masked_of_a_caption_has_no_influence():
    network, (noisy, timesteps, hidden, mask) = randomised(), given_for()
    other = hidden + 10 * (1 - mask).astype("float32").unsqueeze(-1)
    kept = paddle.to_tensor([[0, 5, 6], [1, 2, 15], [3, 4, 9]])
    for patches in (None, kept):
        one = transform(network, noisy, timesteps, hidden, mask, patches)
        assert (one == transform(network, noisy, timesteps, other, mask, patches)).all()
        assert (transform(network, noisy, timesteps, other, None, patches) != one).any()
        changed = hidden + 10 * mask.astype("float32").unsqueeze(-1)
        assert (transform(network, noisy, timesteps, changed, mask, patches) != one).any()


@paddle.no_grad()
def test_without_a_share_of_the_first_values_nothing_is_another_bit():
    """And without the setting there is nothing more: the same parameters, by the same names."""
    plain, mixing, given = randomised(), randomised(value_residual=True), given_for(8, 12)
    own, more = plain.state_dict(), mixing.state_dict()
    assert more.keys() - own.keys() == {f"blocks.{n}.attn.mixture" for n in range(1, plain.config.depth)}
    for name, parameter in more.items():
        parameter.set_value(own.get(name, paddle.to_tensor([0.5, -0.5])))
    assert plain.config.depth > 1 and (transform(mixing, *given) == transform(plain, *given)).all()
    for name in more.keys() - own.keys():
        more[name].zero_()
    assert float((transform(mixing, *given) - transform(plain, *given)).abs().max()) > 1e-3
    new = build_network("transformer", {**plain.config, "value_residual": True}, 1).state_dict()
    assert not any(new[name].any() for name in more.keys() - own.keys())


@pytest.mark.parametrize("masks", [False, True])
def test_operators_for_cpus_change_nothing_but_rounding(masks):
    noisy, timesteps, hidden, mask = given_for(8, 12)
    kept, found = paddle.to_tensor([[0, 5, 6], [1, 2, 15], [3, 4, 9]]), []
    for network in (randomised(), use_cpu_operators(randomised())):
        predicted = transform(network, noisy, timesteps, hidden, mask if masks else None, kept)
        predicted.square().mean().backward()
        found.append([predicted, *(parameter.grad for parameter in network.parameters())])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-6)


def test_a_new_network_gives_nothing_and_passes_everything_on():
    config = check_config("transformer", SINGLE_STREAM_CONFIG | {"dim": 64, "head_dim": 16, "depth": 8}, "x")
    state = build_network("transformer", config, 1).state_dict()
    for key, std in {
        "blocks.0.attn.qkv.weight": 0.02, "blocks.0.attn.proj.weight": 0.02 / 4, "blocks.7.mlp.w3.weight": 0.02 / 4,
        "blocks.3.mlp.w1.weight": 0.02, "blocks.3.scale_table": 0, "modulation.1.weight": 0, "t_embedder.2.bias": 0,
        "x_embedder.proj.weight": (2 / 28) ** 0.5, "x_embedder.widen.weight": (2 / 76) ** 0.5,
        "final_layer.linear.weight": 0,
    }.items():  # fmt: skip
        np.testing.assert_allclose(float(state[key].std(unbiased=False)), std, rtol=0.15, err_msg=key)
    assert all((state[key] == 1).all() for key in state if "norm" in key or key == "y_embedder.0.weight")


def stated_in_pytorch(config, state, noisy, timesteps, hidden, mask):
    """The same once more, as the module's docstring says it: [B, C, h, w]."""
    import torch
    from torch.nn import functional as F

    head, patch = config["head_dim"], config["patch_size"]

    def linear(name, x):
        return F.linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))

    def norm(name, x):
        return F.rms_norm(x, x.shape[-1:], state[f"{name}.weight"], eps=1e-6)

    x = F.conv2d(noisy, state["x_embedder.proj.weight"], state["x_embedder.proj.bias"], stride=patch)
    sides = x.shape[2:]
    x = linear("x_embedder.widen", x.flatten(2).transpose(1, 2))
    frequencies = config["rope_theta"] ** (-torch.arange(head // 4) / (head // 4))
    row, column = (one.flatten() for one in torch.meshgrid(*map(torch.arange, sides), indexing="ij"))
    angles = torch.cat([row[:, None] * frequencies, column[:, None] * frequencies], 1)
    angles = torch.cat([torch.zeros(hidden.shape[1], head // 2), angles])
    turned = torch.polar(torch.ones_like(angles), angles)

    def rope(x):
        """Pairs as complex numbers."""
        x = torch.complex(*x.chunk(2, -1)) * turned
        return torch.cat([x.real, x.imag], -1)

    x = torch.cat([linear("y_embedder.1", norm("y_embedder.0", hidden)), x], 1)
    waves = timesteps[:, None] * 10000.0 ** -(torch.arange(128) / 128)
    time = linear("t_embedder.0", torch.cat([waves.cos(), waves.sin()], -1))
    time = linear("modulation.1", F.silu(linear("t_embedder.2", F.silu(time))))
    *changes, last = time[:, None].chunk(5, -1)
    looks = torch.cat([mask.bool(), torch.ones(len(mask), x.shape[1] - mask.shape[1], dtype=torch.bool)], 1)
    for number in range(config["depth"]):
        name = f"blocks.{number}"
        own = [one + table for one, table in zip(changes, state[f"{name}.scale_table"], strict=True)]
        parts = linear(f"{name}.attn.qkv", norm(f"{name}.norm1", x) * (1 + own[0])).chunk(3, -1)
        if number == 0:
            first = parts[2]
        if f"{name}.attn.mixture" in state:
            share = 0.5 + state[f"{name}.attn.mixture"]
            parts = *parts[:2], share[0] * parts[2] + share[1] * first
        q, k, v = (one.unflatten(-1, (-1, head)).transpose(1, 2) for one in parts)
        q, k = rope(norm(f"{name}.attn.norm_q", q)), rope(norm(f"{name}.attn.norm_k", k))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=looks[:, None, None])
        x = x + own[1] * linear(f"{name}.attn.proj", mixed.transpose(1, 2).flatten(2))
        y = norm(f"{name}.norm2", x) * (1 + own[2])
        x = x + own[3] * linear(f"{name}.mlp.w3", F.silu(linear(f"{name}.mlp.w1", y)) * linear(f"{name}.mlp.w2", y))
    x = linear("final_layer.linear", norm("final_layer.norm", x[:, hidden.shape[1] :]) * (1 + last))
    x = x.unflatten(1, sides).unflatten(-1, (patch, patch, -1))
    return x.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)


@pytest.mark.needs("parity")
@pytest.mark.parametrize("changes", [{}, {"rope_theta": 10000.0, "depth": 1}, {"head_dim": 16, "mlp_ratio": 2.5},
                                     {"value_residual": True}])  # fmt: skip
def test_it_is_what_pytorch_computes(changes):
    import torch

    network, inputs = randomised(**changes), given_for(8, 12)
    own = component_of("transformer", network)
    state = {key: torch.tensor(np.ascontiguousarray(value)) for key, value in turn_linear(own.arrays).items()}
    with paddle.no_grad():
        found = transform(network, *inputs)
    expected = stated_in_pytorch(own.config, state, *(torch.tensor(one.numpy()) for one in inputs))
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.needs("parity")
def test_a_norm_in_half_precision_is_computed_in_float32():
    import torch

    x, norm = np.random.default_rng(0).standard_normal((5, 64), np.float32) * 300, RMSNorm(64)
    theirs = torch.nn.functional.rms_norm(torch.tensor(x), (64,), eps=1e-6)
    np.testing.assert_allclose(norm(paddle.to_tensor(x)), theirs, rtol=1e-5)
    norm.to(dtype="bfloat16")
    np.testing.assert_allclose(norm(paddle.to_tensor(x).astype("bfloat16")).astype("float32"), theirs, rtol=2e-2)

"""Initial weights: PyTorch's distributions, from the seed alone."""

import math
import threading

import numpy as np
import paddle
import pytest
from paddle import nn

from ppldm.networks.build import UNBUILDABLE, build_network, init_like_pytorch, make_network, uninitialized
from ppldm.networks.configs import read_new_config


@pytest.mark.parametrize(
    "layer, fan_in", [(nn.Linear(300, 200), 300), (nn.Conv2D(48, 64, 3), 48 * 9), (nn.Conv2D(128, 64, 1), 128)]
)
def test_linear_and_conv_are_uniform_by_fan_in(layer, fan_in):
    init_like_pytorch(layer, seed=3, salt=0)
    bound = 1 / math.sqrt(fan_in)
    for parameter in (layer.weight, layer.bias):
        values = parameter.numpy()
        assert np.abs(values).max() <= bound
        # Uniform on +-bound has the standard deviation bound / sqrt(3).
        tolerance = 5 / math.sqrt(values.size)
        assert abs(values.std() / (bound / math.sqrt(3)) - 1) < tolerance
        assert abs(values.mean()) < bound * tolerance


def test_norms_are_identities_and_embeddings_normal():
    norm = init_like_pytorch(nn.GroupNorm(2, 8), seed=3, salt=0)
    assert (norm.weight.numpy() == 1).all() and (norm.bias.numpy() == 0).all()
    embedding = init_like_pytorch(nn.Embedding(500, 64), seed=3, salt=0).weight.numpy()
    assert abs(embedding.std() - 1) < 0.02 and abs(embedding.mean()) < 0.02


def test_a_layer_without_a_rule_is_refused():
    with pytest.raises(TypeError, match="Conv1D"):
        init_like_pytorch(nn.Conv1D(2, 2, 1), seed=0, salt=0)


def test_autoencoder_weights_keep_the_variance(tiny):
    vae = build_network("vae", read_new_config("vae", tiny.config("vae"), ""), seed=3)
    convolutions = [layer for layer in vae.sublayers() if isinstance(layer, nn.Conv2D)]
    scaled = [c.weight.numpy().ravel() * math.sqrt(np.prod(c.weight.shape[1:]) / 2) for c in convolutions]
    assert abs(np.concatenate(scaled).std() - 1) < 0.03
    assert all((c.bias.numpy() == 0).all() for c in convolutions)


def test_text_encoder_embeddings(tiny):
    text_encoder = build_network(
        "text_encoder", read_new_config("ldmbert", tiny.config("ldmbert"), "") | {"vocab_size": 5000}, seed=3
    )
    for embedding in (text_encoder.model.embed_tokens, text_encoder.model.embed_positions):
        values = embedding.weight.numpy()
        assert abs(values.std() / 0.02 - 1) < 5 / math.sqrt(values.size)


def test_fresh_unet_gives_exactly_zero(tiny):
    unet = build_network("unet", read_new_config("unet", tiny.config("unet"), ""), seed=3)
    unet.eval()
    paddle.seed(0)
    out = unet(paddle.randn([2, 4, 4, 4]), 500, encoder_hidden_states=paddle.randn([2, 12, 32])).sample
    assert (out.numpy() == 0).all()
    for layer in unet.sublayers():
        if type(layer).__name__ == "ResnetBlock2D":
            assert (layer.conv2.weight.numpy() == 0).all() and (layer.conv1.weight.numpy() != 0).any()


def test_every_residual_branch_of_a_unet_starts_at_zero(tiny):
    """Resnets, transformers and plain attention: each block's last layer, weight and bias."""
    changes = {"down_block_types": ["CrossAttnDownBlock2D", "AttnDownBlock2D"]}
    unet = build_network("unet", read_new_config("unet", tiny.config("unet"), "") | changes, seed=3)
    last = {"ResnetBlock2D": "conv2", "Transformer2DModel": "proj_out"}
    found = {name: 0 for name in (*last, "Attention")}
    for layer in unet.sublayers():
        kind = type(layer).__name__
        if kind == "Attention" and layer.group_norm is None:
            assert (layer.to_out[0].weight.numpy() != 0).any()  # inside a transformer, whose own end is zero
        elif kind in found:
            end = getattr(layer, last[kind]) if kind in last else layer.to_out[0]
            assert all((parameter.numpy() == 0).all() for parameter in end.parameters()), kind
            found[kind] += 1
    assert min(found.values()) > 0, found


def test_unet_and_text_encoder_do_not_start_alike(tiny):
    """At one seed: the k-th parameters of both are uniform numbers, and other ones."""
    unet = build_network("unet", read_new_config("unet", tiny.config("unet"), ""), seed=3)
    text_encoder = build_network("text_encoder", read_new_config("ldmbert", tiny.config("ldmbert"), ""), seed=3)
    pairs = [
        [values / np.abs(values).max() for values in (one.numpy().ravel()[:8], other.numpy().ravel()[:8])]
        for one, other in zip(unet.parameters(), text_encoder.parameters(), strict=False)
        if min(one.size, other.size) >= 8 and min(len(np.unique(one.numpy())), len(np.unique(other.numpy()))) > 2
    ]
    assert len(pairs) > 5
    for one, other in pairs:
        assert np.abs(one - other).max() > 0.01


def test_weights_come_from_the_seed_alone(tiny):
    def weights(seed):
        unet = build_network("unet", read_new_config("unet", tiny.config("unet"), ""), seed)
        return {name: p.numpy() for name, p in unet.named_parameters()}

    paddle.seed(1)
    first = weights(seed=3)
    paddle.seed(2)
    second, other = weights(seed=3), weights(seed=4)
    assert all((first[name] == second[name]).all() for name in first)
    assert any((first[name] != other[name]).any() for name in first)


@pytest.mark.parametrize("kind, name", [("unet", "unet_tiny"), ("vae", "vae_tiny"), ("text_encoder", "clip_tiny"),
                                        ("text_encoder", "t5_tiny")])  # fmt: skip
def test_a_network_whose_weights_are_set_draws_none_and_leaves_paddle_as_it_was(kind, name):
    ones = nn.initializer.Constant(1.0)
    nn.initializer.set_global_initializer(ones, ones)
    try:
        config = read_new_config(kind, name, "")
        paddle.seed(7)
        drawn = paddle.randn([4]).numpy()
        paddle.seed(7)
        network = make_network(kind, config)
        with pytest.raises(UNBUILDABLE):
            make_network(kind, {name: None for name in config})
        assert (paddle.randn([4]).numpy() == drawn).all()
        assert all(not one.weight.any() for one in network.sublayers() if isinstance(one, nn.Linear))
        assert nn.Linear(2, 2).weight.numpy().all()
    finally:
        nn.initializer.set_global_initializer(None)


def test_threads_have_zeros_one_after_the_other():
    entered = threading.Event()

    def other():
        with uninitialized():
            entered.set()

    thread = threading.Thread(target=other)
    with uninitialized():
        thread.start()
        assert not entered.wait(0.1)
    thread.join()
    assert entered.is_set() and nn.Linear(2, 2).weight.numpy().any()

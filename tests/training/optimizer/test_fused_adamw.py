"""The fused update is AdamW's, and its state is too."""

from itertools import permutations

import numpy as np
import paddle
import pytest

from ppldm.training.optimizer import CpuAdamW, FusedAdamW


def train(kind, clip, num_updates=4, state=None):
    """Updates of a net whose parameters differ in weight decay and learning rate."""
    with paddle.utils.unique_name.guard():
        net = paddle.nn.Sequential(paddle.nn.Linear(8, 16), paddle.nn.LayerNorm(16), paddle.nn.Linear(16, 1))
        for number, parameter in enumerate(net.parameters()):
            values = np.random.default_rng(number).standard_normal(parameter.shape)
            parameter.set_value(values.astype(np.float32))
        net[2].weight.optimize_attr["learning_rate"] = 0.5
        decayed = {p.name for p in net.parameters() if p.ndim > 1}
        optimizer = kind(
            learning_rate=paddle.optimizer.lr.LambdaDecay(1e-2, lambda update: 1 / (update + 1)),
            parameters=net.parameters(),
            weight_decay=0.1,
            apply_decay_param_fun=decayed.__contains__,
            grad_clip=paddle.nn.ClipGradByGlobalNorm(0.1) if clip else None,
        )
        if state:
            optimizer.set_state_dict(state)
        pixels = paddle.to_tensor(np.random.default_rng(9).standard_normal((4, 8)).astype(np.float32))
        for _ in range(num_updates):
            net(pixels).square().mean().backward()
            optimizer.step()
            optimizer.clear_grad()
            optimizer._learning_rate.step()
    return [p.numpy() for p in net.parameters()], optimizer.state_dict()


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("kind", [FusedAdamW, CpuAdamW])
def test_it_is_adamw(kind, clip):
    weights, state = train(paddle.optimizer.AdamW, clip)
    fused_weights, fused_state = train(kind, clip)
    for one, other in zip(weights, fused_weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)  # of updates of 1e-2
    assert state.keys() == fused_state.keys()
    for name in state.keys() - {"LR_Scheduler"}:
        one, other = state[name].numpy(), fused_state[name].numpy()
        assert np.abs(one - other).max() <= 2e-6 * np.abs(one).max(), name


@pytest.mark.parametrize("kind", [paddle.optimizer.AdamW, FusedAdamW, CpuAdamW])
def test_under_a_constant_gradient_each_update_is_the_learning_rate(kind):
    """As the means of gradients and of their squares are corrected for their beginning at zero (Kingma and Ba 2015,
    arXiv:1412.6980, algorithm 1): whatever the gradient, and without a bias that grows with the updates."""
    weights = paddle.create_parameter([3], "float32", default_initializer=paddle.nn.initializer.Constant(0.0))
    optimizer = kind(1e-3, parameters=[weights], weight_decay=0.0)
    for _ in range(100):
        (weights * paddle.to_tensor([0.37, -2.0, 1e-3])).sum().backward()
        optimizer.step()
        optimizer.clear_grad()
    # The epsilon of 1e-8 is 1e-5 of the last gradient.
    np.testing.assert_allclose(weights.numpy(), [-0.1, 0.1, -0.1 / (1 + 1e-5)], rtol=1.5e-6)


@pytest.mark.parametrize("first, second", permutations([paddle.optimizer.AdamW, FusedAdamW, CpuAdamW], 2))
def test_each_goes_on_with_the_others_state(first, second):
    _, state = train(first, clip=False)
    weights, _ = train(second, clip=False, num_updates=2, state=state)
    expected, _ = train(first, clip=False, num_updates=2, state=state)
    for one, other in zip(weights, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", [FusedAdamW, CpuAdamW])
def test_weights_that_have_no_gradient_stay(kind):
    with paddle.utils.unique_name.guard():
        layers = [paddle.nn.Linear(2, 2) for _ in range(2)]
        optimizer = kind(parameters=[p for layer in layers for p in layer.parameters()])
        before = layers[1].weight.numpy().copy()
        layers[0](paddle.ones([1, 2])).sum().backward()
        optimizer.step()
        optimizer.clear_grad(set_to_zero=False)
        optimizer.step()
    assert (layers[1].weight.numpy() == before).all()

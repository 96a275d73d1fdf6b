"""What is frozen passes gradients on as if it were not."""

import numpy as np
import paddle
import pytest
from paddle import nn

from ppldm.networks.cpu_operators.layers import use_cpu_operators
from ppldm.networks.model import freeze

LAYERS = {
    "layer_norm": (lambda: nn.LayerNorm(8), (2, 5, 8)),
    "layer_norm_without_bias": (lambda: nn.LayerNorm(8, bias_attr=False), (2, 5, 8)),
    "layer_norm_without_weight": (lambda: nn.LayerNorm(8, weight_attr=False, bias_attr=False), (2, 5, 8)),
    "group_norm": (lambda: nn.GroupNorm(4, 8), (2, 8, 3, 3)),
    "linear": (lambda: nn.Linear(8, 8), (2, 5, 8)),
    "conv": (lambda: nn.Conv2D(8, 8, 3, padding=1), (2, 8, 3, 3)),
    "nested": (lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)), (2, 5, 8)),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("operators", [False, True])
@pytest.mark.parametrize("graph", [False, True])
def test_a_frozen_layer_gives_the_same_and_the_same_gradient_of_its_inputs(name, operators, graph):
    make, shape = LAYERS[name]
    layer, rng = make(), np.random.default_rng(0)
    if operators:
        use_cpu_operators(layer)
    for parameter in layer.parameters():
        parameter.set_value(rng.standard_normal(parameter.shape, dtype=np.float32))
    values, found = rng.standard_normal(shape, dtype=np.float32), []
    for frozen in (False, True):
        if frozen:
            freeze(layer)
        inputs = paddle.to_tensor(values, stop_gradient=False)
        call = paddle.jit.to_static(paddle.jit.not_to_static(lambda x: layer(x)), full_graph=True, backend=None)
        outputs = call(inputs) if graph else layer(inputs)
        scale = np.random.default_rng(1).standard_normal(outputs.shape, dtype=np.float32)
        (outputs * paddle.to_tensor(scale)).sum().backward()
        found.append((outputs.numpy(), inputs.grad.numpy()))
    assert np.array_equal(found[0][0], found[1][0]) and np.array_equal(found[0][1], found[1][1])
    assert all(parameter.stop_gradient for parameter in layer.parameters())
    with paddle.no_grad():
        assert layer(paddle.to_tensor(values)).stop_gradient


def test_batch_norms_keep_their_statistics_whatever_mode_is_set():
    layer, values = nn.BatchNorm2D(3), paddle.to_tensor(np.random.default_rng(0).random((2, 3, 4, 4), np.float32))
    freeze(layer)
    expected = layer(values).numpy()
    layer.train()
    assert (layer(values).numpy() == expected).all() and (layer._mean.numpy() == 0).all()

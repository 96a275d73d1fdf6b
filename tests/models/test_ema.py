"""The average is its closed form, over any restart."""

import numpy as np
import paddle
import pytest

from ppldm.models.ema import ExponentialMovingAverage, decay_at


def closed_form(values, decay):
    shadow = values[0]
    for update, value in enumerate(values[1:], 1):
        d = min(decay, (1 + update) / (10 + update))
        shadow = d * shadow + (1 - d) * value
    return shadow


def parameter(value):
    tensor = paddle.to_tensor(np.array(value, dtype=np.float32))
    tensor.stop_gradient = False
    return tensor


@pytest.mark.parametrize("decay", [0.0, 0.15, 0.9999])
@pytest.mark.parametrize("restart_after", [None, 0, 1, 3])
def test_closed_form_with_and_without_a_restart(decay, restart_after):
    values = [np.array([1.0, -2.0]) * k**2 for k in range(1, 7)]
    weight = parameter(values[0])
    ema = ExponentialMovingAverage({"w": weight}, decay)
    for update, value in enumerate(values[1:]):
        if update == restart_after:
            state = {k: v.numpy() if isinstance(v, paddle.Tensor) else v for k, v in ema.state_dict().items()}
            ema = ExponentialMovingAverage({"w": weight}, decay)
            ema.load_state_dict(state)
        weight.set_value(value.astype(np.float32))
        ema.update()
    np.testing.assert_allclose(ema.shadow["w"], closed_form(values, decay), rtol=1e-5)


def test_decay_rises_to_its_limit():
    assert decay_at(1, 0.9999) == pytest.approx(2 / 11)
    assert decay_at(10**6, 0.9999) == 0.9999


def test_applied_swaps_and_restores_to_the_bit():
    weight = parameter([0.1, 0.2])
    ema = ExponentialMovingAverage({"w": weight}, 0.5)
    weight.set_value(np.array([0.3, 0.7], dtype=np.float32))
    ema.update()
    before, average = weight.numpy().copy(), ema.shadow["w"].numpy().copy()
    with pytest.raises(RuntimeError), ema.applied():
        assert (weight.numpy() == average).all() and (average != before).all()
        raise RuntimeError
    assert (weight.numpy() == before).all() and (ema.shadow["w"].numpy() == average).all()

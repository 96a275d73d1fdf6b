"""The average is its closed form, over any restart."""

import numpy as np
import paddle
import pytest

from ppldm.methods.averages.ema import GradualDecay
from ppldm.methods.averages.ema_interval import IntervalDecay
from ppldm.networks.ema import ExponentialMovingAverage

DECAYS = [GradualDecay(0.0), GradualDecay(0.15), GradualDecay(0.9999), IntervalDecay(2, 1, 0.9),
          IntervalDecay(4, 2, 0.5), IntervalDecay(0, 3, 0.25), IntervalDecay(100, 3)]  # fmt: skip


def closed_form(values, decay):
    """shadow_N = prod(d_1 .. d_N) w_0 + sum over n of (1 - d_n) prod(d_n+1 .. d_N) w_n."""
    if isinstance(decay, GradualDecay):
        d = [min(decay.decay, (1 + n) / (10 + n)) for n in range(1, len(values))]
    else:
        d = [
            1.0 if n % decay.iters else 0.0 if n <= decay.start_iters else decay.beta for n in range(1, len(values))
        ]  # fmt: skip
    return np.prod(d) * values[0] + sum(
        (1 - d[n - 1]) * np.prod(d[n:]) * value for n, value in enumerate(values[1:], 1)
    )


def parameter(value):
    tensor = paddle.to_tensor(np.array(value, dtype=np.float32))
    tensor.stop_gradient = False
    return tensor


@pytest.mark.parametrize("decay", DECAYS, ids=str)
@pytest.mark.parametrize("restart_after", [None, 0, 1, 3])
@pytest.mark.parametrize("offloaded", [False, True])
def test_closed_form_with_and_without_a_restart(decay, restart_after, offloaded):
    values = [np.array([1.0, -2.0]) * k**2 for k in range(1, 9)]
    weight = parameter(values[0])
    ema = ExponentialMovingAverage({"w": weight}, decay, offloaded=offloaded)
    for update, value in enumerate(values[1:]):
        if update == restart_after:
            state = {k: v.numpy() if isinstance(v, paddle.Tensor) else v for k, v in ema.state_dict().items()}
            ema = ExponentialMovingAverage({"w": weight}, decay, offloaded=offloaded)
            ema.load_state_dict(state)
        weight.set_value(value.astype(np.float32))
        ema.update({})
    np.testing.assert_allclose(ema.shadow["w"], closed_form(values, decay), rtol=1e-5)


def test_decay_rises_to_its_limit():
    assert GradualDecay().at(1) == pytest.approx(2 / 11)
    assert GradualDecay().at(10**6) == 0.9999


def test_intervals_copy_then_average():
    """The published numbers: a copy every 100 updates up to 5000, then decay 0.9 every 100."""
    decay = IntervalDecay()
    assert [decay.at(n) for n in (1, 99, 100, 101, 5000, 5001, 5100, 5150)] == [1, 1, 0, 1, 0, 1, 0.9, 1]


@pytest.mark.parametrize("every", [1, 10])
def test_a_half_life_is_a_decay_of_the_interval(every):
    """As docs/methods.md says it: after so many updates half is left of what was there, whatever the interval."""
    ema = ExponentialMovingAverage({"w": parameter([1.0])}, IntervalDecay(0, every, 2 ** (-every / 30)))
    ema.parameters["w"].set_value(np.zeros(1, np.float32))
    for _ in range(30):
        ema.update({})
    np.testing.assert_allclose(ema.shadow["w"], [0.5], rtol=1e-6)


def test_a_copy_is_exact():
    weight = parameter([0.1, 3e7])
    ema = ExponentialMovingAverage({"w": weight}, IntervalDecay(10, 1))
    weight.set_value(np.array([1e-9, 0.3], dtype=np.float32))
    ema.update({})
    assert (ema.shadow["w"].numpy() == weight.numpy()).all()


def test_half_precision_weights_are_averaged_by_their_masters():
    weight = parameter([1.0, 2.0]).astype("bfloat16")
    weight.name = "half"
    ema = ExponentialMovingAverage({"w": weight}, GradualDecay(0.5))
    master = np.array([1.0001, 2.0001], dtype=np.float32)
    ema.update({"half": paddle.to_tensor(master)})
    np.testing.assert_allclose(ema.shadow["w"], [1, 2] + (master - [1, 2]) * 9 / 11, rtol=1e-7)


def test_applied_swaps_and_restores_to_the_bit():
    weight = parameter([0.1, 0.2])
    ema = ExponentialMovingAverage({"w": weight}, GradualDecay(0.5))
    weight.set_value(np.array([0.3, 0.7], dtype=np.float32))
    ema.update({})
    before, average = weight.numpy().copy(), ema.shadow["w"].numpy().copy()
    with pytest.raises(RuntimeError), ema.applied():
        assert (weight.numpy() == average).all() and (average != before).all()
        raise RuntimeError
    assert (weight.numpy() == before).all() and (ema.shadow["w"].numpy() == average).all()

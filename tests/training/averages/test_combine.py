"""Averages put together from snapshots are those that were tracked, for weights that move in any way."""

import numpy as np
import paddle
import pytest

from ppldm.config.training import LARGEST_STD
from ppldm.methods.averages.ema_posthoc import PowerDecay, exponent_of
from ppldm.networks.ema import ExponentialMovingAverage
from ppldm.training.averages.make import combine, makeable

STDS = (0.01, 0.05, 0.07, 0.1, 0.2, LARGEST_STD)


def profile(std, num_updates, length):
    """The closed form: what each of updates 1 .. length weighs in the average after `num_updates`."""
    power = exponent_of(std) + 1
    edges = np.minimum(np.arange(length + 1) / num_updates, 1)
    return np.diff(edges**power)


@pytest.mark.parametrize("std", STDS)
def test_the_exponent_gives_the_standard_deviation(std):
    """Of the density itself, integrated on a fine grid."""
    t = (np.arange(200_000) + 0.5) / 200_000
    density = (exponent_of(std) + 1) * t ** exponent_of(std) / len(t)
    mean = (t * density).sum()
    assert np.sqrt(((t - mean) ** 2 * density).sum()) == pytest.approx(std, rel=1e-4)


def test_published_exponents():
    """Of the paper: 0.05 and 0.10 are 16.97 and 6.94."""
    assert [round(exponent_of(std), 2) for std in (0.05, 0.10)] == [16.97, 6.94]


@pytest.mark.parametrize("std", STDS)
def test_the_tracked_average_is_its_profile(std):
    values = np.random.default_rng(1).normal(size=(60, 3))
    weight = paddle.to_tensor(np.full(3, 1e3, np.float32))
    average = ExponentialMovingAverage({"w": weight}, PowerDecay(std))
    for value in values:
        weight.set_value(value.astype(np.float32))
        average.update({})
    np.testing.assert_allclose(average.shadow["w"], profile(std, 60, 60) @ values, rtol=1e-4, atol=1e-5)
    assert PowerDecay(std).at(1) == 0  # the weights before the first update are forgotten


def snapshots(every, length, stds=(0.05, 0.1)):
    return [(std, end) for end in range(every, length + 1, every) for std in stds]


def combine_one(stored, std, end):
    coefficients, errors = combine(stored, [(std, end)])
    return coefficients[:, 0], errors[0]


def walks(length):
    """Weights that jump about, drift, curve, oscillate, and stay."""
    rng, t = np.random.default_rng(0), np.arange(1, length + 1) / length
    return np.stack([rng.normal(size=length), rng.normal(size=length).cumsum() / 20, t, t**3, np.exp(-5 * t),
                     np.sin(20 * t), np.ones(length)], axis=1)  # fmt: skip


@pytest.mark.parametrize(
    ("every", "std", "end", "bound"),
    [(10, 0.07, 1000, 2e-4), (20, 0.07, 1000, 5e-4), (20, 0.15, 1000, 1e-3), (20, 0.2, 1000, 3e-3),
     (20, 0.03, 1000, 6e-3), (100, 0.07, 1000, 1e-2), (20, 0.07, 600, 2e-3)],
)  # fmt: skip
def test_an_average_is_put_together(every, std, end, bound):
    stored, values = snapshots(every, 1000), walks(1000)
    coefficients, error = combine_one(stored, std, end)
    assert coefficients.sum() == pytest.approx(1, abs=1e-12) and error < bound
    made = sum(c * profile(one, n, 1000) for c, (one, n) in zip(coefficients, stored, strict=True))
    wanted = profile(std, end, 1000)
    assert np.linalg.norm(made - wanted) <= 1.02 * error * np.linalg.norm(wanted) + 1e-12
    np.testing.assert_allclose(made @ values, wanted @ values, atol=bound)
    assert made @ values[:, -1] == pytest.approx(1, abs=1e-12)  # what never changes comes out as it is


def test_a_tracked_average_is_itself():
    stored = snapshots(50, 500)
    for number in (4, 9, 19):
        coefficients, error = combine_one(stored, *stored[number])
        np.testing.assert_allclose(coefficients, np.eye(len(stored))[number], atol=1e-6)
        assert error < 1e-6


def test_what_is_made_badly_has_a_large_error():
    """Too narrow, too wide, and between two snapshots that lie far apart."""
    few = snapshots(100, 1000)
    errors = combine(few, [(0.01, 1000), (0.28, 1000), (0.05, 950), (0.05, 1000), (0.07, 1000)])[1]
    assert min(errors[:3]) > 0.1 and max(errors[3:]) < 0.02
    good = makeable(few, 1000, 0.02)
    assert 0.035 <= good[0] <= 0.05 and 0.1 <= good[-1] < 0.2 and 0.07 in good
    assert makeable(few, 1000, 10)[0] == 0.01 and makeable(few, 1000, 10)[-1] == LARGEST_STD


def test_a_million_updates():
    """Snapshots that nearly coincide: coefficients that do not amplify what float16 rounds away."""
    coefficients, error = combine_one(snapshots(5000, 10**6), 0.07, 10**6)
    assert error < 1e-4 and np.linalg.norm(coefficients) < 3

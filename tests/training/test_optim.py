"""The learning rate in updates."""

from types import SimpleNamespace

import paddle
import pytest

from ppldm.training.optim import LR_SCHEDULES, build_optimizer, lr_factor


@pytest.mark.parametrize("schedule", LR_SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 1, 10])
def test_warmup_then_schedule(schedule, warmup):
    factors = [lr_factor(update, schedule, warmup, 110) for update in range(111)]
    assert factors[:warmup] == pytest.approx([update / warmup for update in range(warmup)])
    assert factors[warmup] == 1.0
    assert all(a >= b for a, b in zip(factors[warmup:], factors[warmup + 1 :], strict=False))
    assert factors[110] == pytest.approx(1.0 if schedule.startswith("constant") else 0.0, abs=1e-9)


@pytest.mark.parametrize(
    "schedule, expected", [("linear", 0.5), ("cosine", 0.5), ("cosine_with_restarts", 0.5), ("polynomial", 0.55)]
)
def test_half_way(schedule, expected):
    assert lr_factor(60, schedule, 10, 110, end_factor=0.1) == pytest.approx(expected)


def test_unknown_schedule_is_refused():
    with pytest.raises(ValueError, match="stairs"):
        lr_factor(1, "stairs", 0, 10)


def arguments(**changes):
    return SimpleNamespace(**{
        "learning_rate": 0.1, "lr_scheduler_type": "linear", "warmup_steps": 2, "warmup_ratio": 0.0,
        "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "weight_decay": 0.5, "max_grad_norm": -1.0,
    } | changes)  # fmt: skip


def test_one_scheduler_step_an_update():
    layer = paddle.nn.Linear(1, 1)
    optimizer, scheduler = build_optimizer(layer.parameters(), arguments(), max_steps=6)
    rates = []
    for _ in range(7):
        rates.append(optimizer.get_lr())
        scheduler.step()
    assert rates == pytest.approx([0, 0.05, 0.1, 0.075, 0.05, 0.025, 0])


@pytest.mark.parametrize("max_grad_norm, clipped", [(-1.0, False), (0.0, False), (1.0, True)])
def test_clipping_only_above_zero(max_grad_norm, clipped):
    layer = paddle.nn.Linear(1, 1)
    optimizer, _ = build_optimizer(layer.parameters(), arguments(max_grad_norm=max_grad_norm), max_steps=6)
    assert (optimizer._grad_clip is not None) == clipped


def test_weight_decay_reaches_biases_too():
    layer = paddle.nn.Linear(1, 1)
    layer.bias.set_value(paddle.ones([1]))
    optimizer, _ = build_optimizer(layer.parameters(), arguments(warmup_steps=0), max_steps=100)
    (layer(paddle.ones([1, 1])) * 0).sum().backward()
    optimizer.step()
    assert float(layer.bias) == pytest.approx(1 - 0.1 * 0.5)

"""AdamW, and the learning rate in updates."""

import math
from operator import itemgetter
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppldm.config.training import LR_SCHEDULES, read_lr_steps
from ppldm.networks.model import Component
from ppldm.training.optimizer import (
    ClipByGroup,
    FusedAdamW,
    build_optimizer,
    learning_rate_ratios,
    lr_factor,
    squared_norms,
)
from ppldm.utils.errors import ConfigError


@pytest.mark.parametrize("schedule", LR_SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 1, 10])
def test_warmup_then_schedule(schedule, warmup):
    factors = [
        lr_factor(update, schedule, warmup, 110, steps=((60, 1.0), (110, 0.5), (math.inf, 0.0)))
        for update in range(111)
    ]
    assert factors[:warmup] == pytest.approx([update / warmup for update in range(warmup)])
    assert factors[warmup] == 1.0
    assert all(a >= b for a, b in zip(factors[warmup:], factors[warmup + 1 :], strict=False))
    assert factors[110] == pytest.approx(1.0 if schedule.startswith("constant") else 0.0, abs=1e-9)


@pytest.mark.parametrize(
    "schedule, expected", [("linear", 0.5), ("cosine", 0.55), ("cosine_with_restarts", 0.5), ("polynomial", 0.55)]
)
def test_half_way(schedule, expected):
    assert lr_factor(60, schedule, 10, 110, end_factor=0.1) == pytest.approx(expected)


@pytest.mark.parametrize("num_cycles, factors", [(1, [1, 0.5, 0]), (2, [1, 1, 0]), (3, [1, 0.5, 0])])
def test_cosine_with_restarts(num_cycles, factors):
    found = [lr_factor(update, "cosine_with_restarts", 10, 110, num_cycles=num_cycles) for update in (10, 60, 110)]
    if num_cycles == 2:
        assert lr_factor(35, "cosine_with_restarts", 10, 110, num_cycles=2) == pytest.approx(0.5)
    assert found == pytest.approx(factors)


def test_cosine_cycles_and_polynomial_power():
    assert lr_factor(60, "cosine", 10, 110, num_cycles=1) == pytest.approx(0, abs=1e-9)
    assert lr_factor(60, "polynomial", 10, 110, power=2) == pytest.approx(0.25)


@pytest.mark.parametrize("schedule", LR_SCHEDULES)
def test_agrees_with_ppdiffusers(schedule):
    from ppdiffusers.optimization import get_scheduler

    rules, cycles = "1:5,0.1:15,0.01", 2 if "restarts" in schedule else 0.5
    scheduler = get_scheduler(schedule, 0.1, rules, num_warmup_steps=5, num_training_steps=25, num_cycles=2)
    warmup, end = 0 if schedule in ("constant", "piecewise_constant") else 5, 1e-6 * (schedule == "polynomial")
    for update in range(25):
        expected = 0.1 * lr_factor(update, schedule, warmup, 25, end, cycles, steps=read_lr_steps(rules))
        assert scheduler.get_lr() == pytest.approx(expected, abs=1e-12), update
        scheduler.step()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 10), st.integers(0, 40)), max_size=5, unique_by=itemgetter(1)), st.floats(0, 10))
def test_steps_are_those_of_diffusers(rules, last):
    """In any order, and counted from 0: ppdiffusers' `get_piecewise_constant_schedule` is diffusers'."""
    from ppdiffusers.optimization import get_piecewise_constant_schedule

    text = ",".join([*(f"{factor!r}:{update}" for factor, update in rules), repr(last)])
    theirs = get_piecewise_constant_schedule(0.5, text)
    ours = rates_of(45, learning_rate=0.5, warmup_steps=0, lr_scheduler_type="piecewise_constant", lr_steps=text)
    for rate in ours:
        assert rate == theirs.get_lr()
        theirs.step()


@pytest.mark.parametrize("text", [None, "", "1:2", "1:2,", "2,1", "1:a,1", "1:2,3:2,1", "-1:2,1", "nan", "1:2:3,1"])
def test_steps_that_say_no_rate_are_refused(text):
    with pytest.raises(ConfigError, match=f"with --lr_steps {text}: write factors .* as 1:1000,0.1:5000,0.01"):
        read_lr_steps(text)


@pytest.mark.parametrize("scale_lr, top", [(False, 0.1), (True, 0.2)])
def test_a_cosine_ends_at_the_rate_given(scale_lr, top):
    settings = {"lr_scheduler_type": "cosine", "warmup_steps": 0, "scale_lr": scale_lr, "lr_batch_size": 4}
    waves = [(1 + math.cos(math.pi * update / 6)) / 2 for update in range(7)]
    assert rates_of(6, **settings, min_lr=0.05) == pytest.approx([0.05 + (top - 0.05) * wave for wave in waves])
    assert rates_of(6, **settings) == [top * wave for wave in waves]  # to the bit


def test_published_rate_is_scaled_from_512():
    settings = arguments(learning_rate=5e-5, scale_lr=True, lr_batch_size=512, warmup_steps=0)
    optimizer, _ = build_optimizer(dict(paddle.nn.Linear(1, 1).named_parameters()), {}, settings, 6, 6 * 10 * 8)
    assert optimizer.get_lr() == pytest.approx(4.6875e-5)


def test_unknown_schedule_is_refused():
    with pytest.raises(ValueError, match="stairs"):
        lr_factor(1, "stairs", 0, 10)


def arguments(**changes):
    return SimpleNamespace(**{
        "learning_rate": 0.1,
        "scale_lr": False, "lr_batch_size": 1,
        "lr_scheduler_type": "linear", "warmup_steps": 2, "warmup_ratio": 0.0,
        "num_cycles": 0.5, "lr_end": 1e-7, "min_lr": 0.0, "lr_steps": "1", "power": 1.0,
        "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8,
        "weight_decay": 0.5, "decay_norms_and_biases": True, "max_grad_norm": -1.0, "fused_adamw": False,
        "sharding": "",
    } | changes)  # fmt: skip


def test_one_scheduler_step_an_update():
    layer = paddle.nn.Linear(1, 1)
    optimizer, scheduler = build_optimizer(dict(layer.named_parameters()), {}, arguments(), 6, 8)
    rates = []
    for _ in range(7):
        rates.append(optimizer.get_lr())
        scheduler.step()
    assert rates == pytest.approx([0, 0.05, 0.1, 0.075, 0.05, 0.025, 0])


def rates_of(max_steps, **changes):
    """The learning rate of each update, and that after the last."""
    layer = paddle.nn.Linear(1, 1)
    optimizer, scheduler = build_optimizer(
        dict(layer.named_parameters()), {}, arguments(**changes), max_steps, global_batch_size=8
    )
    rates = []
    for _ in range(max_steps + 1):
        rates.append(optimizer.get_lr())
        scheduler.step()
    return rates


@pytest.mark.parametrize("ratio, steps, warmup", [(0.25, 0, 3), (0.2, 0, 2), (0.21, 0, 3), (1.0, 0, 10), (0.5, 2, 2)])
def test_a_share_of_warm_up_is_rounded_up_and_gives_way_to_steps(ratio, steps, warmup):
    rates = rates_of(10, lr_scheduler_type="constant", warmup_ratio=ratio, warmup_steps=steps)
    assert rates == pytest.approx([0.1 * min(1, update / warmup) for update in range(11)])


@pytest.mark.parametrize("scale_lr, top", [(False, 0.1), (True, 0.2)])
@pytest.mark.parametrize("lr_end", [0.0, 1e-3, 0.05])
def test_the_last_rate_is_the_one_given_whatever_scales_the_first(scale_lr, top, lr_end):
    settings = {"lr_scheduler_type": "polynomial", "warmup_steps": 0, "scale_lr": scale_lr, "lr_batch_size": 4}
    rates = rates_of(6, **settings, lr_end=lr_end)
    assert rates == pytest.approx([top - (top - lr_end) * update / 6 for update in range(7)])
    assert rates_of(6, **settings, lr_end=1.0) == pytest.approx([top] * 7)  # never above the first


@pytest.mark.parametrize("max_grad_norm, clipped", [(-1.0, False), (0.0, False), (1.0, True)])
def test_clipping_only_above_zero(max_grad_norm, clipped):
    layer = paddle.nn.Linear(1, 1)
    optimizer, _ = build_optimizer(dict(layer.named_parameters()), {}, arguments(max_grad_norm=max_grad_norm), 6, 8)
    assert (optimizer._grad_clip is not None) == clipped


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("limit", [1e-3, 0.5, 2.0, 1e3])
@pytest.mark.parametrize("groups", [[""], ["", "other"]])
def test_gradients_are_as_long_as_they_are_or_as_they_may_be(asked, limit, groups):
    """Each group by its own norm, whether or not somebody has asked for the norms before."""
    parameters, clip = [paddle.create_parameter([size], "float32") for size in (3, 5000, 1, 7)], ClipByGroup(limit)
    for number, parameter in enumerate(parameters):
        parameter.optimize_attr["clip_group"] = groups[number % len(groups)]
        (parameter * paddle.randn(parameter.shape) * 0.02).sum().backward()
    before = [parameter.grad.numpy().astype(np.float64) for parameter in parameters]
    if asked:
        clip.squares = squared_norms(parameters)
    clip([(parameter, parameter.grad) for parameter in parameters])
    for first in range(len(groups)):
        members = range(first, len(parameters), len(groups))
        norm = np.sqrt(sum((before[member] ** 2).sum() for member in members))
        for member in members:
            expected = before[member] * min(1.0, limit / norm)
            np.testing.assert_allclose(parameters[member].grad.numpy(), expected, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("max_grad_norm", [-1.0, 1.0])
def test_own_rates_under_one_schedule(max_grad_norm):
    """AdamW's first step is its learning rate in the gradient's direction."""
    layers = {name: paddle.nn.Linear(1, 1, bias_attr=False) for name in ("unet", "text_encoder", "other")}
    parameters = {f"{name}.weight": layer.weight for name, layer in layers.items()}
    settings = arguments(weight_decay=0.0, scale_lr=True, lr_batch_size=4, max_grad_norm=max_grad_norm)
    config = SimpleNamespace(unet_learning_rate=0.02, text_encoder_learning_rate=0.3)
    groups = {"unet": "unet", "text_encoder": "text_encoder", "other": None}
    components = {name: Component(layers[name], True, group) for name, group in groups.items()}
    ratios, by_group = learning_rate_ratios(SimpleNamespace(components=components), config, settings.learning_rate)
    assert by_group == ratios
    optimizer, _ = build_optimizer(parameters, ratios, settings, 6, 8)
    assert optimizer.get_lr() == 0.0  # the warm-up's first
    optimizer._learning_rate.step()
    before = {name: float(layer.weight) for name, layer in layers.items()}
    sum(layer(paddle.ones([1, 1])) for layer in layers.values()).backward()
    optimizer.step()
    changes = {name: before[name] - float(layer.weight) for name, layer in layers.items()}
    half_way, scale = 0.5, 8 / 4
    assert changes == pytest.approx(
        {name: half_way * scale * rate for name, rate in (("unet", 0.02), ("text_encoder", 0.3), ("other", 0.1))},
        rel=1e-4,
    )


def test_weight_decay_leaves_out_norms_and_biases_by_flag():
    model = paddle.nn.Sequential(paddle.nn.Linear(2, 2), paddle.nn.GroupNorm(1, 2))
    for parameter in model.parameters():
        parameter.set_value(paddle.ones_like(parameter))
    settings = arguments(warmup_steps=0, decay_norms_and_biases=False)
    optimizer, _ = build_optimizer(dict(model.named_parameters()), {}, settings, 100, 8)
    (model(paddle.ones([1, 2])) * 0).sum().backward()
    optimizer.step()
    decayed = {name for name, p in model.named_parameters() if float(p.max()) < 1}
    assert decayed == {"0.weight"}


def test_weight_decay_reaches_biases_too():
    layer = paddle.nn.Linear(1, 1)
    layer.bias.set_value(paddle.ones([1]))
    optimizer, _ = build_optimizer(dict(layer.named_parameters()), {}, arguments(warmup_steps=0), 100, 8)
    (layer(paddle.ones([1, 1])) * 0).sum().backward()
    optimizer.step()
    assert float(layer.bias) == pytest.approx(1 - 0.1 * 0.5)


def test_a_component_that_is_clipped_alone_learns_as_with_an_optimizer_of_its_own():
    def two():
        paddle.seed(1)
        return {"one": paddle.nn.Linear(3, 2), "other": paddle.nn.Linear(3, 2)}

    def learn(layers, **alone):
        parameters = {f"{name}.{key}": p for name, layer in layers.items() for key, p in layer.named_parameters()}
        settings = arguments(warmup_steps=0, max_grad_norm=0.1)
        optimizer, _ = build_optimizer(parameters, {}, settings, 6, 8, **alone)
        for scale in (1.0, 50.0, 0.1):
            sum((layer(paddle.ones([1, 3])) * scale).sum() * (1 + number) for number, layer in
                enumerate(layers.values())).backward()  # fmt: skip
            optimizer.step()
            optimizer.clear_grad()
        return [p.numpy() for p in parameters.values()]

    together, layers = learn(two(), clipped_alone=["other"]), two()
    apart = learn({"one": layers["one"]})
    for parameter in layers["other"].parameters():
        parameter.stop_gradient = False
    assert all((mine == theirs).all() for mine, theirs in zip(together, apart, strict=False))
    assert any((mine != theirs).any() for mine, theirs in zip(together, learn(two()), strict=True))


def test_a_component_that_begins_later_learns_alike_by_the_fused_update(monkeypatch):
    """A GPU's kernel takes the powers of the betas of its first parameter for all of a launch; a CPU's does not."""
    update_group = FusedAdamW._update

    def watched(optimizer, rate, columns, *kind):
        assert all(len({float(power) for power in powers}) == 1 for powers in columns[4:6])
        update_group(optimizer, rate, columns, *kind)

    monkeypatch.setattr(FusedAdamW, "_update", watched)

    def learn(fused):
        paddle.seed(1)
        layers = {"one": paddle.nn.Linear(3, 2), "other": paddle.nn.Linear(3, 2)}
        parameters = {f"{name}.{key}": p for name, layer in layers.items() for key, p in layer.named_parameters()}
        settings = arguments(warmup_steps=0, max_grad_norm=0.1, fused_adamw=fused)
        optimizer, _ = build_optimizer(
            parameters, {}, settings, 6, 8, ["other"], FusedAdamW if fused else paddle.optimizer.AdamW
        )
        for update in range(4):
            begun = layers if update >= 2 else ["one"]
            sum((layers[name](paddle.ones([1, 3])) ** 2).sum() for name in begun).backward()
            optimizer.step()
            optimizer.clear_grad()
        return [p.numpy() for p in parameters.values()]

    for mine, theirs in zip(learn(True), learn(False), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("schedule", LR_SCHEDULES)
@pytest.mark.parametrize("warmup, steps", [(50, 20), (50, 50), (1, 1), (50, 51), (0, 20)])
@pytest.mark.parametrize("lr_end", [0.0, 0.1, 0.2, 1.0])
@pytest.mark.parametrize("scale_lr", [False, True])
def test_what_a_run_does_not_get_of_its_schedule_is_said(schedule, warmup, steps, lr_end, scale_lr, capsys):
    settings = {"scale_lr": scale_lr, "lr_batch_size": 4, "warmup_steps": warmup, "lr_end": lr_end, "min_lr": lr_end}
    rates, top = rates_of(steps, lr_scheduler_type=schedule, **settings), 0.2 if scale_lr else 0.1
    said = capsys.readouterr().err
    assert (max(rates[:steps]) < top * (1 - 1e-9)) == (f"the warm-up of {warmup} updates" in said)
    flag = {"polynomial": "--lr_end", "cosine": "--min_lr"}.get(schedule)
    assert (flag is not None and lr_end > top) == (f"{flag} {lr_end:g} is above the learning rate" in said)

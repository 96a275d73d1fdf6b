"""AdamW in 8 bits is its formula, by numpy; small parameters are AdamW's, to the bit; a training follows AdamW's."""

import numpy as np
import paddle
import pytest
from command_line import parse_arguments

from ppldm.methods.adamw8bit import BLOCK, SMALLEST, adamw8bit, dequantized, dynamic_map, find_large, quantized
from ppldm.training.metrics import read_metrics
from ppldm.training.optimizer import CpuAdamW, FusedAdamW, parameter_of
from ppldm.training.prepare import prepare
from ppldm.training.train import run_loop
from ppldm.training.trainer import run_trainer
from ppldm.utils.errors import CheckpointError

KINDS = [paddle.optimizer.AdamW, FusedAdamW, CpuAdamW]
RATE, DECAY, BETAS, EPSILON = 1e-2, 0.1, (0.9, 0.999), 1e-8
SHAPES = {"even": [64, 64], "odd": [3, 1501], "deep": [8, 8, 9, 9], "small": [63, 65], "bias": [64]}
LARGE = {"even", "odd", "deep"}
ERRORS = {True: 0.00704, False: 0.00352}  # of the largest in a block: half of the widest step of the map
CURVES = 0.01  # by which losses of a training may differ from AdamW's


def normals(seed: int, shape) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def gradient(update: int, number: int, shape) -> np.ndarray:
    """Numbers of several magnitudes."""
    return normals(1000 * update + number, shape) * 10.0 ** normals(7 * number, shape)


def make() -> dict:
    with paddle.utils.unique_name.guard():
        found = {f"unet.{name}": paddle.create_parameter(shape, "float32") for name, shape in SHAPES.items()}
    for number, parameter in enumerate(found.values()):
        parameter.set_value(normals(number, parameter.shape))
    return found


def updated(kind, parameters: dict, num_updates: int = 3, state=None, begin: int = 0):
    optimizer = kind(
        RATE, *BETAS, EPSILON, parameters=[*parameters.values()], weight_decay=DECAY,
        apply_decay_param_fun=lambda name: name != parameters["unet.odd"].name,
    )  # fmt: skip
    if state:
        optimizer.set_state_dict(state)
    for update in range(begin, num_updates):
        for number, parameter in enumerate(parameters.values()):
            parameter.clear_gradient(False)
            (parameter * paddle.to_tensor(gradient(update + 1, number, parameter.shape))).sum().backward()
        optimizer.step()
    return optimizer


def nearest(moment: np.ndarray, signed: bool) -> np.ndarray:
    """What is left of a moment, by the distance to each value of the map."""
    values, left = dynamic_map(signed).astype(np.float64), np.empty(moment.size)
    for start in range(0, moment.size, BLOCK):
        block = moment.ravel()[start : start + BLOCK]
        largest = np.abs(block).max()
        left[start : start + BLOCK] = values[np.abs(values - block[:, None] / largest).argmin(1)] * largest
    return left.reshape(moment.shape)


@pytest.mark.parametrize("signed", [True, False])
def test_the_map_is_the_published_one(signed):
    """Known values: of create_dynamic_map in bitsandbytes 0.45.5, by its formula."""
    found = dynamic_map(signed)
    assert found.dtype == np.float32 and len(found) == 256 and (np.diff(found) > 0).all()
    if signed:
        assert (found[:-1] == -found[::-1][1:]).all()  # 1 alone has no opposite
        known = {0: -0.992968738079071, 126: -5.5e-07, 127: 0.0, 128: 5.5e-07, 129: 3.25e-06, 254: 0.992968738079071}
    else:
        known = {0: 0.0, 1: 3.25e-07, 2: 7.75e-07, 3: 2.125e-06, 254: 0.996484375}
    assert {number: float(found[number]) for number in known} == pytest.approx(known, rel=1e-6)
    assert found[255] == 1 and np.diff(found).max() / 2 <= ERRORS[signed] < 1.02 * np.diff(found).max() / 2


@pytest.mark.parametrize("signed", [True, False])
def test_what_is_kept_is_the_nearest_value_of_the_map(signed):
    moment = np.stack([gradient(1, row, [BLOCK]) * 10.0 ** (row - 4) for row in range(8)] + [np.zeros(BLOCK)])
    moment = (moment if signed else moment**2).astype(np.float32)
    codes, largest = quantized(paddle.to_tensor(moment), signed)
    assert codes.dtype == paddle.uint8 and (largest.numpy() == np.abs(moment).max(1, keepdims=True)).all()
    found = dequantized(codes, largest, signed).numpy()
    assert (np.abs(found - moment) <= ERRORS[signed] * np.abs(moment).max(1, keepdims=True)).all()
    np.testing.assert_allclose(found[:-1], nearest(moment[:-1].astype(np.float64), signed), rtol=1e-6)
    assert not found[-1].any()
    positive = (moment[:-1] == np.abs(moment[:-1]).max(1, keepdims=True)) & (moment[:-1] > 0)
    assert (found[:-1][positive] == moment[:-1][positive]).all()
    again, _ = quantized(paddle.to_tensor(found), signed)
    assert (dequantized(again, largest, signed).numpy() == found)[np.abs(found).max(1) == largest.numpy()[:, 0]].all()


@pytest.mark.parametrize("kind", KINDS)
def test_large_parameters_learn_by_the_formula_and_small_ones_by_adamw_to_the_bit(kind):
    before, found, plain = make(), make(), make()
    updated(adamw8bit(kind, found), found)
    updated(kind, plain)
    assert find_large(found) == {found[f"unet.{name}"].name for name in LARGE}
    for number, (name, parameter) in enumerate(found.items()):
        if (name := name.removeprefix("unet.")) not in LARGE:
            assert parameter.size < SMALLEST and (parameter.numpy() == plain[f"unet.{name}"].numpy()).all(), name
            continue
        weight, first, second = before[f"unet.{name}"].numpy().astype(np.float64), 0.0, 0.0
        for update in (1, 2, 3):
            one = gradient(update, number, parameter.shape).astype(np.float64)
            first, second = BETAS[0] * first + (1 - BETAS[0]) * one, BETAS[1] * second + (1 - BETAS[1]) * one**2
            corrected = np.sqrt(second / (1 - BETAS[1] ** update)) + EPSILON
            weight = weight * (1 - RATE * DECAY * (name != "odd"))
            weight -= RATE * first / (1 - BETAS[0] ** update) / corrected
            first, second = nearest(first, True), nearest(second, False)
        # Float32 rounds a few numbers that lie between two values of the map to the other one.
        errors, moved = np.abs(parameter.numpy() - weight), np.abs(weight - before[f"unet.{name}"].numpy())
        assert (errors > 1e-4 * moved + 2e-6).mean() < 1e-3, name


def test_the_first_update_is_adamw_s():
    found, plain = make(), make()
    updated(adamw8bit(paddle.optimizer.AdamW, found), found, 1)
    updated(paddle.optimizer.AdamW, plain, 1)
    for name in found:
        np.testing.assert_allclose(found[name].numpy(), plain[name].numpy(), atol=1e-6)


def test_a_parameter_without_a_gradient_moves_by_its_decay_alone():
    parameter = paddle.create_parameter([SMALLEST], "float32")
    before = parameter.numpy()
    optimizer = adamw8bit(paddle.optimizer.AdamW, {"unet.one": parameter})(
        RATE, parameters=[parameter], weight_decay=DECAY
    )
    with paddle.no_grad():
        for _ in range(3):
            optimizer._create_optimization_pass([(parameter, paddle.zeros([SMALLEST]))])
    np.testing.assert_allclose(parameter.numpy(), before * (1 - RATE * DECAY) ** 3, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_takes_a_quarter_and_goes_on_to_the_bit(kind):
    straight, halves = make(), make()
    kinds = [adamw8bit(kind, parameters) for parameters in (straight, halves)]
    with paddle.utils.unique_name.guard():
        state = updated(kinds[0], straight, 4).state_dict()
    with paddle.utils.unique_name.guard():
        first = updated(kinds[1], halves, 2).state_dict()
    with paddle.utils.unique_name.guard():
        second = updated(kinds[1], halves, 4, first, begin=2).state_dict()
    assert state.keys() == second.keys() and all((state[key].numpy() == second[key].numpy()).all() for key in state)
    assert all((straight[name].numpy() == halves[name].numpy()).all() for name in straight)
    for name, parameter in straight.items():
        held = [value for key, value in state.items() if parameter_of(key) == parameter.name]
        num_bytes = sum(value.size * value.element_size() for value in held)
        blocks = -(-parameter.size // BLOCK)
        large = name.removeprefix("unet.") in LARGE
        assert num_bytes == 8 + (2 * blocks * (BLOCK + 4) if large else 8 * parameter.size), name
        assert not large or num_bytes < 0.27 * 8 * parameter.size


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_float32_master_learns_as_a_float32_weight_and_is_rounded(dtype):
    weights, masters = [], []
    for half in (True, False):
        layer = paddle.nn.Linear(80, 60, bias_attr=False)
        layer.weight.set_value(paddle.to_tensor(normals(1, [80, 60])).astype(dtype).astype("float32"))
        layer.to(dtype=dtype if half else "float32")
        kind = adamw8bit(paddle.optimizer.AdamW, {"unet.body.weight": layer.weight})
        optimizer = kind(RATE, parameters=[layer.weight], weight_decay=DECAY, multi_precision=True)
        with paddle.no_grad():  # as `step`
            for seed in (2, 3):
                optimizer._create_optimization_pass([(layer.weight, paddle.to_tensor(normals(seed, [80, 60])))])
        weights.append(layer.weight)
        masters.append(optimizer.state_dict().get("master_weights", {}))
    (master,) = masters[0].values()
    assert (master.numpy() == weights[1].numpy()).all() and weights[0].dtype == getattr(paddle, dtype)
    assert (weights[0].astype("float32").numpy() == master.astype(dtype).astype("float32").numpy()).all()


@pytest.fixture(scope="module")
def curves(tiny, tmp_path_factory):
    """The losses of twelve updates by AdamW, and in 8 bits by both loops."""
    found = {}
    for name, loop, words in (
        ("adamw", True, []), ("hand", True, ["--use_8bit_adam"]), ("trainer", False, ["--optimizer", "adamw8bit"])
    ):  # fmt: skip
        folder = tmp_path_factory.mktemp(name) / "run"
        flags = [*tiny.flags(folder, max_steps=12, save_steps=6, max_grad_norm=1.0), "--do_train", *words]
        run = prepare(*parse_arguments(flags, loop))
        (run_loop if loop else run_trainer)(run)
        found[name] = folder, [record["loss"] for record in read_metrics(folder / "metrics.jsonl")]
    return found


@pytest.mark.slow
def test_a_training_follows_adamw_s_curve_by_either_loop(curves):
    plain = curves["adamw"][1]
    for name in ("hand", "trainer"):
        assert curves[name][1] != plain
        np.testing.assert_allclose(curves[name][1], plain, rtol=CURVES)
    np.testing.assert_allclose(curves["hand"][1], curves["trainer"][1], rtol=1e-5)


@pytest.mark.turn("a method's run goes on, by either loop", 1)
@pytest.mark.slow
@pytest.mark.parametrize("then, loop", [("hand", True), ("trainer", False)])
def test_a_training_goes_on_to_the_bit(curves, tiny, tmp_path, then, loop):
    flags = tiny.flags(
        tmp_path / "run", max_steps=12, save_steps=6, max_grad_norm=1.0, optimizer="adamw8bit",
        resume_from_checkpoint=curves["hand"][0] / "checkpoint-6",
    )  # fmt: skip
    run = prepare(*parse_arguments([*flags, "--do_train"], loop))
    (run_loop if loop else run_trainer)(run)
    losses = [record["loss"] for record in read_metrics(tmp_path / "run/metrics.jsonl")]
    np.testing.assert_allclose(losses, curves[then][1][6:], rtol=0 if loop else 1e-5)


@pytest.mark.parametrize("first, then", [("adamw", "adamw8bit"), ("adamw8bit", "adamw"), ("muon", "adamw8bit")])
def test_no_optimizer_goes_on_from_the_other_s_state(tiny, tmp_path, first, then):
    def prepared(**changes):
        return prepare(*parse_arguments(tiny.flags(tmp_path, max_steps=1, save_steps=1, **changes), loop=True))

    run_loop(prepared(optimizer=first))
    told = f"with optimizer {first}, this run has {then}; that cannot be accepted: .* has no optimizer state for"
    with pytest.raises(CheckpointError, match=told):
        prepared(optimizer=then)

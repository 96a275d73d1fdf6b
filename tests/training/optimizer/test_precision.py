"""Mixed precision, as far as a CPU can show it: Paddle computes in half precision on GPUs alone.

With `pretend_gpu` Paddle believes in one where it decides about autocast, casts and loss scaling; the kernels stay
those of the CPU, which take float32.
"""

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from tiny_model import make_batch, make_model

from ppldm.networks.model import Loss, Model
from ppldm.training import optimizer as precision
from ppldm.training.checkpoint import (
    TrainerState,
    TrainingState,
    contents_of,
    save_checkpoint,
)
from ppldm.training.compiled import compile_predict
from ppldm.training.resume import load_model, load_optimizer
from ppldm.training.train import UpdateGuard, train_step
from ppldm.utils.errors import TrainingError
from ppldm.utils.processes.ranks import World


@pytest.fixture
def pretend_gpu(monkeypatch):
    place = SimpleNamespace(is_gpu_place=lambda: True, is_xpu_place=lambda: False, is_custom_place=lambda: False)
    tracer = paddle.framework._dygraph_tracer

    class Tracer:
        def __getattr__(self, name):
            return place if name == "_expected_place" else getattr(tracer(), name)

        def __setattr__(self, name, value):
            setattr(tracer(), name, value)

    for module in ("paddle.amp.auto_cast", "paddle.amp.grad_scaler"):
        monkeypatch.setattr(sys.modules[module], "_dygraph_tracer", Tracer)
    for name in ("_is_gpu_bfloat16_supported", "_is_gpu_float16_supported"):
        monkeypatch.setattr(sys.modules["paddle.amp.auto_cast"], name, lambda: True)
    monkeypatch.setattr(precision, "is_mixed", lambda arguments: arguments.fp16 or arguments.bf16)
    state = sys.modules["paddle.amp.auto_cast"].amp_global_state()
    state.amp_dtype = "float16"  # as autocast leaves it; loss scaling looks at it
    yield
    state.use_master_grad, state.model_parameters = False, []


def arguments(dtype="bfloat16", level="O1"):
    return SimpleNamespace(fp16=dtype == "float16", bf16=dtype == "bfloat16", fp16_opt_level=level, scale_loss=1024.0,
                           amp_custom_white_list=None, amp_custom_black_list=None)  # fmt: skip


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_vae_runs_outside_autocast_and_the_unet_within(tiny, pretend_gpu, dtype):
    model, batch = make_model(tiny), make_batch(2)
    expected = model.latents(batch["posterior_noise"], batch["pixel_values"]).numpy()
    seen = {}
    for name in ("vae.encoder", "unet", "text_encoder.model"):
        layer = dict(model.named_sublayers())[name]
        layer.register_forward_pre_hook(lambda *_, name=name: seen.update({name: paddle.is_autocast_enabled()}))
    with precision.autocast(arguments(dtype))():
        latents = model.latents(batch["posterior_noise"], batch["pixel_values"])
        model(**batch)
    assert seen == {"vae.encoder": False, "unet": True, "text_encoder.model": True}
    assert latents.dtype == paddle.float32 and (latents.numpy() == expected).all()


def test_a_compiled_unet_is_within_autocast_too(tiny, pretend_gpu):
    model, batch = make_model(tiny), make_batch(2)
    model.train()
    with precision.autocast(arguments("bfloat16"))():
        traced = compile_predict(model).get_concrete_program(batch["noise"], batch["timesteps"], batch["input_ids"])[0]
    computed_in = {name: set() for name in ("conv2d", "matmul", "group_norm", "softmax")}
    for operation in traced.main_program.global_block().ops:
        if (name := operation.name().removeprefix("pd_op.")) in computed_in:
            computed_in[name].add(operation.results()[0].dtype)
    half, full = {paddle.bfloat16}, {paddle.float32}
    assert computed_in == {"conv2d": half, "matmul": half, "group_norm": full, "softmax": full}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_o2_casts_what_is_trained_and_keeps_vae_and_tables(tiny, pretend_gpu, dtype):
    model = make_model(tiny)
    optimizer = paddle.optimizer.AdamW(parameters=list(model.trained_parameters().values()))
    precision.decorate(model, optimizer, arguments(dtype, "O1"))
    assert {p.dtype for p in model.parameters()} == {paddle.float32}
    precision.decorate(model, optimizer, arguments(dtype, "O2"))
    half = getattr(paddle, dtype)
    assert {p.dtype for p in model.vae.parameters()} == {paddle.float32}
    assert model.levels.dtype == paddle.float32
    assert model.unet.conv_in.weight.dtype == half and model.text_encoder.model.embed_tokens.weight.dtype == half
    assert optimizer._multi_precision


def test_the_export_has_the_float32_masters(tiny, pretend_gpu):
    model = make_model(tiny)
    trained = model.trained_parameters()
    optimizer = paddle.optimizer.AdamW(parameters=list(trained.values()))
    precision.decorate(model, optimizer, arguments("bfloat16", "O2"))
    weight = trained["unet.conv_in.weight"]
    for parameter in trained.values():
        optimizer._create_master_weight(parameter)
    master = optimizer._master_weights[weight.name]
    master.set_value(master + 1e-5)
    assert optimizer.state_dict()["master_weights"][weight.name] is master
    precision.restore_float32(model, optimizer)
    assert {p.dtype for p in model.parameters()} == {paddle.float32}
    weight = model.trained_parameters()["unet.conv_in.weight"]
    assert (weight.numpy() == master.numpy()).all() and (weight.astype("bfloat16").astype("float32") != weight).any()


def half_state(tiny) -> TrainingState:
    """A model in O2 and its scaler."""
    model = make_model(tiny)
    scheduler = paddle.optimizer.lr.LambdaDecay(0.1, lambda step: 1.0)
    optimizer = paddle.optimizer.AdamW(scheduler, parameters=list(model.trained_parameters().values()))
    precision.decorate(model, optimizer, arguments("float16", "O2"))
    return TrainingState(model, optimizer, scheduler, None, precision.make_scaler(arguments("float16")))


def make_masters_and_moments(state: TrainingState) -> dict:
    """(master or weight, first moment) by parameter: what the first update of a process makes, or finds loaded."""
    optimizer, made = state.optimizer, {}
    with paddle.utils.unique_name.guard():
        for name, parameter in state.model.trained_parameters().items():
            half = parameter.dtype == paddle.float16
            value = optimizer._create_master_weight(parameter) if half else parameter
            optimizer._add_moments_pows(value)
            made[name] = value, optimizer._get_accumulator("moment1", value)
    return made


def test_a_checkpoint_holds_half_weights_masters_moments_and_scaler(tiny, pretend_gpu, tmp_path):
    saved, resumed = half_state(tiny), half_state(tiny)
    made = make_masters_and_moments(saved)
    for value, moment in made.values():
        value.set_value(value + 1e-5)
        moment.set_value(value * 3)
    saved.scaler.load_state_dict({**saved.scaler.state_dict(), "scale": np.array([64.0], np.float32), "incr_count": 7})
    folder = save_checkpoint(tmp_path, contents_of(saved), TrainerState(global_step=3), {}, None)
    load_model(folder, resumed)
    load_optimizer(folder, resumed)
    for name, pair in make_masters_and_moments(resumed).items():
        for now, then in zip(pair, made[name], strict=True):
            assert now.dtype == paddle.float32 and (now.numpy() == then.numpy()).all(), name
    weights, others = (state.model.trained_parameters() for state in (saved, resumed))
    assert all((weights[name].numpy() == others[name].numpy()).all() for name in weights)
    assert saved.scaler.state_dict() == resumed.scaler.state_dict()


class Linear(Model):
    inputs = {"x": None}
    components = {}

    def __init__(self):
        super().__init__()
        self.w = self.create_parameter([2], default_initializer=paddle.nn.initializer.Constant(0.5))

    def forward(self, x):
        return Loss((self.w * x).sum())


def run(scaler, batches, max_skipped=1):
    model = Linear()
    scheduler = paddle.optimizer.lr.LambdaDecay(0.1, lambda step: 1.0)
    optimizer = paddle.optimizer.AdamW(scheduler, parameters=model.parameters())
    guard = UpdateGuard(TrainingState(model, optimizer, scheduler, None, scaler), World(), max_skipped, nullcontext)
    history = []
    for x in batches:
        batch = {"x": paddle.to_tensor(x), "row_ids": paddle.to_tensor([1])}
        history.append((train_step(guard, [batch, batch]), model.w.tolist()))
    return history, scheduler.last_epoch


def test_a_run_that_goes_on_in_float16_begins_with_the_scale_of_the_flag(pretend_gpu, tmp_path):
    model, scheduler = Linear(), paddle.optimizer.lr.LambdaDecay(0.1, lambda step: 1.0)
    parts = model, paddle.optimizer.AdamW(scheduler, parameters=model.parameters()), scheduler
    folder = save_checkpoint(tmp_path, contents_of(TrainingState(*parts)), TrainerState(global_step=3), {}, None)
    scaler = precision.make_scaler(arguments("float16"))
    load_optimizer(folder, TrainingState(*parts, None, scaler))
    assert scaler.state_dict()["scale"].item() == 1024


def test_loss_scaling_changes_no_bit(pretend_gpu):
    batches = [[1.0, 2.0], [3.0, -4.0], [0.1, 0.2]]
    plain, scaled = run(None, batches)[0], run(precision.make_scaler(arguments("float16")), batches)[0]
    assert plain == scaled


def test_an_overflow_lowers_the_scale_and_does_not_count(pretend_gpu):
    scaler = precision.make_scaler(arguments("float16"))
    big = 3e36  # times 1024 / 2 it overflows float32
    history, epochs = run(scaler, [[1.0, 1.0], [big, 0.0], [1.0, 1.0]])
    assert [update.applied for update, _ in history] == [True, False, True] and epochs == 3
    assert history[1][1] == history[0][1] != history[2][1]
    assert scaler.state_dict()["scale"] == 512


def test_an_overflow_that_no_scale_helps_counts(pretend_gpu):
    settings = arguments("float16")
    settings.scale_loss = 2.0
    scaler = precision.make_scaler(settings)
    endless = [[2e38, 0.0]] * 3  # the gradient's norm overflows at any scale
    with pytest.raises(TrainingError, match="2 such updates in a row"):
        run(scaler, endless, max_skipped=2)


def test_a_cpu_says_that_it_has_no_half_precision(monkeypatch):
    said = []
    monkeypatch.setattr(precision.get_logger(), "warning", lambda text: said.append(text))
    precision.warn_of_cpu(arguments("bfloat16"))
    precision.warn_of_cpu(arguments("float32"))
    assert len(said) == 1 and "Paddle has no mixed precision on a CPU" in said[0]
    assert precision.autocast(arguments("bfloat16")) is nullcontext
    assert precision.make_scaler(arguments("float16")) is None
    assert precision.precision_name(arguments("bfloat16", "O2")) == "float32"

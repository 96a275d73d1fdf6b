"""A student that draws in few steps: its loss, its laws, and how it is drawn."""

import json
import shutil

import numpy as np
import paddle
import pytest
from command_line import parse_arguments
from tiny_model import load_pipeline, make_batch, make_lively_model, write_base

from ppldm.diffusion.drawing import Drawing
from ppldm.diffusion.process import NoiseSchedule, Process
from ppldm.diffusion.samplers import make_sampler
from ppldm.families.base import get_family
from ppldm.methods.base import attach_methods
from ppldm.methods.consistency import Consistency
from ppldm.networks.cpu_operators.layers import operators_are_usable
from ppldm.training.prepare import prepare
from ppldm.utils.errors import CheckpointError, ConfigError
from ppldm.weights.model_file import read_model_file
from tests.families.test_laws import assert_close_run, assert_same_run, curve, in_two_processes, train
from tests.methods.test_methods import step_of

# A loss of two networks that hardly differ is small, and AdamW makes steps of its rounding: that of Paddle's operators.
ROUNDING = 1e-5 if operators_are_usable() else 5e-5
KINDS = ("epsilon", "v_prediction", "sample", "flow")


class Words:
    """Stands for a tokenizer."""

    vocab_size = 100

    def encode(self, texts):
        return np.array([[len(text) % 7 + place for place in range(12)] for text in texts])


def student_of(tiny, kind="epsilon", **options):
    """A model with another student, teacher and target, and its method."""
    model, method = make_lively_model(tiny, Words(), kind), Consistency(**options)
    model.tokenizer = Words()
    attach_methods(model, (method,), seed=3)
    rng = np.random.default_rng(4)
    with paddle.no_grad():
        for network in (model.unet, getattr(model, "consistency_target", None)):
            for one in network.parameters() if network else ():
                one.add_(paddle.to_tensor(rng.standard_normal(one.shape, dtype=np.float32) * 0.02))
    model.train()
    return model, method


def asked(model, seed=0):
    """A step, with what the student predicts in it."""
    step = step_of(model, seed)
    ids = np.random.default_rng(seed).integers(0, 100, (4, 12))
    step = step._replace(told={"input_ids": paddle.to_tensor(ids)})
    noisy = step.scales[0] * step.latents + step.scales[1] * step.noise
    return step._replace(predicted=answer(model, model.unet, noisy.numpy(), step.timesteps.numpy(), ids, True))


def answer(model, network, noisy, timesteps, ids, as_tensor=False):
    level = model.levels[paddle.to_tensor(timesteps)]
    times = model.process.times(paddle.to_tensor(timesteps), level)
    found = network(paddle.to_tensor(noisy), times, **model.condition(paddle.to_tensor(ids))).sample
    return found if as_tensor else found.numpy().astype(np.float64)


def function(process, predicted, noisy, a, s, timesteps):
    """f of the docstring."""
    clean = {
        "epsilon": lambda: (noisy - s * predicted) / a,
        "v_prediction": lambda: a * noisy - s * predicted,
        "sample": lambda: predicted,
        "flow": lambda: noisy - s * predicted,
    }[process.prediction_type]()
    u = 10.0 * timesteps.reshape(-1, 1, 1, 1)
    return noisy / (4 * u**2 + 1) + u / (u**2 + 0.25) ** 0.5 * clean, clean


def in_numpy(model, step, w, skip, huber):
    """The term, with networks that are asked one by one."""
    process, t = model.process, step.timesteps.numpy()
    below = np.maximum(t - skip, 0)
    levels = process.levels().astype(np.float64)
    (a, s), (a_below, s_below) = (process.scales(levels[one].reshape(-1, 1, 1, 1)) for one in (t, below))
    noisy = a * step.latents.numpy() + s * step.noise.numpy()
    ids, empty = step.told["input_ids"].numpy(), np.repeat(Words().encode([""]), 4, 0)
    teacher = model.method_parts["unet_teacher"].layer
    said, unsaid = (answer(model, teacher, noisy.astype(np.float32), t, one) for one in (ids, empty))
    _, clean = function(process, unsaid + w * (said - unsaid), noisy, a, s, t)
    onward = a_below * clean + s_below * (noisy - a * clean) / s
    target = getattr(model, "consistency_target", model.unet)
    aim, _ = function(
        process, answer(model, target, onward.astype(np.float32), below, ids), onward, a_below, s_below, below
    )
    made, _ = function(process, step.predicted.numpy().astype(np.float64), noisy, a, s, t)
    square = (made - aim) ** 2
    return (np.sqrt(square + huber**2) - huber if huber else square).mean()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [
        {"guidance": 3.0},
        {"skip": 1, "huber": 0.0},
        {"guidance": 1.0, "decay": 0.0, "skip": 250, "huber": 0.1},
        {"guidance": 4.0, "spread": 2.0},
    ],
    ids=str,
)
def test_the_term_is_that_of_the_docstring(tiny, kind, options):
    model, method = student_of(tiny, kind, **options)
    step = asked(model)
    drawn = np.random.default_rng(1).random(4, dtype=np.float32)
    model.taps["guidance"] = paddle.to_tensor(drawn)
    w = options.get("guidance", 7.5) + options.get("spread", 0) * (2 * drawn.reshape(-1, 1, 1, 1) - 1.0)
    expected = in_numpy(model, step, w, method.skip, method.huber)
    assert expected > 1e-3
    assert float(method.term(model, step)) == pytest.approx(expected, rel=2e-3)


def test_the_term_is_the_whole_loss_of_the_training(tiny, monkeypatch):
    model, method = student_of(tiny)
    batch, terms = make_batch(2), []
    whole = Consistency.term
    monkeypatch.setattr(Consistency, "term", lambda *given: terms.append(whole(*given)) or terms[-1])
    assert float(model.loss(batch).value) == float(terms[0])
    model.eval()
    loss = model.loss(batch)
    assert float(loss.value) == pytest.approx(float(loss.per_sample.mean()), rel=1e-5) and len(terms) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_over_the_whole_way_aims_at_the_teachers_picture(tiny, kind):
    """Where s is 0, f' is its argument, whatever the target's network: what is learned is the teacher's one step."""
    model, method = student_of(tiny, kind, skip=1000, huber=0.0, guidance=1.0)
    step = asked(model)
    first = float(method.term(model, step))
    for one in model.consistency_target.parameters():
        one.set_value(one * 1.5)
    assert float(method.term(model, step)) == first
    a, s = (one.numpy().astype(np.float64) for one in step.scales)
    noisy = a * step.latents.numpy() + s * step.noise.numpy()
    ids, t = step.told["input_ids"].numpy(), step.timesteps.numpy()
    network = model.method_parts["unet_teacher"].layer
    of_teacher = answer(model, network, noisy.astype(np.float32), t, ids, True)
    made, clean = function(model.process, of_teacher.numpy().astype(np.float64), noisy, a, s, t)
    a_0, s_0 = model.process.scales(float(model.levels[0]))
    left = made - (a_0 * clean + s_0 * (noisy - a * clean) / s)  # the noise of the first level
    same = float(method.term(model, step._replace(predicted=of_teacher)))
    assert same == pytest.approx((left**2).mean(), rel=0.02, abs=1e-9) and same < first


@pytest.mark.parametrize("kind", KINDS)
def test_the_end_of_the_way_has_a_loss_that_falls_with_the_step(kind):
    """Of data N(0, d^2) the teacher is linear and the end of its way known: x_t (a_0^2 d^2 + s_0^2)^(1/2) / (a_t^2 d^2
    + s_t^2)^(1/2). A student that predicts it has no loss but the error of one step, of second order."""
    process, d = Process(NoiseSchedule(), kind), 0.6
    levels = process.levels().astype(np.float64)
    method_errors = []

    class Model:
        """Of one number; it answers what it is asked by."""

        taps = {"teacher": ("teacher", 1.0)}
        denoiser, consistency_target = None, type("Target", (), {"eval": staticmethod(lambda: None)})
        levels = paddle.to_tensor(process.levels())

        def __init__(self):
            self.process = process

        def denoise(self, noisy, times, by, **told):
            index = times.numpy() / 1000 if kind == "flow" else times.numpy()
            at = np.abs(levels - index[:, None]).argmin(1) if kind == "flow" else index.astype(int)
            a, s = (one.reshape(-1, 1, 1, 1) for one in process.scales(levels[at]))
            spread = a**2 * d**2 + s**2
            x = noisy.numpy().astype(np.float64)
            clean = a * d**2 / spread * x
            if by is not self.teacher:
                a0, s0 = process.scales(levels[0])
                clean = ((a0**2 * d**2 + s0**2) / spread) ** 0.5 * x
            return paddle.to_tensor(process.target(clean, (x - a * clean) / s, (a, s)))

        teacher = "teacher"

    rng = np.random.default_rng(2)
    latents, noise = (paddle.to_tensor(rng.standard_normal((8, 1, 4, 4))) for _ in range(2))
    timesteps = paddle.to_tensor(np.linspace(300, 900, 8).astype(np.int64))
    scales = process.scales(paddle.to_tensor(levels[timesteps.numpy()].reshape(-1, 1, 1, 1)))
    for skip in (20, 40, 80):
        method, model = Captionless(skip=skip, huber=0.0), Model()
        noisy = scales[0] * latents * d + scales[1] * noise
        predicted = model.denoise(noisy, process.times(timesteps, model.levels[timesteps]), by="student")
        step = step_like(latents * d, noise, scales, predicted, timesteps)
        method_errors.append(float(method.term(model, step)) ** 0.5)
    ratios = np.array(method_errors[1:]) / np.array(method_errors[:-1])
    assert ((ratios > 3.2) & (ratios < 5.0)).all(), method_errors


class Captionless(Consistency):
    def _conditions(self, model, step):
        return {}, {}


def step_like(latents, noise, scales, predicted, timesteps):
    from ppldm.networks.model import Step

    return Step(latents, noise, scales, predicted, None, None, timesteps, {})


@pytest.mark.parametrize("kind", KINDS)
def test_one_step_of_the_sampler_is_the_function(kind):
    process = Process(NoiseSchedule(), kind)
    run = make_sampler(process, Drawing(1, 1.0, "lcm"))
    noisy, predicted = np.random.default_rng(0).standard_normal((2, 1, 4, 2, 2))
    a, s = process.scales(process.levels().astype(np.float64)[999])
    expected, _ = function(process, predicted, noisy, a, s, np.array([999.0]))
    assert len(run.timesteps) == 1 and run.initial_scale == 1
    np.testing.assert_allclose(run.step(predicted, noisy, None), expected, rtol=1e-5)


# What the tiny flags say of a new model, and the law's own of its family.
UNSAID = (
    *("vae_name_or_path", "text_encoder_config_file", "unet_config_file", "tokenizer_name", "transformer_config_file"),
    *("num_inference_steps", "size_conditioning", "size_conditioning_drop", "loss_weighting", "train_text_encoder"),
    *("ema_posthoc", "ema_posthoc_every", "ema_posthoc_dtype", "noise_offset", "prediction_type"),
)


def from_start(start, *more, **changes):
    methods = (f"consistency:{','.join(('guidance=3', 'skip=100', *more))}",)
    return {**dict.fromkeys(UNSAID), "model_name_or_path": start, "methods": methods, "adam_epsilon": 1e-6, **changes}


@pytest.fixture(scope="module")
def starts(tiny, tmp_path_factory):
    """Of each family: settings of a student's training."""
    flow = tmp_path_factory.mktemp("flow") / "run"
    plain = {"methods": None, "loss_weighting": None, "use_ema": None, "max_steps": 1}
    train(tiny, "uvit", flow, prediction_type="flow", sampler="flow-euler", guidance_scale=2, **plain)
    return {
        "ldm": from_start(write_base(tiny), freeze_text_encoder=True),
        "uvit": from_start(flow / "pipeline", "spread=1", prediction_type="flow", use_ema=None),
    }


@pytest.fixture(scope="module", params=["ldm", "uvit"])
def straight(request, tiny, starts, tmp_path_factory):
    """(family, settings, the folder of a run that nothing stopped)."""
    folder = tmp_path_factory.mktemp(request.param) / "run"
    train(tiny, request.param, folder, **starts[request.param])
    return request.param, starts[request.param], folder


@pytest.mark.turn("a method's run goes on, by either loop", 1)
def test_both_loops_and_a_resume_give_the_same_student(straight, tiny, tmp_path):
    name, settings, folder = straight
    train(tiny, name, tmp_path / "trainer", kind="trainer", **settings)
    assert_same_run(tmp_path / "trainer", folder)
    shutil.copytree(folder, tmp_path / "again")
    shutil.rmtree(tmp_path / "again/checkpoint-4")
    assert train(tiny, name, tmp_path / "again", **settings).start_step == 2
    assert_same_run(tmp_path / "again", folder)


def test_how_a_batch_is_cut_changes_nothing(straight, tiny, tmp_path):
    name, settings, folder = straight
    micro = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 2}
    train(tiny, name, tmp_path / "cut", **settings, **micro)
    assert_close_run(tmp_path / "cut", folder, steps=2, atol=ROUNDING)


@pytest.mark.turn("what holds on one rank holds on two", 2)
@pytest.mark.slow
def test_two_processes_are_one_with_twice_the_batch(straight, tiny, tmp_path):
    name, settings, folder = straight
    in_two_processes(tiny, name, "loop", tmp_path, **settings, per_device_train_batch_size=2)
    assert_close_run(tmp_path / "run", folder, atol=ROUNDING)


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"to_static": True}, {"recompute": True}, {"latents": "ondemand"}], ids=str)
def test_how_it_is_computed_changes_nothing(starts, tiny, tmp_path, how):
    settings = {**starts["ldm"], "random_crop": False, "max_steps": 3}
    train(tiny, "ldm", tmp_path / "plain", **settings)
    train(tiny, "ldm", tmp_path / "run", **settings, **how)
    found, expected = ([record[0] for record in curve(tmp_path / one)] for one in ("run", "plain"))
    np.testing.assert_allclose(found, expected, rtol=1e-3)


def test_a_student_says_how_it_is_drawn_and_leaves_no_teacher(straight):
    name, _, folder = straight
    network = "unet" if name == "ldm" else "transformer"
    for place in (folder / "pipeline", folder / "checkpoint-4"):
        model = load_pipeline(place)
        assert not hasattr(model, f"{network}_teacher")
    said = json.loads((folder / "pipeline/ppldm.json").read_text())
    assert [said[key] for key in ("guidance_scale", "num_inference_steps", "sampler")] == [1.0, 4, "lcm"]
    kept = paddle.load(str(folder / "checkpoint-4/model_state.pdparams"), return_numpy=True)
    assert any(key.startswith("consistency_target.") for key in kept) and not any("teacher" in key for key in kept)
    assert read_model_file(folder / "checkpoint-4").components[f"{network}_teacher"].crc32
    assert not [*(folder / "pipeline").glob("*teacher*")]


def test_the_average_is_of_the_student_before_each_update(tiny):
    model, method = student_of(tiny, decay=0.75)
    means = [one.numpy().astype(np.float64) for one in model.consistency_target.parameters()]
    for _ in range(2):
        for one in model.unet.parameters():
            one.set_value(one + 0.5)
        method.keep(model, method.sums(model, None))
        means = [0.75 * mean + 0.25 * one.numpy() for mean, one in zip(means, model.unet.parameters(), strict=True)]
    for mean, one in zip(means, model.consistency_target.parameters(), strict=True):
        np.testing.assert_allclose(one.numpy(), mean, rtol=1e-5, atol=1e-6)


def test_another_teacher_is_refused_on_resuming(straight, tiny, tmp_path):
    name, settings, folder = straight
    shutil.copytree(folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoint-4")
    other = {**settings, "model_name_or_path": folder / "pipeline"}
    with pytest.raises(CheckpointError, match="_teacher's weights"):
        train(tiny, name, tmp_path / "run", **other)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"freeze_text_encoder": None}, "only its unet is trained; add --freeze_text_encoder"),
        ({"prediction_type": "v_prediction"}, "was trained with prediction_type epsilon, and --methods consistency"),
        ({"loss_weighting": "min_snr"}, "--loss_weighting is of the loss that it replaces; omit it"),
        ({"methods": ("consistency", "contrastive_flow")}, "its term is the whole loss; omit the other methods"),
        ({"methods": ("consistency:skip=0",)}, "skip 0 must be from 1 to 1000"),
        ({"methods": ("consistency:spread=nan",)}, "spread nan must be from 0 to 50"),
        ({"timestep_shift": 2.0}, "was trained with timestep_shift 1.0, and --methods consistency"),
    ],
)
def test_what_cannot_be_is_refused(starts, tiny, tmp_path, changes, said):
    with pytest.raises(ConfigError, match=said):
        train(tiny, "ldm", tmp_path / "run", **{**starts["ldm"], **changes})


def test_a_student_needs_a_trained_model(tiny, tmp_path):
    words = [*tiny.flags(tmp_path / "run"), "--methods", "consistency", "--freeze_text_encoder"]
    with pytest.raises(ConfigError, match="a student needs a trained model to learn from"):
        prepare(*parse_arguments(words, True, get_family("ldm").Config))

"""Every sampler: a function of its inputs, near what it approximates, and the published formulas."""

import functools

import numpy as np
import paddle
import pytest
from noise import initial_noise
from small_weights import small_weights

from ppldm.diffusion.drawing import FLOW_EULER, SAMPLERS, STOCHASTIC, Drawing, choose_sampler, samplers_of
from ppldm.diffusion.guided import draw, noises, sample_latents
from ppldm.diffusion.process import FLOWS, PREDICTION_TYPES, TIMESTEP_SPACINGS, NoiseSchedule, Process
from ppldm.diffusion.samplers import _OVER_SIGMAS, _SCHEDULED, make_sampler
from ppldm.families.ldm_build import build_model
from ppldm.utils.errors import ConfigError, ModelError

SHAPE = (4, 8, 8)


class Words:
    """Stands for a tokenizer: a prompt's ids are its letters."""

    def encode(self, prompts):
        return np.array([[ord(letter) % 60 for letter in prompt.ljust(77)[:77]] for prompt in prompts])


@functools.cache
def model_of(kind):
    return build_model(small_weights(2, prediction_type=kind), "small")


@pytest.fixture(scope="module", params=["epsilon", "v_prediction"])
def model(request):
    return model_of(request.param)


CURVED = samplers_of(Process())


def drawn(model, sampler, prompts, indices, steps=4, scale=3.0):
    return draw(model, Words(), prompts, indices, SHAPE, 9, Drawing(steps, scale, sampler)).astype(int)


def test_every_sampler_has_a_class():
    assert {*_SCHEDULED, *_OVER_SIGMAS} == {*SAMPLERS}
    stochastic = {name for name, one in _OVER_SIGMAS.items() if one.is_stochastic}
    assert stochastic == {*STOCHASTIC} - {"ddpm"}


@pytest.mark.parametrize(
    "kind, sampler",
    [
        *((kind, name) for kind in ("epsilon", "v_prediction") for name in CURVED),
        *(("sample", "ddim"), ("flow", FLOW_EULER)),
    ],
)
def test_batches_and_global_random_state_do_not_change_pictures(kind, sampler):
    model = model_of(kind)
    prompts, indices = ["a", "b", "a"], [0, 0, 1]
    paddle.seed(1)
    together = drawn(model, sampler, prompts, indices)
    paddle.seed(2)
    apart = np.concatenate([drawn(model, sampler, prompts[:2], indices[:2]), drawn(model, sampler, prompts[2:], [1])])
    assert np.abs(together - apart).max() <= 1
    assert np.abs(together[0] - together[2]).max() > 1
    assert (drawn(model, sampler, prompts, indices) == together).all()


@pytest.mark.parametrize("sampler", [name for name in CURVED if name not in STOCHASTIC])
def test_deterministic_samplers_agree_in_the_limit(sampler):
    """A UNet that predicts no noise at all: every solver of the same equation scales the start by the same number."""
    silent = build_model(small_weights(2), "small")
    for parameter in silent.unet.conv_out.parameters():
        parameter.set_value(paddle.zeros_like(parameter))
    start = initial_noise(1, "a", 0, SHAPE)[None]
    said = silent.condition(paddle.to_tensor(Words().encode(["a"])))
    latents = sample_latents(silent, said, None, paddle.to_tensor(start), Drawing(50, 1.0, sampler)).numpy()
    ratio = latents / start
    assert ratio.std() < 1e-3 * ratio.mean()
    assert abs(ratio.mean() * float(NoiseSchedule().alphas_cumprod()[-1]) ** 0.5 - 1) < 0.15


@pytest.mark.parametrize("kind", ["epsilon", "v_prediction"])
def test_the_noise_of_a_step_has_the_published_variance(kind):
    """ddpm: equation 7 of Ho et al. 2020 between the timesteps; euler-ancestral: sigma_up of Karras et al. 2022."""
    schedule = NoiseSchedule()
    alpha_bar = schedule.alphas_cumprod().astype(np.float64)
    latents, one, two = (paddle.to_tensor(initial_noise(i, "a", 0, SHAPE)[None]) for i in range(3))
    for position in (0, 3, 8):
        steps = {}
        for sampler in ("ddpm", "euler-ancestral"):
            for noise in (one, two):
                run = make_sampler(Process(schedule, kind), Drawing(10, sampler=sampler))
                for _ in run.timesteps[: position + 1]:
                    run.scale_input(latents)
                    after = run.step(latents * 0.1, latents, noise)
                steps.setdefault(sampler, []).append(after)
        shares = {name: ((a - b) / (one - two)).numpy() for name, (a, b) in steps.items()}
        assert all(share.std() < 1e-3 for share in shares.values())
        before, now = alpha_bar[(9 - position) * 100 - 100], alpha_bar[(9 - position) * 100]
        variance = (1 - before) / (1 - now) * (1 - now / before)
        assert shares["ddpm"].mean() == pytest.approx(variance**0.5, rel=1e-3)
        sigma, target = (float(value) for value in run.sigmas[position : position + 2])
        up = target * (1 - target**2 / sigma**2) ** 0.5
        assert shares["euler-ancestral"].mean() == pytest.approx(up, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("num_steps", range(1, 201, 7))
def test_ddpm_from_noise_alone_is_finite(num_steps):
    run = make_sampler(
        Process(NoiseSchedule(rescale_betas_zero_snr=True), "v_prediction"), Drawing(num_steps, sampler="ddpm")
    )
    latents = paddle.to_tensor(initial_noise(1, "a", 0, SHAPE)[None])
    latents = run.step(latents * 0.5, latents, latents * 0.3)
    assert np.isfinite(latents.numpy()).all()


@pytest.mark.parametrize("num_steps", [6, 10, 13, 14, 19, 20, 23, 24, 25])
def test_ddpm_from_noise_alone_where_rounding_went_below_zero(num_steps):
    test_ddpm_from_noise_alone_is_finite(num_steps)


@pytest.mark.parametrize("spacing", [None, *TIMESTEP_SPACINGS])
@pytest.mark.parametrize("sampler", CURVED)
def test_as_many_steps_as_were_trained(sampler, spacing):
    for num_train in (1, 2, 30):
        process = Process(NoiseSchedule(num_train_timesteps=num_train))
        run = make_sampler(
            process, Drawing(num_train, sampler=sampler), {"timestep_spacing": spacing} if spacing else None
        )
        latents = paddle.to_tensor(initial_noise(1, "a", 0, SHAPE)[None]) * run.initial_scale
        for timestep in run.timesteps:
            assert 0 <= float(timestep) < num_train
            seen = run.scale_input(latents)
            latents = run.step(seen * 0.5, latents, latents * 0)
        assert np.isfinite(latents.numpy()).all()


@pytest.mark.parametrize("sampler", ["ddim", "ddpm", "euler", "euler-ancestral", "dpm-solver++"])
def test_noise_alone_is_sampled_from_its_last_timestep(sampler):
    """And a spacing that the model came with goes before."""
    process = Process(NoiseSchedule(rescale_betas_zero_snr=True), "v_prediction")
    assert float(make_sampler(process, Drawing(10, sampler=sampler)).timesteps[0]) == 999
    spaced = make_sampler(process, Drawing(10, sampler=sampler), {"timestep_spacing": "leading"})
    assert float(spaced.timesteps[0]) < 999
    plain = make_sampler(Process(), Drawing(10, sampler=sampler), {"timestep_spacing": "trailing"})
    assert [float(one) for one in plain.timesteps] == [*range(999, 0, -100)]


def test_dpm_solver_ends_at_the_picture():
    run = make_sampler(Process(), Drawing(20, sampler="dpm-solver++"))
    assert float(run.sigmas[-1]) == 0


def test_what_is_not_finite_is_an_error(model):
    settings = dict(negative_prompts=["b", "b"], check=True)
    with pytest.raises(ModelError, match="at guidance 1e\\+39 ended in values that are not finite for the prompt 'a'"):
        draw(model, Words(), ["a", "c"], [0, 0], SHAPE, 9, Drawing(2, 1e39), **settings)
    black = draw(model, Words(), ["a", "c"], [0, 0], SHAPE, 9, Drawing(2, 1e39), **settings | {"check": False})
    assert black.shape == (2, 64, 64, 3)


def test_negative_prompts_take_the_place_of_the_empty_one(model):
    def with_negative(text):
        return draw(model, Words(), ["a"], [0], SHAPE, 9, Drawing(3, 4.0), negative_prompts=[text]).astype(int)

    assert (with_negative("") == draw(model, Words(), ["a"], [0], SHAPE, 9, Drawing(3, 4.0))).all()
    assert np.abs(with_negative("zz") - with_negative("")).max() > 1
    # Guidance away from the prompt itself is no guidance.
    unguided = draw(model, Words(), ["a"], [0], SHAPE, 9, Drawing(3, 1.0)).astype(int)
    assert np.abs(with_negative("a") - unguided).max() <= 1


def test_every_step_has_noise_of_its_own():
    first, second = (next(stream) for stream in [noises(1, "a", 0, SHAPE)] * 2)
    assert (first == initial_noise(1, "a", 0, SHAPE)).all() and (first != second).any()


def test_a_schedule_that_a_sampler_cannot_follow_is_refused():
    class Odd(NoiseSchedule):
        def scheduler_config(self):
            return super().scheduler_config() | {"rescale_betas_zero_snr": True}

    with pytest.raises(ConfigError, match="the sampler pndm knows no rescale_betas_zero_snr"):
        make_sampler(Process(Odd()), Drawing(5, sampler="pndm"))


def test_guidance_scales_start_from_the_same_noise(model):
    """One step is affine in the prediction, so three scales lie on a line if and only if their noise is the same."""
    one, two, three = (sample_of(model, scale) for scale in (2.0, 3.0, 4.0))
    np.testing.assert_allclose(three - two, two - one, atol=2e-4)


def sample_of(model, scale):
    said, empty = (model.condition(paddle.to_tensor(Words().encode([text]))) for text in ("a", ""))
    noise = paddle.to_tensor(initial_noise(9, "a", 0, SHAPE)[None])
    return sample_latents(model, said, empty, noise, Drawing(1, scale)).numpy()


@pytest.mark.parametrize("schedule", ["scaled_linear", "squaredcos_cap_v2", "cosine"])
@pytest.mark.parametrize(
    "kind, sampler",
    [(kind, name) for kind in PREDICTION_TYPES for name in samplers_of(Process(prediction_type=kind))],
)
def test_a_perfect_prediction_ends_at_the_picture(kind, sampler, schedule):
    """ddim and pndm end at the first timestep of training, with the noise that is left there."""
    process = Process(NoiseSchedule(beta_schedule=schedule, timestep_shift=1.5), kind)
    run = make_sampler(process, Drawing(12, sampler=sampler))
    picture, latents = (paddle.to_tensor(initial_noise(i, "a", 0, SHAPE)[None]) for i in range(2))
    latents = latents * run.initial_scale
    for number, timestep in enumerate(run.timesteps):
        seen = run.scale_input(latents)
        level = float(timestep) / 1000 if kind in FLOWS else np.interp(float(timestep), range(1000), process.levels())
        a, s = process.scales(level)
        predicted = process.target(picture, (seen - a * picture) / s, (a, s))
        latents = run.step(predicted, latents, paddle.to_tensor(initial_noise(number, "n", 0, SHAPE)[None]))
    left = 4.5 * process.scales(process.levels()[0])[1] if sampler in ("ddim", "pndm") else 0
    if (kind, sampler) == ("flow_sample", "flow-euler"):  # its direction is divided by a sigma of at least 0.05
        left = 4.5 * 0.05 / 4
    np.testing.assert_allclose(latents, picture, atol=left + 5e-3)


def test_what_does_not_go_together_is_refused_by_name():
    flow, sample = Process(prediction_type="flow"), Process(prediction_type="sample")
    assert choose_sampler(None, flow) == FLOW_EULER and choose_sampler(None, sample) == "ddim"
    assert choose_sampler("lms", Process()) == "lms"
    for sampler, process, message in (
        ("ddim", flow, "the sampler ddim does not draw with a model of --prediction_type flow; use flow-euler"),
        (FLOW_EULER, Process(), "flow-euler does not draw with a model of --prediction_type epsilon; use ddim, ddpm"),
        ("pndm", sample, "pndm does not draw with a model of --prediction_type sample"),
        ("euler-ancestral", sample, "euler-ancestral does not draw with a model of --prediction_type sample"),
        ("dream", flow, "--sampler dream is not one of ddim"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_sampler(process, Drawing(3, sampler=sampler))
    with pytest.raises(ConfigError, match="dpm-solver.. cannot take 900 steps in a noise schedule that stands still"):
        make_sampler(Process(NoiseSchedule(beta_schedule="cosine")), Drawing(900, sampler="dpm-solver++"))

"""Every sampler: a function of its inputs, near what it approximates, and the published formulas."""

import numpy as np
import paddle
import pytest
from small_weights import small_weights

from ppldm.inference.generate import SAMPLER_NAMES
from ppldm.inference.sample import draw, initial_noise, noises, sample_latents
from ppldm.inference.samplers import SAMPLERS, STOCHASTIC, Sampler
from ppldm.models.build import build_model
from ppldm.models.diffusion import NoiseSchedule
from ppldm.utils.errors import ConfigError

SHAPE = (4, 8, 8)


class Words:
    """Stands for a tokenizer: a prompt's ids are its letters."""

    def encode(self, prompts):
        return np.array([[ord(letter) % 60 for letter in prompt.ljust(77)[:77]] for prompt in prompts])


@pytest.fixture(scope="module", params=["epsilon", "v_prediction"])
def model(request):
    return build_model(small_weights(2, prediction_type=request.param), "small")


def drawn(model, sampler, prompts, indices, steps=4, scale=3.0):
    return draw(model, Words(), prompts, indices, SHAPE, 9, scale, steps, sampler=sampler).astype(int)


def test_the_command_knows_every_sampler():
    assert tuple(SAMPLERS) == SAMPLER_NAMES


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_batches_and_global_random_state_do_not_change_pictures(model, sampler):
    prompts, indices = ["a", "b", "a"], [0, 0, 1]
    paddle.seed(1)
    together = drawn(model, sampler, prompts, indices)
    paddle.seed(2)
    apart = np.concatenate([drawn(model, sampler, prompts[:2], indices[:2]), drawn(model, sampler, prompts[2:], [1])])
    assert np.abs(together - apart).max() <= 1
    assert np.abs(together[0] - together[2]).max() > 1
    assert (drawn(model, sampler, prompts, indices) == together).all()


@pytest.mark.parametrize("sampler", [name for name in SAMPLERS if name not in STOCHASTIC])
def test_deterministic_samplers_agree_in_the_limit(sampler):
    """A UNet that predicts no noise at all: every solver of the same equation scales the start by the same number."""
    schedule = NoiseSchedule()
    start = paddle.to_tensor(initial_noise(1, "a", 0, SHAPE)[None])
    run = Sampler(sampler, schedule, "epsilon", 50)
    latents = start * run.initial_scale
    for timestep in run.timesteps:
        run.scale_input(latents, timestep)
        latents = run.step(paddle.zeros_like(latents), timestep, latents)
    scale = float(schedule.alphas_cumprod()[-1]) ** -0.5
    ratio = (latents / start).numpy()
    assert ratio.std() < 1e-3 * ratio.mean()
    assert abs(ratio.mean() / scale - 1) < 0.15


@pytest.mark.parametrize("sampler", STOCHASTIC)
def test_stochastic_samplers_keep_the_variance(sampler):
    """Where the data are unit normal, the best prediction of the noise is sqrt(1 - abar) x_t, and samples stay so."""
    schedule = NoiseSchedule()
    alpha_bar = schedule.alphas_cumprod()
    rng = np.random.default_rng(0)
    run = Sampler(sampler, schedule, "epsilon", 100)
    latents = paddle.to_tensor(rng.standard_normal((8, 4, 16, 16), dtype=np.float32)) * run.initial_scale
    for timestep in run.timesteps:
        seen = run.scale_input(latents, timestep)
        predicted = seen * float(1 - alpha_bar[int(timestep)]) ** 0.5
        noise = paddle.to_tensor(rng.standard_normal(latents.shape, dtype=np.float32))
        latents = run.step(predicted, timestep, latents, noise)
    assert abs(float(latents.std()) - 1) < 0.05


def test_negative_prompts_take_the_place_of_the_empty_one(model):
    def with_negative(text):
        return draw(model, Words(), ["a"], [0], SHAPE, 9, 4.0, 3, negative_prompts=[text]).astype(int)

    assert (with_negative("") == draw(model, Words(), ["a"], [0], SHAPE, 9, 4.0, 3)).all()
    assert np.abs(with_negative("zz") - with_negative("")).max() > 1
    # Guidance away from the prompt itself is no guidance.
    unguided = draw(model, Words(), ["a"], [0], SHAPE, 9, 1.0, 3).astype(int)
    assert np.abs(with_negative("a") - unguided).max() <= 1


def test_every_step_has_noise_of_its_own():
    first, second = (next(stream) for stream in [noises(1, "a", 0, SHAPE)] * 2)
    assert (first == initial_noise(1, "a", 0, SHAPE)).all() and (first != second).any()


def test_a_schedule_that_a_sampler_cannot_follow_is_refused():
    class Odd(NoiseSchedule):
        def scheduler_config(self):
            return super().scheduler_config() | {"rescale_betas_zero_snr": True}

    with pytest.raises(ConfigError, match="the sampler lms knows no rescale_betas_zero_snr"):
        Sampler("lms", Odd(), "v_prediction", 5)


def test_guidance_scales_start_from_the_same_noise(model):
    """One step is affine in the prediction, so three scales lie on a line if and only if their noise is the same."""
    one, two, three = (sample_of(model, scale) for scale in (2.0, 3.0, 4.0))
    np.testing.assert_allclose(three - two, two - one, atol=2e-4)


def sample_of(model, scale):
    ids = paddle.to_tensor(Words().encode(["a"]))
    noise = paddle.to_tensor(initial_noise(9, "a", 0, SHAPE)[None])
    return sample_latents(model, ids, paddle.to_tensor(Words().encode([""])), noise, scale, 1).numpy()

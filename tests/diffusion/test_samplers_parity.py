"""Every sampler against diffusers', over kinds of prediction, timestep spacings and numbers of steps.

Where diffusers fails, ours must not, and the table says how they differ:

leading, as many steps as were trained   its timesteps end beyond the schedule (IndexError); ours within
dpm-solver++, as many steps as trained   it takes a timestep twice, and divides by the step between; ours does not
trailing, some numbers of steps          it has one step more, at timestep -1; ours has not
ddpm from pure noise                    its rounding gives the root of a negative number; ours is finite
"""

import os
import random

import needs
import numpy as np
import paddle
import pytest
from sampling import ALL

from ppldm.diffusion.drawing import SIGMA_SCHEDULES, Drawing, samplers_of
from ppldm.diffusion.process import TIMESTEP_SPACINGS, NoiseSchedule, Process
from ppldm.diffusion.samplers import Scheduled, make_sampler

needs.need("parity")
import diffusers  # noqa: E402
import torch  # noqa: E402

_DPM = {"solver_order": 2}
CLASSES = {
    "ddim": (diffusers.DDIMScheduler, {"clip_sample": False, "set_alpha_to_one": False, "steps_offset": 1}),
    "ddpm": (diffusers.DDIMScheduler, {"clip_sample": False, "set_alpha_to_one": True}),
    "pndm": (diffusers.PNDMScheduler, {"skip_prk_steps": True, "set_alpha_to_one": False, "steps_offset": 1}),
    "lms": (diffusers.LMSDiscreteScheduler, {}),
    "euler": (diffusers.EulerDiscreteScheduler, {}),
    "euler-ancestral": (diffusers.EulerAncestralDiscreteScheduler, {}),
    "heun": (diffusers.HeunDiscreteScheduler, {}),
    "dpm-solver++": (diffusers.DPMSolverMultistepScheduler, {"algorithm_type": "dpmsolver++", **_DPM}),
    "dpm-solver++-sde": (diffusers.DPMSolverMultistepScheduler, {"algorithm_type": "sde-dpmsolver++", **_DPM}),
    "unipc": (diffusers.UniPCMultistepScheduler, {"solver_order": 2}),
    "lcm": (diffusers.LCMScheduler, {"clip_sample": False}),
}
MULTISTEP = ("dpm-solver++", "dpm-solver++-sde", "unipc")
KINDS = [("epsilon", False), ("v_prediction", False), ("sample", False), ("v_prediction", True)]
TABLE = [
    (sampler, kind, zero_snr, spacing)
    for sampler in CLASSES
    for kind, zero_snr in KINDS
    for spacing in TIMESTEP_SPACINGS
    if sampler in samplers_of(Process(prediction_type=kind)) and sampler != "lcm"
    # Which know no such schedule: pndm there as here, the others there.
    if not (zero_snr and sampler in ("pndm", "lms", "heun"))
]
FEW = (1, 2, 3, 6, 13, 14, 15, 25, 61)
MANY = (50, 103, 250, 333, 500, 999, 1000)
# All numbers of steps take an hour: a few are drawn by PPLDM_SEED, and all are played where PPLDM_ALL is set.
DRAWN = random.Random(int(os.environ.get("PPLDM_SEED", 1)))
MANY_DRAWN = MANY if ALL else DRAWN.sample(MANY[:-2], 1) + [1000]
PLACES_DRAWN = range(1, 1001) if ALL else sorted(DRAWN.sample(range(1, 1001), 20))
SHAPE = (1, 1, 2, 3)


def predict(seen, timestep):
    """Stands for a network: smooth in both, of the size of noise."""
    return (0.9 * np.tanh(seen) + 0.2 * np.cos(timestep / 130 + seen)).astype(seen.dtype)


def noise_of(number: int) -> np.ndarray:
    return np.random.default_rng(number).standard_normal(SHAPE, dtype=np.float32)


def theirs_of(sampler, kind, zero_snr, spacing, num_steps, sigma_schedule=None, **changes):
    scheduler_class, settings = CLASSES[sampler]
    if sigma_schedule:
        settings = {**settings, f"use_{sigma_schedule}_sigmas": True}
    schedule = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"} | changes
    if shift := schedule.pop("timestep_shift", None):
        signal = np.cumprod(1 - np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2)
        signal = signal / (signal + shift**2 * (1 - signal))
        schedule["trained_betas"] = (1 - signal / np.append(1, signal[:-1])).tolist()
    if zero_snr:
        schedule["rescale_betas_zero_snr"] = True
    scheduler = scheduler_class(**schedule, **settings, prediction_type=kind, timestep_spacing=spacing)
    scheduler.set_timesteps(num_steps)
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(0)
    return scheduler


def ours_of(sampler, kind, zero_snr, spacing, num_steps, sigma_schedule=None, **changes):
    process = Process(NoiseSchedule(rescale_betas_zero_snr=zero_snr, **changes), kind)
    how = {"timestep_spacing": spacing if sampler != "lcm" else None, "sigma_schedule": sigma_schedule}
    return make_sampler(process, Drawing(num_steps, sampler=sampler, **how))


def draw_theirs(scheduler, sampler, monkeypatch, eta=1.0, dtype=np.float32) -> np.ndarray:
    latents = torch.tensor(noise_of(0).astype(dtype)) * scheduler.init_noise_sigma
    for number, timestep in enumerate(scheduler.timesteps, 1):
        noise = torch.tensor(noise_of(number))
        for name in ("euler_ancestral_discrete", "lcm"):
            drawing = f"diffusers.schedulers.scheduling_{name}.randn_tensor"
            monkeypatch.setattr(drawing, lambda *_, noise=noise, **__: noise)
        seen = scheduler.scale_model_input(latents, timestep)
        predicted = torch.tensor(predict(seen.numpy(), float(timestep)))
        more = {"eta": eta, "variance_noise": noise} if sampler in ("ddpm", "ddim-eta") else {}
        more |= {"variance_noise": noise} if sampler == "dpm-solver++-sde" else {}
        latents = scheduler.step(predicted, timestep, latents, **more).prev_sample
    return latents.numpy()


def draw_ours(run, dtype=np.float32) -> np.ndarray:
    """Samplers of ours work with arrays of numpy too, much faster."""
    tensor = paddle.to_tensor if isinstance(run, Scheduled) else np.asarray
    latents = tensor(noise_of(0).astype(dtype)) * run.initial_scale
    for number, timestep in enumerate(run.timesteps, 1):
        predicted = tensor(predict(np.asarray(run.scale_input(latents)), float(timestep)))
        latents = run.step(predicted, latents, tensor(noise_of(number)) if run.is_stochastic else None)
    return np.asarray(latents)


def fails(sampler, timesteps: np.ndarray) -> bool:
    """Whether diffusers' timesteps are such as make it fail, or draw what is not finite."""
    twice = sampler in MULTISTEP and len(set(timesteps)) < len(timesteps)
    return twice or timesteps.max() > 999 or timesteps.min() < 0


def compare(sampler, kind, zero_snr, spacing, num_steps, monkeypatch, **changes):
    ours, theirs = (make(sampler, kind, zero_snr, spacing, num_steps, **changes) for make in (ours_of, theirs_of))
    compare_runs(ours, theirs, sampler, zero_snr, num_steps, monkeypatch, changes.get("beta_schedule"))


def compare_runs(ours, theirs, sampler, zero_snr, num_steps, monkeypatch, beta_schedule=None):
    steps = np.array([float(one) for one in ours.timesteps])
    own = theirs.timesteps.numpy().astype(float)
    dtype = np.float32
    if sampler == "heun" and beta_schedule == "squaredcos_cap_v2":
        # From a sigma of 20,000, what a last digit of it changes is seen in all of the picture.
        np.testing.assert_allclose(ours.sigmas, theirs.sigmas.numpy(), rtol=2e-3)
        dtype, theirs.sigmas = np.float64, torch.tensor(ours.sigmas, dtype=torch.float64)
    drawn = draw_ours(ours, dtype)
    assert np.isfinite(drawn).all()
    assert steps.min() >= 0 and steps.max() <= 999
    if fails(sampler, own):
        assert len(steps) == (
            2 * num_steps - 1 if sampler == "heun" else num_steps + (sampler == "pndm" and num_steps > 1)
        )
        return
    np.testing.assert_allclose(steps, own, rtol=1e-5, atol=1e-3)
    expected = draw_theirs(theirs, sampler, monkeypatch, dtype=dtype)
    if np.isfinite(expected).all():
        # Where a cosine leaves 5e-5 of the picture, x_0 solved from it is large, and float32 keeps fewer digits.
        atol = 1e-2 if beta_schedule == "squaredcos_cap_v2" else 2e-3
        np.testing.assert_allclose(drawn, expected, rtol=2e-3, atol=atol)
    else:
        assert sampler == "ddpm" and zero_snr


@pytest.mark.parametrize("sampler, kind, zero_snr, spacing", TABLE)
def test_few_steps(sampler, kind, zero_snr, spacing, monkeypatch):
    for num_steps in FEW:
        compare(sampler, kind, zero_snr, spacing, num_steps, monkeypatch)


@pytest.mark.parametrize("kind, zero_snr", KINDS)
def test_few_steps_of_a_consistency_model(kind, zero_snr, monkeypatch):
    """diffusers refuses more than 50."""
    for num_steps in (1, 2, 3, 4, 6, 8, 13, 25, 50):
        compare("lcm", kind, zero_snr, "leading", num_steps, monkeypatch)


OTHERS = [
    (sampler, kind, *changes)
    for kind, *changes in (
        ("sample", "beta_schedule", "scaled_linear"),
        ("sample", "beta_schedule", "squaredcos_cap_v2"),
        ("epsilon", "beta_schedule", "squaredcos_cap_v2"),
        ("v_prediction", "beta_schedule", "squaredcos_cap_v2"),
        ("v_prediction", "timestep_shift", 2.0),
    )
    for sampler in samplers_of(Process(prediction_type=kind))
]


@pytest.mark.parametrize("sampler, kind, setting, value", OTHERS)
def test_other_schedules(sampler, kind, setting, value, monkeypatch):
    for num_steps, spacing in ((1, "leading"), (2, "trailing"), (14, "leading")):
        compare(sampler, kind, False, spacing, num_steps, monkeypatch, **{setting: value})


RESPACED = [
    (sampler, sigma_schedule, kind)
    for sampler in ("lms", "euler", "euler-ancestral", "heun", *MULTISTEP)
    for sigma_schedule in SIGMA_SCHEDULES
    for kind in ("epsilon", "v_prediction", "sample")
    if sampler in samplers_of(Process(prediction_type=kind))
]


@pytest.mark.parametrize("sampler, sigma_schedule, kind", RESPACED)
def test_sigmas_of_another_schedule(sampler, sigma_schedule, kind, monkeypatch):
    """euler-ancestral of diffusers does not know them, and those of many steps fail at exponential ones: they are given
    the sigmas and timesteps that its Euler has."""
    for num_steps, spacing in ((2, "trailing"), (7, "linspace"), (25, "leading"), (60, "linspace")):
        ours = ours_of(sampler, kind, False, spacing, num_steps, sigma_schedule)
        if sampler == "euler-ancestral" or (sampler in MULTISTEP and sigma_schedule == "exponential"):
            theirs = theirs_of(sampler, kind, False, spacing, num_steps)
            euler = theirs_of("euler", kind, False, spacing, num_steps, sigma_schedule)
            if sampler in MULTISTEP:  # of all sigmas of the training
                levels = np.sqrt(1 / theirs.alphas_cumprod.numpy() - 1)
                euler.sigmas = torch.tensor([*np.geomspace(levels[-1], levels[0], num_steps), 0.0]).float()
                places = [euler._sigma_to_t(one, np.log(levels)) for one in euler.sigmas[:-1].numpy()]
                euler.timesteps = torch.tensor(np.round(places)).long()
            theirs.sigmas, theirs.timesteps = euler.sigmas, euler.timesteps
        else:
            theirs = theirs_of(sampler, kind, False, spacing, num_steps, sigma_schedule)
        np.testing.assert_allclose(ours.sigmas, theirs.sigmas.numpy(), rtol=1e-4)
        theirs.set_begin_index(0)
        compare_runs(ours, theirs, "euler" if sampler == "heun" else sampler, False, num_steps, monkeypatch)


@pytest.mark.parametrize("kind, zero_snr", KINDS)
def test_ddim_with_fresh_noise(kind, zero_snr, monkeypatch):
    for eta, num_steps, spacing in ((0.3, 5, "leading"), (1.0, 20, "trailing"), (0.8, 50, "linspace")):
        process = Process(NoiseSchedule(rescale_betas_zero_snr=zero_snr), kind)
        ours = make_sampler(process, Drawing(num_steps, sampler="ddim", eta=eta, timestep_spacing=spacing))
        assert ours.is_stochastic
        expected = draw_theirs(theirs_of("ddim", kind, zero_snr, spacing, num_steps), "ddim-eta", monkeypatch, eta)
        drawn = draw_ours(ours)
        assert np.isfinite(drawn).all()
        if np.isfinite(expected).all():
            np.testing.assert_allclose(drawn, expected, rtol=2e-3, atol=2e-3)
        else:
            assert eta == 1.0 and zero_snr


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_flow(shift):
    for num_steps in (1, 2, 7, 28, 1000):
        ours = make_sampler(Process(NoiseSchedule(timestep_shift=shift), "flow"), Drawing(num_steps))
        theirs = diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)
        theirs.set_timesteps(num_steps)
        np.testing.assert_allclose([float(one) for one in ours.timesteps], theirs.timesteps.numpy(), rtol=1e-6)
        latents = torch.tensor(noise_of(0))
        for timestep in theirs.timesteps:
            predicted = torch.tensor(predict(latents.numpy(), float(timestep)))
            latents = theirs.step(predicted, timestep, latents).prev_sample
        np.testing.assert_allclose(draw_ours(ours), latents.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("sampler, kind, zero_snr, spacing", TABLE)
def test_many_steps(sampler, kind, zero_snr, spacing, monkeypatch):
    for num_steps in MANY_DRAWN:
        compare(sampler, kind, zero_snr, spacing, num_steps, monkeypatch)


def check_places(sampler, kind, zero_snr, spacing, num_steps):
    """The timesteps, sigmas and first scale are diffusers'."""
    ours, theirs = (make(sampler, kind, zero_snr, spacing, num_steps) for make in (ours_of, theirs_of))
    steps = np.array([float(one) for one in ours.timesteps])
    assert steps.min() >= 0 and steps.max() <= 999
    own = theirs.timesteps.numpy().astype(float)
    if not fails(sampler, own):
        np.testing.assert_allclose(steps, own, rtol=1e-6, atol=1e-4)
        np.testing.assert_allclose(ours.initial_scale, float(theirs.init_noise_sigma), rtol=1e-3)
        if hasattr(ours, "sigmas"):
            np.testing.assert_allclose(ours.sigmas, theirs.sigmas.numpy(), rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize("sampler, kind, zero_snr, spacing", TABLE)
def test_places_of_some_numbers_of_steps(sampler, kind, zero_snr, spacing):
    for num_steps in (*range(4, 1000, 199), 998, 999, 1000):
        check_places(sampler, kind, zero_snr, spacing, num_steps)


@pytest.mark.slow
@pytest.mark.parametrize("sampler, kind, zero_snr, spacing", TABLE)
def test_places_of_every_number_of_steps(sampler, kind, zero_snr, spacing):
    for num_steps in PLACES_DRAWN:
        check_places(sampler, kind, zero_snr, spacing, num_steps)

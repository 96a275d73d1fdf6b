"""The forward process against its published values and against ppdiffusers' own schedulers."""

import numpy as np
import paddle
import pytest
from ppdiffusers import DDPMScheduler

from ppldm.diffusion.process import NoiseSchedule, Process, add_noise, min_snr_weights, training_target


def test_published_schedule():
    alphas_cumprod = NoiseSchedule().alphas_cumprod()
    assert alphas_cumprod.shape == (1000,)
    np.testing.assert_allclose(alphas_cumprod[[0, 499, 999]], [0.99915, 0.277670, 0.0046601], rtol=2e-5)
    assert (np.diff(alphas_cumprod) < 0).all()


@pytest.mark.parametrize("beta_schedule", ["scaled_linear", "linear"])
def test_zero_terminal_snr(beta_schedule):
    plain = NoiseSchedule(beta_schedule=beta_schedule).alphas_cumprod()
    rescaled = NoiseSchedule(beta_schedule=beta_schedule, rescale_betas_zero_snr=True).alphas_cumprod()
    assert rescaled[-1] == 0 and rescaled[0] == plain[0]
    assert (np.diff(rescaled) < 0).all()
    # Linear in sqrt(abar): differences keep their proportions.
    ratios = np.diff(np.sqrt(rescaled.astype(np.float64))) / np.diff(np.sqrt(plain.astype(np.float64)))
    np.testing.assert_allclose(ratios, ratios[0], rtol=1e-2)


@pytest.mark.parametrize("gamma", [1.0, 5.0, 20.0])
@pytest.mark.parametrize("zero_snr", [False, True])
def test_min_snr_weights_over_all_timesteps(gamma, zero_snr):
    """Table against the formula in SNR, and against ppdiffusers where it defines SNR."""
    from ppdiffusers.training_utils import compute_snr

    schedule = NoiseSchedule(rescale_betas_zero_snr=zero_snr)
    abar = schedule.alphas_cumprod()
    snr = abar.astype(np.float64) / (1 - abar.astype(np.float64))
    velocity = min_snr_weights(abar, gamma, "v_prediction")
    np.testing.assert_allclose(velocity, np.minimum(snr, gamma) / (snr + 1), rtol=1e-6)
    assert np.isfinite(velocity).all() and (velocity[-1] == 0) == zero_snr
    if zero_snr:
        return
    np.testing.assert_allclose(min_snr_weights(abar, gamma, "epsilon"), np.minimum(snr, gamma) / snr, rtol=1e-6)
    theirs = compute_snr(DDPMScheduler(**schedule.scheduler_config()), paddle.arange(1000)).numpy()
    np.testing.assert_allclose(min_snr_weights(abar, gamma, "epsilon"), np.minimum(theirs, gamma) / theirs, rtol=2e-4)


@pytest.mark.parametrize("beta_schedule", ["scaled_linear", "linear"])
@pytest.mark.parametrize("timestep", [0, 1, 500, 999])
@pytest.mark.parametrize("zero_snr", [False, True])
def test_agrees_with_ppdiffusers(beta_schedule, timestep, zero_snr):
    schedule = NoiseSchedule(beta_schedule=beta_schedule, rescale_betas_zero_snr=zero_snr)
    scheduler = DDPMScheduler(**schedule.scheduler_config())
    rng = np.random.default_rng(timestep)
    latents, noise = (paddle.to_tensor(rng.standard_normal((2, 4, 3, 3), dtype=np.float32)) for _ in range(2))
    timesteps = paddle.to_tensor([timestep, timestep])
    alpha_bar = float(schedule.alphas_cumprod()[timestep])
    # ppdiffusers rescales in float32.
    atol = 2e-5 if zero_snr else 2e-6
    np.testing.assert_allclose(
        add_noise(latents, noise, alpha_bar), scheduler.add_noise(latents, noise, timesteps), atol=atol
    )
    np.testing.assert_allclose(
        training_target(latents, noise, alpha_bar, "v_prediction"),
        scheduler.get_velocity(latents, noise, timesteps),
        atol=atol,
    )
    assert training_target(latents, noise, alpha_bar, "epsilon") is noise


def test_unknown_settings_are_refused():
    with pytest.raises(ValueError, match="prediction_type"):
        training_target(None, None, 0.5, "sample")
    with pytest.raises(ValueError, match="beta_schedule"):
        NoiseSchedule(beta_schedule="cosine").alphas_cumprod()


def table(num_levels=1000, first=0.00085, last=0.012, linear=False, zero_snr=False):
    """The published discrete schedule as it was first written here: float32 of float64 products."""
    betas = np.linspace(first, last, num_levels) if linear else np.linspace(first**0.5, last**0.5, num_levels) ** 2
    signal = np.cumprod(1.0 - betas)
    if zero_snr:
        roots = np.sqrt(signal)
        signal = ((roots - roots[-1]) * roots[0] / (roots[0] - roots[-1])) ** 2
    return signal.astype(np.float32)


@pytest.mark.parametrize(
    "zero_snr, prediction_type", [(False, "epsilon"), (False, "v_prediction"), (True, "v_prediction")]
)
@pytest.mark.parametrize("gamma", [None, 0.5, 1.0, 5.0, 20.0])
@pytest.mark.parametrize("num_levels", [3, 1000, 1001])
def test_published_processes_to_the_bit(zero_snr, prediction_type, gamma, num_levels):
    """Tables and weights are values of a process, and those that runs so far were trained with."""
    settings = {"num_train_timesteps": num_levels, "rescale_betas_zero_snr": zero_snr}
    process = Process.of({**settings, "prediction_type": prediction_type, "steps_offset": 1}, gamma)
    signal = table(num_levels, zero_snr=zero_snr)
    assert process.num_levels == num_levels and (process.schedule.alphas_cumprod() == signal).all()
    assert process.settings().items() >= {**settings, "prediction_type": prediction_type}.items()
    assert Process.of(process.settings(), gamma) == process
    if gamma is None:
        assert process.loss_weights() is None
        return
    signal = signal.astype(np.float64)
    if prediction_type == "epsilon":
        weights = np.minimum(1.0, gamma * (1.0 - signal) / signal)
    else:
        weights = np.minimum(signal, gamma * (1.0 - signal))
    assert process.loss_weights().dtype == np.float32 and (process.loss_weights() == weights.astype(np.float32)).all()


def test_log_snr_says_all_of_a_schedule():
    for zero_snr in (False, True):
        schedule = NoiseSchedule(rescale_betas_zero_snr=zero_snr)
        logs = schedule.log_snr()
        assert (np.diff(logs) < 0).all() and (logs[-1] == -np.inf) == zero_snr
        with np.errstate(over="ignore"):
            assert ((1 / (1 + np.exp(-logs))).astype(np.float32) == schedule.alphas_cumprod()).all()


def test_a_process_that_cannot_be_learned_is_refused():
    with pytest.raises(ValueError, match="zero SNR needs v_prediction"):
        Process(NoiseSchedule(rescale_betas_zero_snr=True))
    with pytest.raises(ValueError, match="prediction_type 'x'"):
        Process(prediction_type="x")

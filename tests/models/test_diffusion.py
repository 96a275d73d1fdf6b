"""The forward process against its published values and against ppdiffusers' own schedulers."""

import numpy as np
import paddle
import pytest
from ppdiffusers import DDPMScheduler

from ppldm.models.diffusion import NoiseSchedule, add_noise, training_target


def test_published_schedule():
    alphas_cumprod = NoiseSchedule().alphas_cumprod()
    assert alphas_cumprod.shape == (1000,)
    np.testing.assert_allclose(alphas_cumprod[[0, 499, 999]], [0.99915, 0.277670, 0.0046601], rtol=2e-5)
    assert (np.diff(alphas_cumprod) < 0).all()


@pytest.mark.parametrize("beta_schedule", ["scaled_linear", "linear"])
@pytest.mark.parametrize("timestep", [0, 1, 500, 999])
def test_agrees_with_ppdiffusers(beta_schedule, timestep):
    schedule = NoiseSchedule(beta_schedule=beta_schedule)
    scheduler = DDPMScheduler(**schedule.scheduler_config())
    rng = np.random.default_rng(timestep)
    latents, noise = (paddle.to_tensor(rng.standard_normal((2, 4, 3, 3), dtype=np.float32)) for _ in range(2))
    timesteps = paddle.to_tensor([timestep, timestep])
    alpha_bar = float(schedule.alphas_cumprod()[timestep])
    np.testing.assert_allclose(
        add_noise(latents, noise, alpha_bar), scheduler.add_noise(latents, noise, timesteps), atol=2e-6
    )
    np.testing.assert_allclose(
        training_target(latents, noise, alpha_bar, "v_prediction"),
        scheduler.get_velocity(latents, noise, timesteps),
        atol=2e-6,
    )
    assert training_target(latents, noise, alpha_bar, "epsilon") is noise


def test_unknown_settings_are_refused():
    with pytest.raises(ValueError, match="prediction_type"):
        training_target(None, None, 0.5, "sample")
    with pytest.raises(ValueError, match="beta_schedule"):
        NoiseSchedule(beta_schedule="cosine").alphas_cumprod()

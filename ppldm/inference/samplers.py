"""The samplers by name, as one kind of object whose every random number is given to it.

ddim            Song et al. 2021 (arXiv:2010.02502) with eta 0, as the published LDM samples
ddpm            Ho et al. 2020 (arXiv:2006.11239) with the small variance, over fewer steps: DDIM with eta 1
pndm            Liu et al. 2022 (arXiv:2202.09778), without its Runge-Kutta start
lms             linear multi-step over sigmas (Karras et al. 2022, arXiv:2206.00364)
euler           Euler's method over the same
euler-ancestral Euler steps down to a smaller sigma, with fresh noise back up
dpm-solver++    Lu et al. 2022 (arXiv:2211.01095), second order, multi-step
"""

import inspect

import paddle
from ppdiffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    LMSDiscreteScheduler,
    PNDMScheduler,
)

from ..models.diffusion import NoiseSchedule
from ..utils.errors import ConfigError

# Name to scheduler and its settings besides the noise schedule.
SAMPLERS = {
    "ddim": (DDIMScheduler, {"clip_sample": False, "set_alpha_to_one": False, "steps_offset": 1}),
    "ddpm": (DDIMScheduler, {"clip_sample": False, "set_alpha_to_one": True}),
    "pndm": (PNDMScheduler, {"skip_prk_steps": True, "set_alpha_to_one": False, "steps_offset": 1}),
    "lms": (LMSDiscreteScheduler, {}),
    "euler": (EulerDiscreteScheduler, {}),
    "euler-ancestral": (EulerAncestralDiscreteScheduler, {}),
    "dpm-solver++": (DPMSolverMultistepScheduler, {"algorithm_type": "dpmsolver++", "solver_order": 2}),
}
STOCHASTIC = ("ddpm", "euler-ancestral")


def sampling_scheduler(noise_schedule: NoiseSchedule, prediction_type: str, sampler: str = "ddim"):
    """The ppdiffusers scheduler of a sampler. Raises ConfigError where it cannot follow the noise schedule.

    A schedule that ends in noise alone is sampled from its very last timestep: arXiv:2305.08891, section 3.3.
    """
    scheduler_class, settings = SAMPLERS[sampler]
    known = inspect.signature(scheduler_class.__init__).parameters
    schedule = noise_schedule.scheduler_config()
    for name, value in schedule.items():
        if name not in known and value:
            raise ConfigError(f"the sampler {sampler} knows no {name}, with which the model was trained; use ddim")
    schedule = {name: value for name, value in schedule.items() if name in known}
    if noise_schedule.rescale_betas_zero_snr:
        schedule["timestep_spacing"] = "trailing"
    return scheduler_class(**schedule, **settings, prediction_type=prediction_type)


class Sampler:
    """One run of a sampler over `num_steps` steps: `timesteps`, `scale_input`, `step`."""

    def __init__(self, name: str, noise_schedule: NoiseSchedule, prediction_type: str, num_steps: int):
        """Raises ConfigError."""
        if not 1 <= num_steps <= noise_schedule.num_train_timesteps:
            raise ConfigError(
                f"--num_inference_steps {num_steps} must be from 1 to {noise_schedule.num_train_timesteps}, the steps "
                "that the model was trained with"
            )
        self.name = name
        self.is_stochastic = name in STOCHASTIC
        self.scheduler = sampling_scheduler(noise_schedule, prediction_type, name)
        self.scheduler.set_timesteps(num_steps)
        self.timesteps = list(self.scheduler.timesteps)
        self.initial_scale = float(self.scheduler.init_noise_sigma)
        self._position = 0

    def scale_input(self, latents, timestep):
        """What the UNet sees of `latents` at `timestep`."""
        return self.scheduler.scale_model_input(latents, timestep)

    def step(self, predicted, timestep, latents, noise=None):
        """Latents one step on. `noise`, standard normal of the latents' shape, where `is_stochastic`."""
        position, self._position = self._position, self._position + 1
        if self.name == "ddpm":
            return self.scheduler.step(predicted, timestep, latents, eta=1.0, variance_noise=noise).prev_sample
        if self.name == "euler-ancestral":
            return self._step_down_and_up(predicted, timestep, latents, noise, position)
        return self.scheduler.step(predicted, timestep, latents).prev_sample

    def _step_down_and_up(self, predicted, timestep, latents, noise, position: int):
        """Karras et al. 2022, algorithm 2, in the form of k-diffusion: to sigma_down without noise, up with it.

        sigma_up**2 = sigma_to**2 (sigma**2 - sigma_to**2) / sigma**2, sigma_down**2 = sigma_to**2 - sigma_up**2.
        """
        clean = self.scheduler.step(predicted, timestep, latents).pred_original_sample
        sigma, target = (float(self.scheduler.sigmas[position + shift]) for shift in (0, 1))
        up = (target**2 * (sigma**2 - target**2) / sigma**2) ** 0.5
        down = (target**2 - up**2) ** 0.5
        return latents + (latents - clean) / sigma * (down - sigma) + paddle.to_tensor(up, dtype="float32") * noise

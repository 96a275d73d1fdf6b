"""The samplers by name, as one kind of object whose every random number is given to it.

ddim            Song et al. 2021 (arXiv:2010.02502) with eta 0, as the published LDM samples
ddpm            Ho et al. 2020 (arXiv:2006.11239) with the small variance, over fewer steps: DDIM with eta 1
pndm            Liu et al. 2022 (arXiv:2202.09778), without its Runge-Kutta start
lms             linear multi-step over sigmas (Karras et al. 2022, arXiv:2206.00364)
euler           Euler's method over the same
euler-ancestral Euler steps down to a smaller sigma, with fresh noise back up
dpm-solver++    Lu et al. 2022 (arXiv:2211.01095), second order, multi-step
flow-euler      Euler's method along rectified flow (Esser et al. 2024, arXiv:2403.03206), of models of flow
"""

import inspect
from types import SimpleNamespace

import numpy as np
import paddle
from ppdiffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    LMSDiscreteScheduler,
    PNDMScheduler,
)

from ..utils.errors import ConfigError
from .process import PUBLISHED_SAMPLING, NoiseSchedule, Process


class _DDPMScheduler(DDIMScheduler):
    """DDIM for eta 1. From noise alone, all of the noise is fresh: rounding must not make 1 - abar - variance negative,
    whose root is no number."""

    def _get_variance(self, timestep, prev_timestep):
        variance = super()._get_variance(timestep, prev_timestep)
        before = self.alphas_cumprod[prev_timestep] if prev_timestep >= 0 else self.final_alpha_cumprod
        while float(1 - before - (1.0 * variance**0.5) ** 2) < 0:
            variance = variance * (1 - 2.0**-23)
        return variance


class _FlowEuler:
    """x + (sigma_next - sigma) predicted, over sigmas from 1 to 0 as diffusers' FlowMatchEulerDiscreteScheduler spaces
    them: evenly between the shifted ends, and shifted. ppdiffusers' class would draw numbers of its own."""

    init_noise_sigma = 1.0

    def __init__(self, schedule: NoiseSchedule, num_steps: int):
        shift, ends = schedule.timestep_shift, schedule.sigmas()[[-1, 0]]
        sigmas = np.linspace(*ends.astype(np.float64), num_steps)
        sigmas = (shift * sigmas / (1 + (shift - 1) * sigmas)).astype(np.float32)
        self.timesteps = paddle.to_tensor(sigmas * np.float32(schedule.num_train_timesteps))
        self.sigmas = np.append(sigmas, np.float32(0))
        self._position = 0

    def scale_model_input(self, latents, timestep):
        """The latents themselves."""
        return latents

    def step(self, predicted, timestep, latents):
        """One step on."""
        self._position += 1
        change = float(self.sigmas[self._position] - self.sigmas[self._position - 1])
        return SimpleNamespace(prev_sample=latents + change * predicted)


FLOW_EULER = "flow-euler"
# Name to scheduler and its settings besides the noise schedule.
SAMPLERS = {
    "ddim": (DDIMScheduler, PUBLISHED_SAMPLING),
    "ddpm": (_DDPMScheduler, {"clip_sample": False, "set_alpha_to_one": True}),
    "pndm": (PNDMScheduler, {"skip_prk_steps": True, "set_alpha_to_one": False, "steps_offset": 1}),
    "lms": (LMSDiscreteScheduler, {}),
    "euler": (EulerDiscreteScheduler, {}),
    "euler-ancestral": (EulerAncestralDiscreteScheduler, {}),
    "dpm-solver++": (
        DPMSolverMultistepScheduler,
        {"algorithm_type": "dpmsolver++", "solver_order": 2, "euler_at_final": True},
    ),
    FLOW_EULER: (_FlowEuler, {}),
}
STOCHASTIC = ("ddpm", "euler-ancestral")
# Those whose classes, of ppdiffusers as of diffusers, do not take a prediction of the picture.
_WITHOUT_SAMPLE = ("pndm", "euler-ancestral")
# These work with sigma = sqrt((1 - abar) / abar), which is infinite where abar is 0: diffusers puts this in its place.
_OVER_SIGMAS = ("euler", "euler-ancestral", "dpm-solver++")
_LEAST_ALPHA_BAR = 2.0**-24


def samplers_of(process: Process) -> list[str]:
    """The samplers that draw what such a model predicts, its default first."""
    if process.is_flow:
        return [FLOW_EULER]
    unfit = (FLOW_EULER, *(_WITHOUT_SAMPLE if process.prediction_type == "sample" else ()))
    return [name for name in SAMPLERS if name not in unfit]


def choose_sampler(sampler: str | None, process: Process) -> str:
    """The sampler of that name, the default of None. Raises ConfigError for one that does not fit the process."""
    fit = samplers_of(process)
    if sampler in (None, *fit):
        return sampler or fit[0]
    if sampler not in SAMPLERS:
        raise ConfigError(f"no sampler {sampler}; known: {', '.join(SAMPLERS)}")
    raise ConfigError(
        f"the sampler {sampler} does not draw with a model of --prediction_type {process.prediction_type}; "
        f"use {', '.join(fit)}"
    )


def sampling_scheduler(process: Process, sampler: str, num_steps: int, stored: dict | None = None):
    """The ppdiffusers scheduler of a sampler, set to `num_steps`. Raises ConfigError where it cannot follow the noise
    schedule of the process.

    `stored`: the sampling settings that the model came with; a sampler takes those that its class has, as diffusers'
    `from_config` does. A schedule that ends in noise alone is sampled from its very last timestep where no
    `timestep_spacing` is stored: arXiv:2305.08891, section 3.3.
    """
    scheduler_class, settings = SAMPLERS[choose_sampler(sampler, process)]
    noise_schedule = process.schedule
    if process.is_flow:
        return _FlowEuler(noise_schedule, num_steps)
    known = inspect.signature(scheduler_class.__init__).parameters
    schedule = noise_schedule.scheduler_config()
    if sampler in _OVER_SIGMAS:
        schedule.pop("rescale_betas_zero_snr", None)
    for name, value in schedule.items():
        if name not in known and value:
            raise ConfigError(f"the sampler {sampler} knows no {name}, with which the model was trained; use ddim")
    if noise_schedule.rescale_betas_zero_snr:
        settings = {**settings, "timestep_spacing": "trailing"}
    # What makes `ddpm` of DDIM is not for a model to say.
    stored = {name: value for name, value in (stored or {}).items() if sampler != "ddpm" or name == "timestep_spacing"}
    settings = {name: value for name, value in {**settings, **schedule, **stored}.items() if name in known}
    settings |= _within_schedule(sampler, scheduler_class, settings, noise_schedule.num_train_timesteps, num_steps)
    scheduler = scheduler_class(**settings, prediction_type=process.prediction_type)
    if noise_schedule.rescale_betas_zero_snr and sampler in _OVER_SIGMAS:
        _end_in_noise(scheduler, noise_schedule)
    scheduler.set_timesteps(num_steps)
    _drop_steps_below_zero(scheduler)
    if sampler == "dpm-solver++":
        # To the picture itself, as diffusers does since 0.25, and not to the first timestep of training.
        scheduler.sigmas = paddle.concat([scheduler.sigmas[:-1], paddle.zeros([1])])
        if bool((scheduler.sigmas.diff() >= 0).any()):
            raise ConfigError(
                f"the sampler dpm-solver++ cannot take {num_steps} steps in a noise schedule that stands still at its "
                "ends; use fewer, or ddim"
            )
    if hasattr(scheduler, "_step_index"):
        scheduler._step_index = 0  # it would look for the first timestep, and where that stands twice take the second
    return scheduler


def _within_schedule(sampler: str, scheduler_class, settings: dict, num_train: int, num_steps: int) -> dict:
    """Settings with which timesteps stay within those of training ("leading" ones are multiples of a step plus an
    offset), and differ."""
    if sampler == "dpm-solver++":  # has one place more, and so two steps at one timestep where all are wanted
        return {"timestep_spacing": "trailing"} if num_steps == num_train else {}
    spacing = inspect.signature(scheduler_class.__init__).parameters["timestep_spacing"].default
    if settings.get("timestep_spacing", spacing) != "leading":
        return {}
    last = (num_steps - 1) * (num_train // num_steps)
    return {"steps_offset": min(settings.get("steps_offset", 0), num_train - 1 - last)}


def _end_in_noise(scheduler, noise_schedule: NoiseSchedule) -> None:
    """Give a scheduler over sigmas the abar of a schedule that ends in noise alone."""
    alpha_bar = noise_schedule.alphas_cumprod()
    alpha_bar[-1] = _LEAST_ALPHA_BAR
    scheduler.alphas_cumprod = paddle.to_tensor(alpha_bar)
    if hasattr(scheduler, "lambda_t"):
        scheduler.alpha_t, scheduler.sigma_t = scheduler.alphas_cumprod**0.5, (1 - scheduler.alphas_cumprod) ** 0.5
        scheduler.lambda_t = paddle.log(scheduler.alpha_t) - paddle.log(scheduler.sigma_t)


def _drop_steps_below_zero(scheduler) -> None:
    """For some numbers of steps (61 of 1,000) rounding gives "trailing" a step too many, at timestep -1."""
    keep = int((scheduler.timesteps >= 0).sum())
    if keep < len(scheduler.timesteps):
        scheduler.timesteps = scheduler.timesteps[:keep]
        scheduler.num_inference_steps = keep
        if hasattr(scheduler, "sigmas"):
            scheduler.sigmas = paddle.concat([scheduler.sigmas[:keep], scheduler.sigmas[-1:]])


class Sampler:
    """One run of a sampler over `num_steps` steps: `timesteps`, `scale_input`, `step`."""

    def __init__(
        self,
        name: str,
        process: Process,
        num_steps: int,
        stored: dict | None = None,
    ):
        """`stored`: sampling settings of the model. Raises ConfigError."""
        if not 1 <= num_steps <= process.num_levels:
            raise ConfigError(
                f"--num_inference_steps {num_steps} must be from 1 to {process.num_levels}, the steps that the model "
                "was trained with"
            )
        self.name = name
        self.is_stochastic = name in STOCHASTIC
        self.scheduler = sampling_scheduler(process, name, num_steps, stored)
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

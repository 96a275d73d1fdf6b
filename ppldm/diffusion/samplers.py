"""The samplers as one kind of object whose every random number is given to it (`drawing` says which there are)."""

import inspect
from typing import Any

from ppdiffusers import DDIMScheduler, PNDMScheduler

from ..utils.errors import ConfigError
from .drawing import FLOW_EULER, Drawing
from .process import PUBLISHED_SAMPLING, Process
from .sigma_samplers import (
    DPMSolver,
    Euler,
    EulerAncestral,
    FlowEuler,
    Heun,
    LinearMultistep,
    OverSigmas,
    StochasticDPMSolver,
    UniPC,
)


class _AnyEtaScheduler(DDIMScheduler):
    """DDIM for any eta. From pure noise all of the noise is fresh with eta 1: rounding must not make
    1 - abar - variance negative, whose root is no number."""

    def _get_variance(self, timestep, prev_timestep):
        variance = super()._get_variance(timestep, prev_timestep)
        before = self.alphas_cumprod[prev_timestep] if prev_timestep >= 0 else self.final_alpha_cumprod
        while float(1 - before - (1.0 * variance**0.5) ** 2) < 0:
            variance = variance * (1 - 2.0**-23)
        return variance


# Name to scheduler of ppdiffusers, and its settings besides the noise schedule.
_SCHEDULED: dict[str, tuple[Any, dict]] = {
    "ddim": (_AnyEtaScheduler, PUBLISHED_SAMPLING),
    "ddpm": (_AnyEtaScheduler, {"clip_sample": False, "set_alpha_to_one": True}),
    "pndm": (PNDMScheduler, {"skip_prk_steps": True, "set_alpha_to_one": False, "steps_offset": 1}),
}
_OVER_SIGMAS = {
    "lms": LinearMultistep,
    "euler": Euler,
    "euler-ancestral": EulerAncestral,
    "heun": Heun,
    "dpm-solver++": DPMSolver,
    "dpm-solver++-sde": StochasticDPMSolver,
    "unipc": UniPC,
    FLOW_EULER: FlowEuler,
}


def make_sampler(process: Process, drawing: Drawing, stored: dict | None = None) -> "OverSigmas | Scheduled":
    """One run of a drawing's sampler. `stored`: the sampling settings that the model came with; a sampler takes those
    that its class has, as diffusers' `from_config` does, and the drawing's own go before. A strength below 1 begins in
    the middle. Raises ConfigError."""
    drawing = drawing.fit(process)
    run = _OVER_SIGMAS.get(drawing.sampler, Scheduled)(process, drawing, stored)
    if skipped := drawing.skipped_steps():
        run.start_at(skipped)
    return run


def sampling_scheduler(process: Process, drawing: Drawing, stored: dict | None = None):
    """The ppdiffusers scheduler of a drawing, set to its steps. Raises ConfigError where it cannot follow the noise
    schedule of the process. A schedule that ends in pure noise is sampled from its very last timestep where no
    `timestep_spacing` is stored or asked for: arXiv:2305.08891, section 3.3.
    """
    sampler, num_steps = drawing.sampler, drawing.num_inference_steps
    scheduler_class, settings = _SCHEDULED[sampler]
    noise_schedule = process.schedule
    known = inspect.signature(scheduler_class.__init__).parameters
    schedule = noise_schedule.scheduler_config()
    for name, value in schedule.items():
        if name not in known and value:
            raise ConfigError(f"the sampler {sampler} knows no {name}, with which the model was trained; use ddim")
    if noise_schedule.rescale_betas_zero_snr:
        settings = {**settings, "timestep_spacing": "trailing"}
    # What makes `ddpm` of DDIM is not for a model to say.
    stored = {name: value for name, value in (stored or {}).items() if sampler != "ddpm" or name == "timestep_spacing"}
    if drawing.timestep_spacing:
        stored["timestep_spacing"] = drawing.timestep_spacing
    settings = {name: value for name, value in {**settings, **schedule, **stored}.items() if name in known}
    settings |= _within_schedule(scheduler_class, settings, noise_schedule.num_train_timesteps, num_steps)
    scheduler = scheduler_class(**settings, prediction_type=process.prediction_type)
    scheduler.set_timesteps(num_steps)
    _drop_steps_below_zero(scheduler)
    return scheduler


def _within_schedule(scheduler_class, settings: dict, num_train: int, num_steps: int) -> dict:
    """Settings with which timesteps stay within those of training ("leading" ones are multiples of a step plus an
    offset), and differ."""
    spacing = inspect.signature(scheduler_class.__init__).parameters["timestep_spacing"].default
    if settings.get("timestep_spacing", spacing) != "leading":
        return {}
    last = (num_steps - 1) * (num_train // num_steps)
    return {"steps_offset": min(settings.get("steps_offset", 0), num_train - 1 - last)}


def _drop_steps_below_zero(scheduler) -> None:
    """For some numbers of steps (61 of 1,000) rounding gives "trailing" a step too many, at timestep -1."""
    keep = int((scheduler.timesteps >= 0).sum())
    if keep < len(scheduler.timesteps):
        scheduler.timesteps = scheduler.timesteps[:keep]
        scheduler.num_inference_steps = keep


class Scheduled:
    """One run of a scheduler of ppdiffusers, as `sigma_samplers.OverSigmas`."""

    passes = 1

    def __init__(self, process: Process, drawing: Drawing, stored: dict | None = None):
        """Raises ConfigError."""
        self.eta, self.is_stochastic = drawing.eta or float(drawing.sampler == "ddpm"), drawing.is_stochastic()
        self.scheduler = sampling_scheduler(process, drawing, stored)
        self.timesteps, self.position = list(self.scheduler.timesteps), 0
        self.initial_scale = float(self.scheduler.init_noise_sigma)

    def start_at(self, step: int) -> None:
        """Leave out the steps before."""
        self.timesteps = self.timesteps[step:]

    def noised(self, latents, noise, number: int):
        """Clean `latents` with as much noise as there is before pass `number` of `timesteps`."""
        alpha_bar = float(self.scheduler.alphas_cumprod[int(self.timesteps[number])])
        return alpha_bar**0.5 * latents + (1 - alpha_bar) ** 0.5 * noise

    def scale_input(self, latents):
        """The latents themselves."""
        return latents

    def step(self, predicted, latents, noise=None):
        """Latents one pass on. `noise`, standard normal of the latents' shape, where `is_stochastic`."""
        timestep, self.position = self.timesteps[self.position], self.position + 1
        more = {"eta": self.eta, "variance_noise": noise} if self.is_stochastic else {}
        return self.scheduler.step(predicted, timestep, latents, **more).prev_sample

"""The samplers as one kind of object whose every random number is given to it (`drawing` says which there are): two
classes of ppdiffusers, and our own over sigma = s_t / a_t, the ratio of noise to picture in x_t = a_t x_0 + s_t noise.

Those go down a ladder of sigmas (`make_ladder`). Those of Karras et al. 2022 (arXiv:2206.00364) know x_t / a_t, so that
noise is added to an unscaled picture, and the network is shown it times a_t; those of DPM-Solver know x_t itself. All
coefficients are Python's floats, so that `step` works with arrays of any kind. The results are those of diffusers'
classes of the same name, of release 0.31; where these are at fault, docs/drawing.md says how ours differ.
"""

import inspect
from typing import Any

import numpy as np
from ppdiffusers import DDIMScheduler, PNDMScheduler

from ..utils.errors import ConfigError
from .drawing import FLOW_EULER, Drawing
from .process import PUBLISHED_SAMPLING, Process, add_noise

# Sigma is infinite where abar is 0: diffusers puts this in its place.
_LEAST_ALPHA_BAR = 2.0**-24
_RHO = 7.0  # equation 5 of arXiv:2206.00364


class _AnyEtaScheduler(DDIMScheduler):
    """DDIM for any eta: with eta 1, rounding must not make 1 - abar - variance negative, whose root is no number."""

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


def _scheduler(process: Process, drawing: Drawing, stored: dict):
    """ppdiffusers' of a drawing, set to its steps. Raises ConfigError where it cannot follow the noise schedule of the
    process. A schedule that ends in pure noise is sampled from its very last timestep where no `timestep_spacing` is
    stored or asked for: arXiv:2305.08891, section 3.3."""
    sampler, num_steps = drawing.sampler, drawing.num_inference_steps
    scheduler_class, settings = _SCHEDULED[sampler]
    known = inspect.signature(scheduler_class.__init__).parameters
    schedule = process.schedule.scheduler_config()
    for name, value in schedule.items():
        if name not in known and value:
            raise ConfigError(f"the sampler {sampler} knows no {name}, with which the model was trained; use ddim")
    if process.schedule.rescale_betas_zero_snr:
        settings = {**settings, "timestep_spacing": "trailing"}
    # What makes `ddpm` of DDIM is not for a model to say.
    stored = {name: value for name, value in stored.items() if sampler != "ddpm" or name == "timestep_spacing"}
    if drawing.timestep_spacing:
        stored["timestep_spacing"] = drawing.timestep_spacing
    settings = {name: value for name, value in {**settings, **schedule, **stored}.items() if name in known}
    if settings.get("timestep_spacing", known["timestep_spacing"].default) == "leading":
        # Multiples of a step plus an offset: within those of training.
        last = (num_steps - 1) * (process.num_levels // num_steps)
        settings["steps_offset"] = min(settings.get("steps_offset", 0), process.num_levels - 1 - last)
    scheduler = scheduler_class(**settings, prediction_type=process.prediction_type)
    scheduler.set_timesteps(num_steps)
    # For some numbers of steps (61 of 1,000) rounding gives "trailing" a step too many, at timestep -1.
    keep = int((scheduler.timesteps >= 0).sum())
    if keep < len(scheduler.timesteps):
        scheduler.timesteps = scheduler.timesteps[:keep]
        scheduler.num_inference_steps = keep
    return scheduler


class Scheduled:
    """One run of a scheduler of ppdiffusers, with the methods of `OverSigmas`."""

    passes = 1

    def __init__(self, process: Process, drawing: Drawing, stored: dict):
        """Raises ConfigError."""
        self.eta, self.is_stochastic = drawing.eta or float(drawing.sampler == "ddpm"), drawing.is_stochastic()
        self.scheduler = _scheduler(process, drawing, stored)
        self.timesteps, self.position = list(self.scheduler.timesteps), 0
        self.initial_scale = float(self.scheduler.init_noise_sigma)

    def start_at(self, step: int) -> None:
        self.timesteps = self.timesteps[step:]

    def scales_at(self, number: int) -> tuple[float, float]:
        alpha_bar = float(self.scheduler.alphas_cumprod[int(self.timesteps[number])])
        return alpha_bar**0.5, (1 - alpha_bar) ** 0.5

    def scale_input(self, latents):
        return latents

    def step(self, predicted, latents, noise=None):
        """Latents one pass on. `noise`, standard normal of the latents' shape, where `is_stochastic`."""
        timestep, self.position = self.timesteps[self.position], self.position + 1
        more = {"eta": self.eta, "variance_noise": noise} if self.is_stochastic else {}
        return self.scheduler.step(predicted, timestep, latents, **more).prev_sample


def make_ladder(
    process: Process, drawing: Drawing, stored: dict, multistep: bool
) -> tuple[np.ndarray, np.ndarray, float]:
    """(timesteps [n] float64, falling; sigmas [n + 1] float64, falling to 0; of the noise that latents start from, the
    scale). multistep: as those of DPM-Solver, which know x_t itself, have one place more, leave out the last one, and
    know whole timesteps alone."""
    num_steps, num_train = drawing.num_inference_steps, process.num_levels
    alpha_bar = process.schedule.alphas_cumprod().astype(np.float64)
    zero_snr = process.schedule.rescale_betas_zero_snr
    if zero_snr:
        alpha_bar[-1] = _LEAST_ALPHA_BAR
    levels = ((1 - alpha_bar) / alpha_bar) ** 0.5
    # A schedule that ends in pure noise is sampled from its very last timestep: arXiv:2305.08891, section 3.3.
    usual = "trailing" if zero_snr else "linspace"
    spacing = drawing.timestep_spacing or stored.get("timestep_spacing", usual)
    if multistep and num_steps == num_train:
        spacing = "trailing"  # two of its steps would be at one timestep
    timesteps = _spaced(spacing, num_steps, num_train, stored.get("steps_offset", 0), multistep)
    sigmas = np.interp(timesteps, np.arange(num_train), levels)
    if drawing.sigma_schedule:
        ends = (levels[-1], levels[0]) if multistep else (sigmas[0], sigmas[-1])
        if drawing.sigma_schedule == "exponential":  # evenly in log sigma
            sigmas = np.exp(np.linspace(np.log(ends[0]), np.log(ends[1]), num_steps))
        else:  # evenly in sigma ** (1 / 7)
            sigmas = np.linspace(ends[0] ** (1 / _RHO), ends[1] ** (1 / _RHO), num_steps) ** _RHO
        timesteps = np.interp(np.log(sigmas), np.log(levels), np.arange(num_train))
        timesteps = timesteps.round() if multistep else timesteps
    largest = float(sigmas.max())
    scale = largest if spacing in ("linspace", "trailing") else (largest**2 + 1) ** 0.5
    return timesteps, np.append(sigmas, 0.0), 1.0 if multistep else scale


def _spaced(spacing: str, num_steps: int, num_train: int, offset: int, multistep: bool) -> np.ndarray:
    """Timesteps [num_steps], falling: table 2 of arXiv:2305.08891."""
    more = num_steps + multistep
    if spacing == "linspace":
        timesteps = np.linspace(0, num_train - 1, more)[::-1][:num_steps]
        return timesteps.round() if multistep else timesteps
    if spacing == "leading":
        timesteps = np.arange(more)[::-1][:num_steps] * (num_train // more)
        return timesteps + min(offset, num_train - 1 - timesteps[0])  # within those of training
    # For some numbers of steps (61 of 1,000) rounding gives one too many, at timestep -1.
    return np.arange(num_train, 0, -num_train / num_steps)[:num_steps].round() - 1.0


class OverSigmas:
    """One run: `timesteps` of each pass through the network, `initial_scale` of noise, and `step` from pass to pass.
    begin: how many passes are left out at the start. scales: (a, s) of a x_0 + s noise, what latents are at a sigma."""

    is_stochastic = multistep = False
    passes = 1  # through the network, of a step
    whole_steps = False  # whether equal sigmas divide by nothing

    def __init__(self, process: Process, drawing: Drawing, stored: dict):
        """Raises ConfigError for a ladder with equal sigmas, where the method cannot take them."""
        self.stored, self.process = stored, process
        self.begin, self.position, self.past = 0, 0, []
        timesteps, sigmas, self.initial_scale = self.ladder(process, drawing)
        if self.whole_steps and (np.diff(sigmas) >= 0).any():
            raise ConfigError(
                f"the sampler {drawing.sampler} cannot take {drawing.num_inference_steps} steps in a noise schedule "
                "that stands still at its ends; use fewer, or ddim"
            )
        self.timesteps = list(timesteps.astype(np.int64 if self.multistep else np.float32))
        self.sigmas = [float(one) for one in sigmas]

    def ladder(self, process: Process, drawing: Drawing):
        """As of `make_ladder`."""
        return make_ladder(process, drawing, self.stored, self.multistep)

    def scales(self, sigma: float) -> tuple[float, float]:
        return 1.0, sigma

    def start_at(self, step: int) -> None:
        """Leave out the steps before."""
        self.begin = self.position = step * self.passes
        self.timesteps = self.timesteps[self.begin :]

    def scales_at(self, number: int) -> tuple[float, float]:
        """(a, s) of what latents are before pass `number` of `timesteps`, from 0."""
        return self.scales(self.sigmas[self.begin + number])

    def scale_input(self, latents):
        """What the network sees of `latents`."""
        return latents / (self.sigmas[self.position] ** 2 + 1) ** 0.5

    def step(self, predicted, latents, noise=None):
        """Latents one pass on. `noise`, standard normal of the latents' shape, where `is_stochastic`."""
        sigma, below = self.sigmas[self.position], self.sigmas[self.position + 1]
        latents = self.move(self.picture(predicted, latents, sigma), latents, sigma, below, noise)
        self.position += 1
        return latents

    def picture(self, predicted, latents, sigma: float):
        """x_0 of a prediction."""
        if self.process.prediction_type == "epsilon":
            return latents - sigma * predicted
        if self.process.prediction_type == "v_prediction":
            return latents / (sigma**2 + 1) - predicted * (sigma / (sigma**2 + 1) ** 0.5)
        return predicted

    def move(self, picture, latents, sigma: float, below: float, noise):
        """From one sigma to the one below it."""
        raise NotImplementedError


class Euler(OverSigmas):
    """Along (x - x_0) / sigma."""

    def move(self, picture, latents, sigma, below, noise):
        return latents + (latents - picture) / sigma * (below - sigma)


class EulerAncestral(OverSigmas):
    """Karras et al. 2022, algorithm 2, in the form of k-diffusion: to sigma_down without noise, up with it. sigma_up**2
    = sigma_to**2 (sigma**2 - sigma_to**2) / sigma**2, sigma_down**2 = sigma_to**2 - sigma_up**2."""

    is_stochastic = True

    def move(self, picture, latents, sigma, below, noise):
        up = (below**2 * (sigma**2 - below**2) / sigma**2) ** 0.5
        down = (below**2 - up**2) ** 0.5
        return latents + (latents - picture) / sigma * (down - sigma) + up * noise


class Heun(OverSigmas):
    """Second order: Euler's step, and again along the mean of the directions at both of its ends; the last one, to 0,
    is Euler's (arXiv:2206.00364, algorithm 1 without churn)."""

    passes = 2

    def __init__(self, process: Process, drawing: Drawing, stored: dict):
        super().__init__(process, drawing, stored)
        self.timesteps = [self.timesteps[0], *(one for one in self.timesteps[1:] for _ in range(2))]
        self.sigmas = [self.sigmas[0], *(one for one in self.sigmas[1:-1] for _ in range(2)), self.sigmas[-1]]

    def move(self, picture, latents, sigma, below, noise):
        """First half: `past` then holds the direction, the latents and the change; second half."""
        if self.stored.get("clip_sample"):
            span = self.stored.get("clip_sample_range", 1.0)
            picture = picture.clip(-span, span)
        direction = (latents - picture) / sigma
        if self.past:
            before, start, change = self.past
            self.past = []
            return start + (before + direction) / 2 * change
        change = below - sigma
        self.past = [direction, latents, change] if below else []
        return latents + direction * change


class LinearMultistep(OverSigmas):
    """The last four directions, by the polynomial through them."""

    order, whole_steps = 4, True

    def move(self, picture, latents, sigma, below, noise):
        self.past = [(latents - picture) / sigma, *self.past][: self.order]
        for share, direction in zip(self._shares(len(self.past)), self.past, strict=True):
            latents = latents + share * direction
        return latents

    def _shares(self, count: int) -> list[float]:
        """The integral from this sigma to the next of each Lagrange polynomial: Gauss' rule of two points is exact for
        their third degree."""
        start, end = self.sigmas[self.position], self.sigmas[self.position + 1]
        nodes = [self.sigmas[self.position - number] for number in range(count)]
        shares = [0.0] * count
        for side in (-1, 1):
            place = (start + end) / 2 + side * (end - start) / 2 / 3**0.5
            for number, node in enumerate(nodes):
                factors = [(place - other) / (node - other) for other in nodes if other != node]
                shares[number] += (end - start) / 2 * float(np.prod(factors))
        return shares


class DPMSolver(OverSigmas):
    """DPM-Solver++ (2M) of Lu et al. 2022 (arXiv:2211.01095), algorithm 2; its first and last steps are of first order,
    the last one to the picture itself."""

    multistep = whole_steps = True

    def scales(self, sigma: float) -> tuple[float, float]:
        a = 1 / (sigma**2 + 1) ** 0.5
        return a, sigma * a

    def scale_input(self, latents):
        return latents

    def picture(self, predicted, latents, sigma: float):
        """x_0 of a prediction, within bounds where the model asks for them."""
        picture = self.process.picture(predicted, latents, self.scales(sigma))
        return self._threshold(picture) if self.stored.get("thresholding") else picture

    def _threshold(self, picture):
        """Dynamic thresholding: Saharia et al. 2022 (arXiv:2205.11487), section 2.3."""
        ratio, most = self.stored.get("dynamic_thresholding_ratio", 0.995), self.stored.get("sample_max_value", 1.0)
        spans = picture.abs().flatten(1).quantile(ratio, 1).astype("float32").clip(1.0, most).reshape([-1, 1, 1, 1])
        return picture.minimum(spans).maximum(-spans) / spans

    def move(self, picture, latents, sigma, below, noise):
        latents = self.descend(self._ahead(picture), latents, sigma, below, noise)
        self.past = [picture]
        return latents

    def _ahead(self, picture):
        """x_0 half a step ahead, as it went from the step before to this one."""
        if not self.past or not self.sigmas[self.position + 1]:
            return picture
        before, now, after = self.sigmas[self.position - 1 : self.position + 2]
        return picture + float(np.log(now / after) / np.log(before / now)) / 2 * (picture - self.past[0])

    def descend(self, picture, latents, sigma, below, noise):
        """The exact solution for a constant x_0."""
        (_, s), (a_below, s_below) = self.scales(sigma), self.scales(below)
        return s_below / s * latents + a_below * (1 - below / sigma) * picture


class StochasticDPMSolver(DPMSolver):
    """The same of the stochastic equation (arXiv:2211.01095, appendix C): SDE-DPM-Solver++ (2M)."""

    is_stochastic = True

    def descend(self, picture, latents, sigma, below, noise):
        """The exact solution for a constant x_0."""
        (_, s), (a_below, s_below), ratio = self.scales(sigma), self.scales(below), below / sigma
        kept = s_below / s * ratio * latents + a_below * (1 - ratio**2) * picture
        return kept + s_below * (1 - ratio**2) ** 0.5 * noise


class UniPC(DPMSolver):
    """Zhao et al. 2023 (arXiv:2302.04867), of second order with B(h) = exp(h) - 1: a step of DPM-Solver++, which the
    next prediction corrects."""

    _came_from = None

    def move(self, picture, latents, sigma, below, noise):
        """Correct what the last pass gave, and go on from there."""
        if self.past:
            latents = self._corrected(picture, sigma)
        self._came_from = latents
        ahead = self._ahead(picture)
        self.past = [picture, *self.past][:2]
        return self.descend(ahead, latents, sigma, below, noise)

    def _corrected(self, picture, sigma: float):
        """The latents at `sigma` once more, from those before, the pictures at both ends, and the one before them."""
        above = self.sigmas[self.position - 1]
        (_, s_above), (a, s) = self.scales(above), self.scales(sigma)
        h = float(np.log(above / sigma))
        fall = sigma / above - 1  # exp(-h) - 1
        change = 0.5 * (picture - self.past[0])
        if len(self.past) > 1:
            ratio = float(np.log(above / self.sigmas[self.position - 2])) / h
            first = fall / -h - 1
            second = first / -h - 0.5
            shares = np.linalg.solve([[1.0, 1.0], [ratio, 1.0]], [first / fall, second * 2 / fall])
            change = float(shares[0]) / ratio * (self.past[1] - self.past[0])
            change = change + float(shares[1]) * (picture - self.past[0])
        return s / s_above * self._came_from - a * fall * (self.past[0] + change)


class FlowEuler(Euler):
    """Along rectified flow: x + (sigma_next - sigma) predicted, over sigmas from 1 to 0 as diffusers'
    FlowMatchEulerDiscreteScheduler spaces them: evenly between the shifted ends, and shifted."""

    def ladder(self, process: Process, drawing: Drawing):
        shift, ends = process.schedule.timestep_shift, process.schedule.sigmas()[[-1, 0]]
        sigmas = np.linspace(float(ends[0]), float(ends[1]), drawing.num_inference_steps)
        sigmas = (shift * sigmas / (1 + (shift - 1) * sigmas)).astype(np.float32)
        return sigmas * np.float32(process.num_levels), np.append(sigmas, 0.0), 1.0

    def scales(self, sigma: float) -> tuple[float, float]:
        return 1 - sigma, sigma

    def scale_input(self, latents):
        return latents

    def move(self, picture, latents, sigma, below, noise):
        """picture: here the predicted direction."""
        return latents + (below - sigma) * picture


def consistency(process: Process, predicted, noisy, scales, timesteps):
    """c_skip x_t + c_out x_0 of a prediction: where the way from x_t ends by a consistency model, at timestep 0 x_t.
    The factors are those of latent consistency models, by diffusers 0.31: u = 10 t, deviation 1/2 of data."""
    time = timesteps * 10.0
    square = time * time + 0.25
    return 0.25 / square * noisy + time / square**0.5 * process.picture(predicted, noisy, scales)


class LatentConsistency(OverSigmas):
    """x_0 by a consistency model, then down to a lower level with fresh noise, and again (Luo et al. 2023,
    arXiv:2310.04378); evenly over 50 levels, or as many as there are steps. Its `sigmas` are the levels' numbers, and
    -1 for the end."""

    is_stochastic = True

    def ladder(self, process: Process, drawing: Drawing):
        count = min(max(50, drawing.num_inference_steps), process.num_levels)
        grid = np.arange(count, 0, -1) * (process.num_levels // count) - 1
        places = grid[np.linspace(0, count, drawing.num_inference_steps, endpoint=False).astype(np.int64)]
        return process.times(places, process.levels()[places]), np.append(places, -1), 1.0

    def scales(self, sigma: float) -> tuple[float, float]:
        return self.process.scales(float(self.process.levels()[int(sigma)]))

    def scale_input(self, latents):
        return latents

    def picture(self, predicted, latents, sigma: float):
        return consistency(self.process, predicted, latents, self.scales(sigma), sigma)

    def move(self, picture, latents, sigma, below, noise):
        return picture if below < 0 else add_noise(picture, noise, self.scales(below))


_OVER_SIGMAS: dict[str, type[OverSigmas]] = {
    "lms": LinearMultistep,
    "euler": Euler,
    "euler-ancestral": EulerAncestral,
    "heun": Heun,
    "dpm-solver++": DPMSolver,
    "dpm-solver++-sde": StochasticDPMSolver,
    "unipc": UniPC,
    FLOW_EULER: FlowEuler,
    "lcm": LatentConsistency,
}


def make_sampler(process: Process, drawing: Drawing, stored: dict | None = None) -> OverSigmas | Scheduled:
    """One run of a drawing's sampler. `stored`: the sampling settings that the model came with, of which it takes those
    that its class has, and the drawing's own go before. A strength below 1 begins in the middle. Raises ConfigError."""
    drawing = drawing.fit(process)
    run = _OVER_SIGMAS.get(drawing.sampler, Scheduled)(process, drawing, stored or {})
    if skipped := drawing.skipped_steps():
        run.start_at(skipped)
    return run

"""Samplers over sigma = s_t / a_t, the ratio of noise to picture in x_t = a_t x_0 + s_t noise.

Each goes down a `Ladder` of them. Those of Karras et al. 2022 (arXiv:2206.00364) know x_t / a_t, so that noise is added
to an unscaled picture, and the network is shown it times a_t; those of DPM-Solver know x_t itself. All coefficients are
Python's floats, so that `step` works with arrays of any kind. The results are those of diffusers' classes of the same
name, of release 0.31; where these are at fault, docs/drawing.md says how ours differ.
"""

from dataclasses import dataclass

import numpy as np

from ..utils.errors import ConfigError
from .drawing import Drawing
from .process import Process

# Sigma is infinite where abar is 0: diffusers puts this in its place.
_LEAST_ALPHA_BAR = 2.0**-24
_RHO = 7.0  # equation 5 of arXiv:2206.00364


@dataclass(frozen=True)
class Ladder:
    """timesteps [n] float64, falling; sigmas [n + 1] float64, falling to 0. initial_scale: of the noise that x_t / a_t
    starts from."""

    timesteps: np.ndarray
    sigmas: np.ndarray
    initial_scale: float


def make_ladder(process: Process, drawing: Drawing, stored: dict, multistep: bool) -> Ladder:
    """multistep: as those of DPM-Solver, which have one place more, leave out the last one, and know whole timesteps
    alone."""
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
        sigmas = _respaced(drawing.sigma_schedule, *ends, num_steps)
        timesteps = np.interp(np.log(sigmas), np.log(levels), np.arange(num_train))
        timesteps = timesteps.round() if multistep else timesteps
    largest = float(sigmas.max())
    scale = largest if spacing in ("linspace", "trailing") else (largest**2 + 1) ** 0.5
    return Ladder(timesteps, np.append(sigmas, 0.0), scale)


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


def _respaced(sigma_schedule: str, largest: float, least: float, num_steps: int) -> np.ndarray:
    """Sigmas [num_steps] between both: evenly in sigma ** (1 / 7), or in log sigma."""
    if sigma_schedule == "exponential":
        return np.exp(np.linspace(np.log(largest), np.log(least), num_steps))
    return np.linspace(largest ** (1 / _RHO), least ** (1 / _RHO), num_steps) ** _RHO


class OverSigmas:
    """One run: `timesteps` of each pass through the network, `initial_scale` of noise, and `step` from pass to pass.
    begin: how many passes are left out at the start."""

    is_stochastic = multistep = False
    passes = 1  # through the network, of a step
    whole_steps = False  # whether equal sigmas divide by nothing

    def __init__(self, process: Process, drawing: Drawing, stored: dict | None = None):
        """Raises ConfigError for a ladder with equal sigmas, where the method cannot take them."""
        self.stored, self.prediction_type = stored or {}, process.prediction_type
        ladder = make_ladder(process, drawing, self.stored, self.multistep)
        if self.whole_steps and (np.diff(ladder.sigmas) >= 0).any():
            raise ConfigError(
                f"the sampler {drawing.sampler} cannot take {drawing.num_inference_steps} steps in a noise schedule "
                "that stands still at its ends; use fewer, or ddim"
            )
        self.timesteps = list(ladder.timesteps.astype(np.int64 if self.multistep else np.float32))
        self.sigmas = [float(one) for one in ladder.sigmas]
        self.initial_scale, self.begin, self.position = ladder.initial_scale, 0, 0
        self.past: list = []

    def start_at(self, step: int) -> None:
        """Leave out the steps before."""
        self.begin = self.position = step * self.passes
        self.timesteps = self.timesteps[self.begin :]

    def noised(self, latents, noise, number: int):
        """Clean `latents` with as much noise as there is before pass `number` of `timesteps`."""
        return latents + self.sigmas[self.begin + number] * noise

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
        if self.prediction_type == "epsilon":
            return latents - sigma * predicted
        if self.prediction_type == "v_prediction":
            return latents / (sigma**2 + 1) - predicted * (sigma / (sigma**2 + 1) ** 0.5)
        return predicted

    def move(self, picture, latents, sigma: float, below: float, noise):
        """From one sigma to the one below it."""
        raise NotImplementedError


class Euler(OverSigmas):
    """Along (x - x_0) / sigma."""

    def move(self, picture, latents, sigma, below, noise):
        """One step."""
        return latents + (latents - picture) / sigma * (below - sigma)


class EulerAncestral(OverSigmas):
    """Karras et al. 2022, algorithm 2, in the form of k-diffusion: to sigma_down without noise, up with it.

    sigma_up**2 = sigma_to**2 (sigma**2 - sigma_to**2) / sigma**2, sigma_down**2 = sigma_to**2 - sigma_up**2.
    """

    is_stochastic = True

    def move(self, picture, latents, sigma, below, noise):
        """One step."""
        up = (below**2 * (sigma**2 - below**2) / sigma**2) ** 0.5
        down = (below**2 - up**2) ** 0.5
        return latents + (latents - picture) / sigma * (down - sigma) + up * noise


class Heun(OverSigmas):
    """Second order: Euler's step, and again along the mean of the directions at both of its ends; the last one, to 0,
    is Euler's (arXiv:2206.00364, algorithm 1 without churn)."""

    passes = 2

    def __init__(self, process: Process, drawing: Drawing, stored: dict | None = None):
        """As its base."""
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
        """One step."""
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

    def __init__(self, process: Process, drawing: Drawing, stored: dict | None = None):
        """As its base."""
        super().__init__(process, drawing, stored)
        self.initial_scale = 1.0

    def noised(self, latents, noise, number: int):
        """a x_0 + s noise."""
        a, s = _scales(self.sigmas[self.begin + number])
        return a * latents + s * noise

    def scale_input(self, latents):
        """The latents themselves."""
        return latents

    def picture(self, predicted, latents, sigma: float):
        """x_0 of a prediction, within bounds where the model asks for them."""
        a, s = _scales(sigma)
        if self.prediction_type == "epsilon":
            picture = (latents - s * predicted) / a
        elif self.prediction_type == "v_prediction":
            picture = a * latents - s * predicted
        else:
            picture = predicted
        return self._threshold(picture) if self.stored.get("thresholding") else picture

    def _threshold(self, picture):
        """Dynamic thresholding: Saharia et al. 2022 (arXiv:2205.11487), section 2.3."""
        ratio, most = self.stored.get("dynamic_thresholding_ratio", 0.995), self.stored.get("sample_max_value", 1.0)
        spans = picture.abs().flatten(1).quantile(ratio, 1).astype("float32").clip(1.0, most).reshape([-1, 1, 1, 1])
        return picture.minimum(spans).maximum(-spans) / spans

    def move(self, picture, latents, sigma, below, noise):
        """One step."""
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
        (_, s), (a_below, s_below) = _scales(sigma), _scales(below)
        return s_below / s * latents + a_below * (1 - below / sigma) * picture


class StochasticDPMSolver(DPMSolver):
    """The same of the stochastic equation (arXiv:2211.01095, appendix C): SDE-DPM-Solver++ (2M)."""

    is_stochastic = True

    def descend(self, picture, latents, sigma, below, noise):
        """The exact solution for a constant x_0."""
        (_, s), (a_below, s_below), ratio = _scales(sigma), _scales(below), below / sigma
        kept = s_below / s * ratio * latents + a_below * (1 - ratio**2) * picture
        return kept + s_below * (1 - ratio**2) ** 0.5 * noise


class UniPC(DPMSolver):
    """Zhao et al. 2023 (arXiv:2302.04867), of second order with B(h) = exp(h) - 1: a step of DPM-Solver++, which the
    next prediction corrects."""

    def __init__(self, process: Process, drawing: Drawing, stored: dict | None = None):
        """As its base."""
        super().__init__(process, drawing, stored)
        self._came_from = None

    def step(self, predicted, latents, noise=None):
        """Correct what the last pass gave, and go on from there."""
        sigma, below = self.sigmas[self.position], self.sigmas[self.position + 1]
        picture = self.picture(predicted, latents, sigma)
        if self.past:
            latents = self._corrected(picture, sigma)
        self._came_from = latents
        ahead = self._ahead(picture)
        self.past = [picture, *self.past][:2]
        self.position += 1
        return self.descend(ahead, latents, sigma, below, noise)

    def _corrected(self, picture, sigma: float):
        """The latents at `sigma` once more, from those before, the pictures at both ends, and the one before them."""
        above = self.sigmas[self.position - 1]
        (_, s_above), (a, s) = _scales(above), _scales(sigma)
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


def _scales(sigma: float) -> tuple[float, float]:
    """(a, s) of x_t = a x_0 + s noise."""
    a = 1 / (sigma**2 + 1) ** 0.5
    return a, sigma * a


class FlowEuler(Euler):
    """Along rectified flow: x + (sigma_next - sigma) predicted, over sigmas from 1 to 0 as diffusers'
    FlowMatchEulerDiscreteScheduler spaces them: evenly between the shifted ends, and shifted."""

    def __init__(self, process: Process, drawing: Drawing, stored: dict | None = None):
        """As its base."""
        shift, ends = process.schedule.timestep_shift, process.schedule.sigmas()[[-1, 0]]
        sigmas = np.linspace(float(ends[0]), float(ends[1]), drawing.num_inference_steps)
        sigmas = (shift * sigmas / (1 + (shift - 1) * sigmas)).astype(np.float32)
        self.timesteps, self.sigmas = list(sigmas * np.float32(process.num_levels)), [*map(float, sigmas), 0.0]
        self.initial_scale, self.begin, self.position = 1.0, 0, 0

    def noised(self, latents, noise, number: int):
        """(1 - sigma) x_0 + sigma noise."""
        sigma = self.sigmas[self.begin + number]
        return (1 - sigma) * latents + sigma * noise

    def scale_input(self, latents):
        """The latents themselves."""
        return latents

    def step(self, predicted, latents, noise=None):
        """One step on."""
        self.position += 1
        return latents + (self.sigmas[self.position] - self.sigmas[self.position - 1]) * predicted

"""How a picture is drawn, whatever model, prompt, seed and size: one `Drawing`; and the samplers by name.

ddim            Song et al. 2021 (arXiv:2010.02502); with eta 0, as the published LDM samples, unless another is given
ddpm            Ho et al. 2020 (arXiv:2006.11239) with the small variance, over fewer steps: DDIM with eta 1
pndm            Liu et al. 2022 (arXiv:2202.09778), without its Runge-Kutta start
lms             linear multi-step over sigmas (Karras et al. 2022, arXiv:2206.00364)
euler           Euler's method over the same
euler-ancestral Euler steps down to a smaller sigma, with fresh noise back up; also `euler-a`
heun            Heun's method over the same, of second order: two passes through the network a step
dpm-solver++    Lu et al. 2022 (arXiv:2211.01095), second order, multi-step
dpm-solver++-sde the same of the stochastic equation
unipc           Zhao et al. 2023 (arXiv:2302.04867), second order, with a corrector
flow-euler      Euler's method along rectified flow (Esser et al. 2024, arXiv:2403.03206), of models of flow
lcm             Luo et al. 2023 (arXiv:2310.04378), of models that learned to draw in few steps (`methods.consistency`)

No paddle is needed here, so that what is wrong is said before anything is loaded.
"""

import math
import numbers
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace

from ..utils.errors import ConfigError, ModelError
from ..utils.text import did_you_mean
from .process import TIMESTEP_SPACINGS, Process

FLOW_EULER, LCM = "flow-euler", "lcm"
SAMPLERS = ("ddim", "ddpm", "pndm", "lms", "euler", "euler-ancestral", "heun", "dpm-solver++", "dpm-solver++-sde",
            "unipc", FLOW_EULER, LCM)  # fmt: skip
ALIASES = {"euler-a": "euler-ancestral", "euler-ancest": "euler-ancestral"}
SIGMA_SCHEDULES = ("karras", "exponential")
STOCHASTIC = ("ddpm", "euler-ancestral", "dpm-solver++-sde", LCM)
# Those whose classes of diffusers do not take a prediction of the picture.
_WITHOUT_SAMPLE = ("pndm", "euler-ancestral")
_WITH_SIGMAS = ("lms", "euler", "euler-ancestral", "heun", "dpm-solver++", "dpm-solver++-sde", "unipc")
MOST_GUIDANCE = 50.0  # that a model may say, and a request
KEPT = ("guidance_scale", "num_inference_steps", "sampler")  # with a model; every picture states them


@dataclass(frozen=True)
class Drawing:
    """sampler: a name of `SAMPLERS`. num_inference_steps: from 1 to as many as the model was trained with.
    guidance_scale: how strongly to follow the prompt; 1 is not guided. Where one of these is None, the model's default
    holds; where it names no sampler, ddim, or flow-euler for flow. guidance_rescale: 0 .. 1, how much of the deviation
    that guidance adds is taken back (Lin et al. 2023, arXiv:2305.08891, section 3.4). eta: 0 .. 1, the share of fresh
    noise of ddim. timestep_spacing: one of `TIMESTEP_SPACINGS`; None: as the model says, or the sampler does.
    sigma_schedule: one of `SIGMA_SCHEDULES`; None: as in the training. strength: above 0 .. 1, with a picture to begin
    from: the share of the steps that are taken. guidance_interval: (LOW, HIGH) in 0 .. 1, shares of noise where it is
    guided (`methods.guidance_interval`); None: all. cfg_zero: guided by `methods.cfg_zero`, of flow."""

    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    sampler: str | None = None
    guidance_rescale: float = 0.0
    eta: float = 0.0
    timestep_spacing: str | None = None
    sigma_schedule: str | None = None
    strength: float = 1.0
    guidance_interval: tuple[float, float] | None = None
    cfg_zero: bool = False

    def __post_init__(self):
        if isinstance(self.guidance_interval, list):  # of JSON
            object.__setattr__(self, "guidance_interval", tuple(self.guidance_interval))

    def check(self) -> None:
        """Raises ConfigError for what no model can be drawn with."""
        steps = self.num_inference_steps
        if steps is not None and (isinstance(steps, bool) or not isinstance(steps, numbers.Integral)):
            raise ConfigError(f"--num_inference_steps {steps!r} is not a whole number")
        if steps is not None and steps < 1:
            raise ConfigError(f"--num_inference_steps {steps} must be above 0")
        for name in ("guidance_scale", "guidance_rescale", "eta", "strength"):
            value, usual = getattr(self, name), getattr(USUAL, name)
            if value is None and name == "guidance_scale":
                continue
            if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
                raise ConfigError(f"--{name} {value} is not a number; {usual:g} is usual")
            if name != "guidance_scale" and not 0 <= value <= 1:
                raise ConfigError(f"--{name} {value:g} must be from 0 to 1")
        for name, known in (
            ("sampler", (*SAMPLERS, *ALIASES)),
            ("timestep_spacing", TIMESTEP_SPACINGS),
            ("sigma_schedule", SIGMA_SCHEDULES),
        ):
            if (value := getattr(self, name)) is not None and not (isinstance(value, str) and value in known):
                near = did_you_mean(str(value), known, listing=False)
                raise ConfigError(f"--{name} {value} is not one of {', '.join(known)}{near and f'; {near}'}")
        self._check_guidance()
        if not self.strength or (steps and self.skipped_steps() == steps):
            raise ConfigError(
                f"--strength {self.strength:g} of {steps or 'any number of'} steps leaves none to take; raise either"
            )
        if self.sampler:
            self._check_fit(ALIASES.get(self.sampler, self.sampler))

    def _check_guidance(self) -> None:
        """Raises ConfigError for what no guidance is."""
        interval = self.guidance_interval
        if interval is not None:
            is_pair = isinstance(interval, tuple) and len(interval) == 2
            if not is_pair or not all(_is_within(one, 0, 1) for one in interval) or interval[0] > interval[1]:
                shown = str(interval)[:60]
                raise ConfigError(f"--guidance_interval {shown!r} must be two shares of noise from 0 to 1, as 0.2 0.8")
        if not isinstance(self.cfg_zero, bool):
            raise ConfigError(f"--cfg_zero {str(self.cfg_zero)[:60]!r} is neither true nor false")
        if self.cfg_zero and self.num_inference_steps == 1:
            raise ConfigError(
                "--cfg_zero leaves out the first step, and --num_inference_steps 1 has no other; raise it"
            )

    def fit(self, process: Process, usual: "Drawing | None" = None) -> "Drawing":
        """The same for a model of this process, with what its `usual` drawing says where this says none. Raises
        ConfigError where they do not go together."""
        usual = usual or USUAL
        found = replace(self, **{name: getattr(usual, name) for name in KEPT if getattr(self, name) is None})
        found.check()
        if found.num_inference_steps > process.num_levels:
            raise ConfigError(
                f"--num_inference_steps {found.num_inference_steps} must be from 1 to {process.num_levels}, the steps "
                "that the model was trained with"
            )
        found = replace(found, sampler=choose_sampler(found.sampler, process))
        found._check_fit(found.sampler)
        return found

    def _check_fit(self, sampler: str) -> None:
        """Raises ConfigError for a setting that the sampler does not have."""
        if self.eta and sampler != "ddim":
            raise ConfigError(f"--eta {self.eta:g} is for the sampler ddim, and {sampler} has none; omit it")
        if self.cfg_zero and sampler != FLOW_EULER:
            raise ConfigError(f"--cfg_zero scales the direction of flow, and {sampler} is for other models; omit it")
        if self.timestep_spacing and sampler in (FLOW_EULER, LCM):
            raise ConfigError(f"--timestep_spacing is not for {sampler}, which spaces its steps itself; omit it")
        if self.sigma_schedule and sampler not in _WITH_SIGMAS:
            raise ConfigError(
                f"the sampler {sampler} takes no {self.sigma_schedule} sigmas; use {' or '.join(_WITH_SIGMAS)}"
            )

    def skipped_steps(self) -> int:
        """How many steps `strength` leaves out at the start."""
        return self.num_inference_steps - int(self.num_inference_steps * self.strength)

    def num_passes(self) -> int:
        """Through the network, of the sampler once it is chosen; a guided one counts once."""
        steps = self.num_inference_steps - self.skipped_steps()
        if self.sampler == "heun":
            return 2 * steps - 1
        return steps + (self.sampler == "pndm" and self.num_inference_steps > 1)

    def is_stochastic(self) -> bool:
        """Whether the sampler, once chosen, takes fresh noise at each step."""
        return self.sampler in STOCHASTIC or self.eta > 0

    def as_dict(self) -> dict:
        """All of it that decides a picture, JSON-ready: sampler, steps, scale, and what else is not the default."""
        values = {name: list(one) if isinstance(one, tuple) else one for name, one in asdict(self).items()}
        return {one.name: values[one.name] for one in fields(self)
                if one.name in KEPT or values[one.name] != one.default}  # fmt: skip

    def __str__(self) -> str:
        return f"{self.num_inference_steps} steps of {self.sampler} at guidance {self.guidance_scale:g}"


USUAL = Drawing(num_inference_steps=50, guidance_scale=7.5)  # of a model that says nothing


def kept_of(said: Mapping) -> dict:
    """What is kept of the drawing of a model, of all that is said of it."""
    return {name: said[name] for name in KEPT if said.get(name) is not None}


def drawing_of(metadata: Mapping, process: Process, source, usual: Drawing = USUAL) -> Drawing:
    """How a model of this process is drawn by default, of what is known of it, else as `usual`. Raises ModelError."""
    known = {name: metadata[name] for name in KEPT if name in metadata}
    scale, steps, sampler = (known.get(name, getattr(usual, name)) for name in KEPT)
    samplers = samplers_of(process)
    for name, value, is_good, rule in (
        ("guidance_scale", scale, _is_within(scale, 0, MOST_GUIDANCE), f"a number from 0 to {MOST_GUIDANCE:g}"),
        ("num_inference_steps", steps, isinstance(steps, int) and _is_within(steps, 1, process.num_levels),
         f"a whole number from 1 to {process.num_levels}"),
        ("sampler", sampler, sampler is None or sampler in samplers, f"one of {', '.join(samplers)}"),
    ):  # fmt: skip
        if not is_good:
            raise ModelError(f"{source}: {name} {repr(value)[:60]} must be {rule}; copy it again")
    return replace(usual, num_inference_steps=steps, guidance_scale=float(scale), sampler=sampler)


def _is_within(value, least: float, most: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most


def usual_strength(image, mask) -> float:
    """That of drawing over `image` where none is named, as diffusers has it; None: there is no image, or no mask."""
    return 0.8 if image is not None and mask is None else Drawing.strength


def samplers_of(process: Process, usual: str | None = None) -> list[str]:
    """The samplers that draw what such a model predicts, its default first: `usual`, where it says one."""
    unfit = (FLOW_EULER, *(_WITHOUT_SAMPLE if process.prediction_type == "sample" else ()))
    fit = [FLOW_EULER, LCM] if process.is_flow else [name for name in SAMPLERS if name not in unfit]
    return sorted(fit, key=lambda name: name != usual)


def choose_sampler(sampler: str | None, process: Process) -> str:
    """The sampler of that name, the default of None. Raises ConfigError for one that does not fit the process."""
    fit, sampler = samplers_of(process), ALIASES.get(sampler, sampler)
    if sampler in (None, *fit):
        return sampler or fit[0]
    if sampler not in SAMPLERS:
        raise ConfigError(f"no sampler {sampler}; known: {', '.join(SAMPLERS)}")
    raise ConfigError(
        f"the sampler {sampler} does not draw with a model of --prediction_type {process.prediction_type}; "
        f"use {', '.join(fit)}"
    )

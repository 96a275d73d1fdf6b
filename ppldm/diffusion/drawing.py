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

No paddle is needed here, so that what is wrong is said before anything is loaded.
"""

import math
import numbers
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace

from ..utils.errors import ConfigError, ModelError
from .process import TIMESTEP_SPACINGS, Process

FLOW_EULER = "flow-euler"
SAMPLERS = ("ddim", "ddpm", "pndm", "lms", "euler", "euler-ancestral", "heun", "dpm-solver++", "dpm-solver++-sde",
            "unipc", FLOW_EULER)  # fmt: skip
ALIASES = {"euler-a": "euler-ancestral", "euler-ancest": "euler-ancestral"}
SIGMA_SCHEDULES = ("karras", "exponential")
STOCHASTIC = ("ddpm", "euler-ancestral", "dpm-solver++-sde")
# Those whose classes of diffusers do not take a prediction of the picture.
_WITHOUT_SAMPLE = ("pndm", "euler-ancestral")
_WITH_SIGMAS = ("lms", "euler", "euler-ancestral", "heun", "dpm-solver++", "dpm-solver++-sde", "unipc")
USUAL_GUIDANCE, MOST_GUIDANCE = 7.5, 50.0  # of a model that says nothing; that one may say, and a request
_ALWAYS_STATED = ("sampler", "num_inference_steps", "guidance_scale")


@dataclass(frozen=True)
class Drawing:
    """sampler: a name of `SAMPLERS`; None: the default of the model, ddim or of flow flow-euler. num_inference_steps:
    from 1 to as many as the model was trained with. guidance_scale: how strongly to follow the prompt; 1 is not guided;
    None: the default of the model. guidance_rescale: 0 .. 1, how much of the deviation that guidance adds is taken back
    (Lin et al. 2023, arXiv:2305.08891, section 3.4). eta: 0 .. 1, the share of fresh noise of ddim. timestep_spacing:
    one of `TIMESTEP_SPACINGS`; None: as the model says, or the sampler does. sigma_schedule: one of `SIGMA_SCHEDULES`;
    None: that of the training. strength: above 0 .. 1, with a picture to begin from: the share of the steps that are
    taken, of which 1 hardly keeps anything of it.
    """

    num_inference_steps: int = 50
    guidance_scale: float | None = None
    sampler: str | None = None
    guidance_rescale: float = 0.0
    eta: float = 0.0
    timestep_spacing: str | None = None
    sigma_schedule: str | None = None
    strength: float = 1.0

    def check(self) -> None:
        """Raises ConfigError for what no model can be drawn with."""
        if isinstance(self.num_inference_steps, bool) or not isinstance(self.num_inference_steps, numbers.Integral):
            raise ConfigError(f"--num_inference_steps {self.num_inference_steps!r} is not a whole number")
        if self.num_inference_steps < 1:
            raise ConfigError(f"--num_inference_steps {self.num_inference_steps} must be above 0")
        for name in ("guidance_scale", "guidance_rescale", "eta", "strength"):
            value, usual = getattr(self, name), getattr(Drawing, name)
            if name == "guidance_scale":
                if value is None:
                    continue
                usual = USUAL_GUIDANCE
            if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
                raise ConfigError(f"--{name} {value} is not a number; {usual:g} is usual")
            if name != "guidance_scale" and not 0 <= value <= 1:
                raise ConfigError(f"--{name} {value:g} must be from 0 to 1")
        for name, known in (
            ("sampler", (*SAMPLERS, *ALIASES)),
            ("timestep_spacing", TIMESTEP_SPACINGS),
            ("sigma_schedule", SIGMA_SCHEDULES),
        ):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value in known):
                raise ConfigError(f"--{name} {value} is not one of {', '.join(known)}")
        if not self.strength or self.skipped_steps() == self.num_inference_steps:
            raise ConfigError(
                f"--strength {self.strength:g} of {self.num_inference_steps} steps leaves none to take; raise either"
            )
        if self.sampler:
            self._check_fit(ALIASES.get(self.sampler, self.sampler))

    def fit(self, process: Process, guidance_scale: float = USUAL_GUIDANCE) -> "Drawing":
        """The same with the sampler that a model of this process is drawn with, and where it says none with the
        model's `guidance_scale`. Raises ConfigError where they do not go together."""
        self.check()
        if self.num_inference_steps > process.num_levels:
            raise ConfigError(
                f"--num_inference_steps {self.num_inference_steps} must be from 1 to {process.num_levels}, the steps "
                "that the model was trained with"
            )
        sampler = choose_sampler(self.sampler, process)
        self._check_fit(sampler)
        scale = guidance_scale if self.guidance_scale is None else self.guidance_scale
        return replace(self, sampler=sampler, guidance_scale=scale)

    def _check_fit(self, sampler: str) -> None:
        """Raises ConfigError for a setting that the sampler does not have."""
        if self.eta and sampler != "ddim":
            raise ConfigError(f"--eta {self.eta:g} is for the sampler ddim, and {sampler} has none; omit it")
        if self.timestep_spacing and sampler == FLOW_EULER:
            raise ConfigError(f"--timestep_spacing is not for {FLOW_EULER}, whose steps its shift spaces; omit it")
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
        values = asdict(self)
        return {one.name: values[one.name] for one in fields(self)
                if one.name in _ALWAYS_STATED or values[one.name] != one.default}  # fmt: skip

    def __str__(self) -> str:
        return f"{self.num_inference_steps} steps of {self.sampler} at guidance {self.guidance_scale:g}"


def guidance_of(metadata: Mapping, source, usual: float = USUAL_GUIDANCE) -> float:
    """The guidance scale that a model is drawn with by default, of what is known of it, else the `usual` one. Raises
    ModelError."""
    value = metadata.get("guidance_scale", usual)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= MOST_GUIDANCE:
        said = f"{source}: guidance_scale {repr(value)[:60]}"
        raise ModelError(f"{said} must be a number from 0 to {MOST_GUIDANCE:g}; copy it again")
    return float(value)


def usual_strength(image, mask) -> float:
    """That of drawing over `image` where none is named, as diffusers has it; None: there is no image, or no mask."""
    return 0.8 if image is not None and mask is None else Drawing.strength


def samplers_of(process: Process) -> list[str]:
    """The samplers that draw what such a model predicts, its default first."""
    if process.is_flow:
        return [FLOW_EULER]
    unfit = (FLOW_EULER, *(_WITHOUT_SAMPLE if process.prediction_type == "sample" else ()))
    return [name for name in SAMPLERS if name not in unfit]


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

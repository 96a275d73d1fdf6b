"""What a command line asks for, checked and made a plan before anything is loaded; no flag that is left out is guessed
until `--like PICTURE` has said what that picture was drawn with."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

from ...diffusion.drawing import Drawing, usual_strength
from ...utils.errors import ConfigError
from ...utils.rng import MAX_SEED
from ...utils.text import did_you_mean
from ..prompt_weights import check_syntax
from ..prompt_wildcards import Wildcards
from ..prompts import MOST_SAMPLES, Request, check_prompt, read_requests
from .like import like
from .plan import AXES, SCALE, Plan, axis_of, flag_of

DEFAULT_SEED = 23
_DEFAULTS = {"negative_prompt": "", "num_samples": 4, "seed": DEFAULT_SEED, "batch_size": 8, "control_scale": 1.0,
             "prompt_syntax": "plain"}  # fmt: skip
_NUMBERS: Mapping[str, Callable] = {"seed": int, "num_inference_steps": int, SCALE: float, "guidance_rescale": float,
                                    "eta": float, "strength": float}  # fmt: skip


def plan_of(asked: SimpleNamespace) -> Plan:
    """The plan of the flags of `ppldm generate`, which are completed in `asked`. Raises ConfigError."""
    asked.sigma_schedule = asked.sigmas
    place, first = like(asked) if asked.like else (None, 0)
    for name, value in _DEFAULTS.items():
        if getattr(asked, name) is None:
            setattr(asked, name, value)
    if asked.model is None:
        raise ConfigError("no model; give --model, or --like PICTURE to draw a picture again")
    requests = read_wanted(asked.prompts, list(asked.prompt or ()), asked.negative_prompt)
    require_positive(num_samples=asked.num_samples, batch_size=asked.batch_size, columns=asked.columns)
    if asked.num_samples > MOST_SAMPLES:
        raise ConfigError(f"--num-samples {asked.num_samples} must be from 1 to {MOST_SAMPLES}")
    axes = read_axes(asked)
    given = {one.name: getattr(asked, one.name) for one in fields(Drawing) if getattr(asked, one.name) is not None}
    if asked.guidance_scale:
        given[SCALE] = asked.guidance_scale[0]
    check_image(asked, axes)
    given.setdefault("strength", usual_strength(asked.image, asked.mask))
    drawing = Drawing(**given | {name: values[0] for name, values in axes.items() if name != "seed"})
    texts = (text for request in requests for text in (request.prompt, request.negative_prompt))
    wildcards = None if asked.wildcards is None else Wildcards(asked.wildcards, texts)
    check_control(asked.control, asked.control_filter, asked.control_scale)
    plan = Plan(
        requests,
        asked.num_samples,
        axes,
        drawing,
        asked.seed,
        *read_size(asked.size, asked.resolution, asked.height, asked.width),
        asked.exact,
        control_scale=asked.control_scale,
        weighted=check_syntax(asked.prompt_syntax) == "weighted",
        wildcards=wildcards,
        first=first,
        place=place,
        labelled=bool(asked.grid),
    )
    for values in {job[0] for job in plan.jobs()}:
        check_settings(plan.drawing_at(values), plan.seed_of(values, 0))
    return plan


def read_axes(asked) -> dict[str, list]:
    """The settings that are compared, with their values: those of `--grid`, or else the guidance scale. Raises
    ConfigError."""
    scales = None if asked.guidance_scale is None else list(dict.fromkeys(asked.guidance_scale))
    if not asked.grid:
        return {SCALE: scales or [None]}
    axes = {}
    for word in asked.grid:
        flag, equals, texts = word.partition("=")
        name = axis_of(word)
        if name not in AXES:
            raise ConfigError(f"--grid {word}: no setting {flag}; {did_you_mean(name, AXES)}")
        if not equals or not texts:
            raise ConfigError(f"--grid {word} names no values; write {name}={_example(name)}")
        if name in axes:
            raise ConfigError(f"--grid names {name} twice; give all its values at once, as {name}={_example(name)}")
        if name != "seed" and getattr(asked, name) is not None:
            raise ConfigError(f"--grid {word} says all that {flag_of(name)} does; omit one of them")
        axes[name] = list(dict.fromkeys(_value(word, name, text) for text in texts.split(",")))
    if len(axes) > 2:
        raise ConfigError(f"--grid has rows and columns, and {len(axes)} settings are named; name two")
    if SCALE not in axes and scales and len(scales) > 1:
        raise ConfigError(f"--grid with {len(scales)} guidance scales; name them in it, as {SCALE}={_example(SCALE)}")
    return axes


def _value(word: str, name: str, text: str):
    make = _NUMBERS.get(name, str)
    try:
        value = make(text.strip())
    except ValueError as error:
        kind = "whole number" if make is int else "number"
        raise ConfigError(f"--grid {word}: {text!r} is not a {kind}; write {name}={_example(name)}") from error
    if name == "seed" and value < 0:
        raise ConfigError(f"--grid {word}: the seed {value} must be from 0 to {MAX_SEED}")
    return value


def _example(name: str) -> str:
    known = {"sampler": "ddim,euler", "timestep_spacing": "leading,trailing", "sigma_schedule": "karras,exponential",
             "num_inference_steps": "10,20", "seed": "1,2", SCALE: "3,7.5"}  # fmt: skip
    return known.get(name, "0,0.5")


def check_settings(drawing: Drawing, seed: int) -> None:
    """Raises ConfigError for what no model can be drawn with."""
    drawing.check()
    if not -1 <= seed <= MAX_SEED:
        raise ConfigError(f"--seed {seed} must be from 0 to {MAX_SEED}, or -1 to have one chosen")


def check_control(control: str | None, made_by: str | None, scale: float) -> None:
    """Raises ConfigError for settings of a control image that are wrong, or are given without one."""
    if control is None and (made_by or scale != 1.0):
        raise ConfigError("--control_filter and --control_scale are for a control image; give --control PICTURE")
    if not math.isfinite(scale):
        raise ConfigError(f"--control_scale {scale} is not a number; 1 is usual")
    if control is not None and not Path(control).is_file():
        raise ConfigError(f"--control {control}: there is no such file")
    if made_by:
        from ...data.control.spec import make_filter

        make_filter(made_by)


def check_image(asked, axes: dict) -> None:
    """Raises ConfigError for a picture that is not there, and for what is given without one."""
    if asked.image is None and asked.mask is not None:
        raise ConfigError("--mask says what of a picture is drawn anew; give the picture too: --image")
    if asked.image is None and (asked.strength is not None or "strength" in axes):
        raise ConfigError("--strength is for a picture that is drawn over; give --image too")
    for flag, path in (("--image", asked.image), ("--mask", asked.mask)):
        if path is not None and not Path(path).is_file():
            raise ConfigError(f"{flag} {path}: there is no such file")


def read_wanted(prompts_file: str | None, prompts: list[str], negative_prompt: str = "") -> list[Request]:
    """Requests from the command line and from a file. Raises ConfigError where there are none."""
    for text, flag in (*((prompt, "--prompt") for prompt in prompts), (negative_prompt, "--negative-prompt")):
        check_prompt(text, flag)
    wanted = [Request(prompt) for prompt in prompts]
    if prompts_file:
        wanted += read_requests(prompts_file)
    if not wanted:
        raise ConfigError("no prompts; give --prompt TEXT … or --prompts FILE")
    return [Request(r.prompt, r.negative_prompt or negative_prompt, r.seed, r.remark) for r in wanted]


def read_size(
    size: str | None, resolution: int | None, height: int | None, width: int | None
) -> tuple[int | None, int | None]:
    """(height, width) in pixels from what is given of the flags; None: as trained. Raises ConfigError where `size` is
    not width x height, or another says a size too."""
    sides = {"resolution": resolution, "height": height, "width": width}
    given = {name: side for name, side in sides.items() if side is not None}
    if size is not None:
        if not (found := re.fullmatch(r"(\d+)x(\d+)", size)):
            raise ConfigError(f"--size {size} is not width x height; write it as 640x448")
        if name := next(iter(given), None):
            raise ConfigError(f"--size {size} says all that --{name} {given[name]} does; omit one of them")
        given = {"height": int(found[2]), "width": int(found[1])}
    require_positive(**given)
    return given.get("height", given.get("resolution")), given.get("width", given.get("resolution"))


def require_positive(**values) -> None:
    """Raises ConfigError that names a flag whose value is not above 0."""
    for name, value in values.items():
        if value <= 0:
            raise ConfigError(f"--{name.replace('_', '-')} {value} must be above 0")

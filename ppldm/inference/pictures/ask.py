"""What a command line asks for, made a plan before anything is loaded. `--like PICTURE` says all that is left out.

Where nothing else is asked for, that picture is the same to the bit on the same machine: it is drawn at the same place
of a batch of the same size. Pictures come from strangers: what one says is checked as requests to `ppldm serve` are,
and an address in it is shown and never asked.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

from ...diffusion.drawing import Drawing, usual_strength
from ...utils.errors import ConfigError
from ...utils.log import get_logger
from ...utils.rng import MAX_SEED
from ...utils.text import did_you_mean
from ...weights.lora.flag import split_inversion
from ..prompt_weights import SYNTAXES, check_syntax
from ..prompts import MOST_SAMPLES, Request, Wildcards, check_prompt, read_requests
from .plan import AXES, FILES, LAYOUTS, SCALE, Plan, axis_of, flag_of

Interval = Annotated[list[float], {"nargs": 2, "type": float, "metavar": "SHARE"},
                     "guide only between these shares of noise, as 0.2 0.8; by default always"]  # fmt: skip
GuideModel = Annotated[str, {}, "worse model of the same kind, which guides in place of the empty caption"]
DEFAULT_SEED = 23
_DEFAULTS = {"negative_prompt": "", "num_samples": 4, "seed": DEFAULT_SEED, "batch_size": 8, "control_scale": 1.0,
             "prompt_syntax": "plain"}  # fmt: skip
_SWITCH = ("off", "on")
_NUMBERS: Mapping[str, Callable] = {"seed": int, "num_inference_steps": int, SCALE: float, "guidance_rescale": float,
                                    "eta": float, "strength": float, "cfg_zero": lambda word: bool(_SWITCH.index(word)),
                                    "guidance_interval": lambda word: tuple(map(float, word.split("..")))}  # fmt: skip
_SIDES = ("size", "resolution", "height", "width")
_OF_PICTURE = ("negative_prompt", "control_scale", "prompt_syntax", "engine", "dtype", *AXES)
OF_MODEL = ("ema", "original_config_file", "decoder", "controlnet", "tokenizer", "prediction_type",
            "rescale_betas_zero_snr", "guide_model")  # fmt: skip
# Pictures that are not in the file.
_GIVEN = {"control": "after a control image", "image": "over another picture", "mask": "through a mask"}
_CHANGES = ("prompts", "num_samples", "grid", "wildcards", "batch_size")
_NEEDED = ("prompt", "negative_prompt", "index", "seed", "sampler", "num_inference_steps", "guidance_scale", "height",
           "width")  # fmt: skip
_MOST_NAMES, _LONGEST_NAME = 64, 1024  # of files that a picture names, and letters of one
_BYTES = re.compile("[\udc80-\udcff]")  # those of a file's name that are not UTF-8
_LARGEST_BATCH = 256
_PIXELS = 1 << 20  # of a picture that one of fewer pixels may ask for
_PICTURES = 8  # so large, that its batch may have: `ppldm generate` draws as many by default


def plan_of(asked: SimpleNamespace) -> Plan:
    """The plan of the flags of `ppldm generate`, which are completed in `asked`. Raises ConfigError."""
    asked.sigma_schedule, asked.cfg_zero = asked.sigmas, asked.cfg_zero or None
    place, first = complete_by_picture(asked) if asked.like else (None, 0)
    for name, value in _DEFAULTS.items():
        _complete(asked, name, value)
    if asked.model is None:
        raise ConfigError("no model; give --model, or --like PICTURE to draw a picture again")
    for word in asked.textual_inversion or ():
        split_inversion(word)
    requests = read_wanted(asked.prompts, list(asked.prompt or ()), asked.negative_prompt)
    require_positive(num_samples=asked.num_samples, batch_size=asked.batch_size, columns=asked.columns)
    if asked.num_samples > MOST_SAMPLES:
        raise ConfigError(f"--num-samples {asked.num_samples} must be from 1 to {MOST_SAMPLES}")
    axes = read_axes(asked)
    if asked.layout not in LAYOUTS or (asked.layout and asked.grid):
        raise ConfigError(f"--layout {asked.layout} {'has no --grid' if asked.grid else 'is unknown; use geneval'}")
    given = {one.name: getattr(asked, one.name) for one in fields(Drawing) if getattr(asked, one.name) is not None}
    if asked.guidance_scale:
        given[SCALE] = asked.guidance_scale[0]
    check_pictures(asked, axes)
    given.setdefault("strength", usual_strength(asked.image, asked.mask))
    drawing = Drawing(**given | {name: values[0] for name, values in axes.items() if name != "seed"})
    if asked.guide_model is not None:
        from ...methods.autoguidance import check_asked

        check_asked(drawing, [request.negative_prompt for request in requests])
    texts = (text for request in requests for text in (request.prompt, request.negative_prompt))
    wildcards = None if asked.wildcards is None else Wildcards(asked.wildcards, texts)
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
        layout=asked.layout,
    )
    for values in {job[0] for job in plan.jobs()}:
        check_settings(plan.drawing_at(values), plan.seed_of(values, 0))
    return plan


def read_axes(asked) -> dict[str, list]:
    """The settings that are compared, with values: of `--grid`, or else guidance scales. Raises ConfigError."""
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
             "num_inference_steps": "10,20", "seed": "1,2", SCALE: "3,7.5", "guidance_interval": "0..1,0.2..0.8",
             "cfg_zero": "off,on"}  # fmt: skip
    return known.get(name, "0,0.5")


def check_settings(drawing: Drawing, seed: int) -> None:
    """Raises ConfigError for what no model can be drawn with."""
    drawing.check()
    if not -1 <= seed <= MAX_SEED:
        raise ConfigError(f"--seed {seed} must be from 0 to {MAX_SEED}, or -1 to have one chosen")


def check_pictures(asked, axes: dict) -> None:
    """Raises ConfigError for a picture that is not there, and for settings of one that are wrong, or given without."""
    if asked.image is None and asked.mask is not None:
        raise ConfigError("--mask says what of a picture is drawn anew; give the picture too: --image")
    if asked.image is None and (asked.strength is not None or "strength" in axes):
        raise ConfigError("--strength is for a picture that is drawn over; give --image too")
    if asked.control is None and (asked.control_filter or asked.control_scale != 1.0):
        raise ConfigError("--control_filter and --control_scale are for a control image; give --control PICTURE")
    if not math.isfinite(asked.control_scale):
        raise ConfigError(f"--control_scale {asked.control_scale} is not a number; 1 is usual")
    for flag, path in (("--image", asked.image), ("--mask", asked.mask), ("--control", asked.control)):
        if path is not None and not Path(path).is_file():
            raise ConfigError(f"{flag} {path}: there is no such file")
    if asked.control_filter:
        from ...data.control import make_filter

        make_filter(asked.control_filter)


def read_wanted(prompts_file: str | None, prompts: list[str], negative_prompt: str = "") -> list[Request]:
    """Requests from the command line and from a file. Raises ConfigError where there are none."""
    for text, flag in (*((prompt, "--prompt") for prompt in prompts), (negative_prompt, "--negative-prompt")):
        check_prompt(text, flag)
    wanted = [Request(prompt) for prompt in prompts]
    if prompts_file:
        wanted += read_requests(prompts_file)
    if not wanted:
        raise ConfigError("no prompts; give --prompt TEXT … or --prompts FILE")
    return [replace(one, negative_prompt=one.negative_prompt or negative_prompt) for one in wanted]


def read_size(
    size: str | None, resolution: int | None, height: int | None, width: int | None
) -> tuple[int | None, int | None]:
    """(height, width) in pixels by these flags; None: as trained. Raises ConfigError where they do not agree."""
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


def complete_by_picture(asked) -> tuple[tuple[int, int] | None, int]:
    """Completes flags by a picture; (its batch's size and place, if drawn as it is; its index). Raises ConfigError."""
    path = Path(asked.like)
    if not path.is_file():
        raise ConfigError(f"--like {path}: there is no such file; give a picture that ppldm has drawn")
    given = {name for name in (*_OF_PICTURE, *FILES, "height", "width") if getattr(asked, name) not in (None, [])}
    given |= {"prompt"} if asked.prompt or asked.prompts else set()
    given |= {"height", "width"} if any(getattr(asked, name) is not None for name in _SIDES) else set()
    record, source = _read(path, asked, given)
    for name, words in _GIVEN.items():
        if name in record and getattr(asked, name) is None:
            raise ConfigError(f"--like {path} was drawn {words}; give it too: --{name} PICTURE")
    changed = given or any(getattr(asked, name) is not None for name in _CHANGES)
    asked.drawn = record
    asked.prompt = asked.prompt or ([] if asked.prompts else [record["prompt"]])
    for name in {*_OF_PICTURE} - {axis_of(word) for word in asked.grid or ()}:
        _complete(asked, name, [record[SCALE]] if name == SCALE else record.get(name))
    if "height" not in given:
        asked.height, asked.width = record["height"], record["width"]
    asked.exact = asked.exact or record.get("exact", False)
    for name in FILES:
        setattr(asked, name, getattr(asked, name) or record.get(name))
    _complete(asked, "num_samples", 1)
    if asked.model is None:
        if "model" not in source:
            raise ConfigError(f"--like {path} does not say which model has drawn it; give --model")
        asked.model = source["model"]
        for name in OF_MODEL:
            setattr(asked, name, getattr(asked, name) or source.get(name))
    batch = source.get("batch")
    return None if changed or asked.exact or batch is None else batch, record["index"]


def _read(path: Path, asked, given: set[str]) -> tuple[dict, dict]:
    """(what a picture says of its drawing, of its model), checked, but for what is `given`. Raises ConfigError."""
    from PIL import Image

    from ..serving.parameters import check
    from .draw import SOURCE, read_settings

    record = read_settings(path)
    if record is None or any(record.get(name) is None for name in _NEEDED):
        raise ConfigError(
            f"--like {path} does not say how it was drawn; give a PNG file that ppldm generate has written"
        )
    table, source, found = _table(), record.get(SOURCE) or {}, {name: record[name] for name in _NEEDED}
    try:
        for name in (record.keys() & table.keys()) - given:
            try:
                found[name] = check(name, record[name], table)
            except ConfigError as error:
                flag = f"{flag_of(name)}, or " if name in (*_OF_PICTURE, "height", "width", "prompt") else ""
                raise ConfigError(f"{error}; give {flag}another picture") from error
        for kind in FILES:
            if kind not in given and (names := record.get(kind)):
                if not isinstance(names, list) or len(names) > _MOST_NAMES:
                    raise ConfigError(f"{kind} is not a short list of files; give {flag_of(kind)}")
                found[kind] = [_check_name(kind, name) for name in names]
        if not isinstance(source, dict):
            raise ConfigError("source is not an object; give another picture")
        if asked.model is None:
            source = source | {name: _check_name(name, source[name]) for name in ("model", *OF_MODEL)
                               if source.get(name) and not (name != "model" and getattr(asked, name))}  # fmt: skip
        if not given & {"height", "width"}:
            with Image.open(path) as picture:
                pixels = max(_PIXELS, picture.width * picture.height)
            batch = source.get("batch") if asked.batch_size is None else None
            source = {**source, "batch": _check_size(found["height"] * found["width"], batch, pixels)}
    except ConfigError as error:
        raise ConfigError(f"--like {path}: what it says of itself cannot be used: {error}") from error
    return found, source


def _table() -> dict[str, dict]:
    """The schema of what a picture's record may say, by name: as a request, and what a request cannot."""
    from ...networks.engine import DTYPES, ENGINES
    from ..serving.parameters import choice, make_parameters, number, text

    usual = make_parameters(("",), max_side=1 << 14, max_steps=1 << 20)
    for name in ("model", "num_samples"):
        del usual[name]
    own = {
        "guidance_scale": number(-1e6, 1e6),
        "index": number(0, 2**31 - 1, kind="integer"),
        "control_scale": number(-1e6, 1e6),
        "prompt_syntax": choice(SYNTAXES),
        "engine": choice(ENGINES),
        "dtype": choice(DTYPES),
        "exact": {"type": "boolean", "default": False},
    }
    return usual | own | {name: text() for name in ("weights", "control", "image", "mask")}


def _check_name(name: str, value) -> Any:
    """The name of a file, folder or model that a picture has of its model. Raises ConfigError."""
    from ..serving.parameters import cut

    if name == "ema" and value is True:
        return value
    if not isinstance(value, str) or not _BYTES.sub("", value).isprintable() or len(value) > _LONGEST_NAME:
        raise ConfigError(f"{name} {cut(value)} is not a name; give --{name}")
    if "://" in value:
        raise ConfigError(f"{name} is {cut(value)}, an address that a picture names is not asked; give --{name}")
    return value


def _check_size(own: int, batch, pixels: int) -> tuple[int, int] | None:
    """The batch that a picture was drawn in, and its place there. Raises ConfigError for what no file may ask for."""
    if own > pixels:
        raise ConfigError(f"{own:,} pixels are far more than its own; give --size")
    if batch is None:
        return None
    whole = isinstance(batch, list) and len(batch) == 2 and all(type(one) is int for one in batch)
    if not whole or not 0 <= batch[1] < batch[0] <= min(_LARGEST_BATCH, _PICTURES * pixels // own):
        raise ConfigError("its batch and its place there are not such as to be drawn again; give --batch-size")
    return batch[0], batch[1]


def check_likeness(pipeline, plan: Plan, asked) -> None:
    """Say, or with `--same-weights` raise ConfigError, where weights or given pictures are others than drew it."""
    if not asked.like:
        return
    for what, now in {"weights": pipeline.fingerprint, **plan.digests()}.items():
        drawn = asked.drawn.get(what, now)
        if drawn == now:
            continue
        said = f"--like {asked.like} was drawn with other {what} ({drawn} and not {now}), so the picture will differ"
        if asked.same_weights:
            raise ConfigError(f"{said}; give the {what} that it was drawn with")
        get_logger().warning("%s", said)


def _complete(asked, name: str, value) -> None:
    if getattr(asked, name) is None:
        setattr(asked, name, value)

"""What a request may say and how much: JSON Schemas, by which requests are checked and which the document shows."""

import base64
import binascii
import math
from typing import Any

import numpy as np

from ...data.images import decode_pixels, stored_size
from ...diffusion.drawing import MOST_GUIDANCE, SAMPLERS, SIGMA_SCHEDULES
from ...diffusion.process import TIMESTEP_SPACINGS
from ...utils.errors import ConfigError, RowError
from ...utils.rng import MAX_SEED
from ...utils.text import did_you_mean
from ..prompts import check_prompt

MOST_LETTERS = 10_000  # of a prompt
_LEAST_PIXELS, _TIMES = 1 << 20, 16  # that a picture may have; or so many times as the largest that is drawn
_SHOWN = 60  # letters of a value in a message
_SAID = dict.fromkeys(("steps", "num_steps"), "num_inference_steps")  # which nothing is near to


def text(help: str = "", **more) -> dict:
    return {"type": "string", "description": help, "maxLength": MOST_LETTERS, **more}


def choice(known, help: str = "", **more) -> dict:
    return {"type": "string", "description": help, "enum": list(known), **more}


def number(low: float, high: float, help: str = "", kind: str = "number", **more) -> dict:
    return {"type": kind, "description": help, "minimum": low, "maximum": high, **more}


def make_parameters(
    models: tuple[str, ...], max_pictures: int = 16, max_side: int = 1024, max_steps: int = 250
) -> dict[str, dict]:
    """What a request may say of these models: so many pictures, of such sides in pixels, in so many steps; the schema
    of each value by its name. Without a default it is what the model has, or nothing."""
    file = {"type": "string", "contentEncoding": "base64"}
    return {
        "prompt": text("what to draw"),
        "negative_prompt": text("what the pictures should not show", default=""),
        "model": choice(models, "which of the models draws", default=models[0]),
        "num_samples": number(1, max_pictures, "how many pictures", "integer", default=1),
        "seed": number(0, MAX_SEED, "the same seed and prompt give the same pictures", "integer", default=23),
        "width": number(8, max_side, "pixels; by default as trained", "integer"),
        "height": number(8, max_side, "pixels; by default as trained", "integer"),
        "num_inference_steps": number(1, max_steps, "steps of the sampler; by default the model's", "integer"),
        "guidance_scale": number(
            0, MOST_GUIDANCE, "how much to follow the prompt; 1: not guided; by default the model's"
        ),
        "sampler": choice(SAMPLERS, "by default the model's"),
        "guidance_rescale": number(0, 1, "how much of the contrast that guidance adds is taken back", default=0.0),
        "guidance_interval": {"type": "array", "items": number(0, 1), "minItems": 2, "maxItems": 2,
                              "description": "guided only between these shares of noise"},
        "cfg_zero": {"type": "boolean", "description": "CFG-Zero*, for models of flow", "default": False},
        "eta": number(0, 1, "share of fresh noise in each step of ddim", default=0.0),
        "timestep_spacing": choice(TIMESTEP_SPACINGS, "by default the model's"),
        "sigma_schedule": choice(SIGMA_SCHEDULES, "for samplers over sigmas"),
        "image": file | {"description": "a picture to draw over: a PNG, JPEG or WebP file in base64"},
        "mask": file | {"description": "the same, light where the picture is drawn anew; the rest is kept"},
        "strength": number(0, 1, "how much of a picture is changed; by default 0.8, with a mask 1"),
    }  # fmt: skip


def check(name: str, value: Any, known: dict[str, dict]) -> Any:
    """The value of a parameter as it is used; a picture as uint8 [H, W, 3]. Raises ConfigError."""
    schema = known[name]
    kind = schema["type"]
    if value is None and name != "prompt":
        return schema.get("default")
    if kind == "array":
        if not isinstance(value, list) or len(value) != schema["maxItems"]:
            raise ConfigError(f"{name} {cut(value)} must be a list of {schema['maxItems']} numbers")
        return [check(name, one, {name: schema["items"]}) for one in value]
    if "minimum" in schema:
        low, high = schema["minimum"], schema["maximum"]
        good = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value) and kind == "number")
        if not good or isinstance(value, bool) or not low <= value <= high:
            what = "a whole number" if kind == "integer" else "a number"
            most = high if isinstance(high, int) else f"{high:g}"
            raise ConfigError(f"{name} {cut(value)} must be {what} from {low:g} to {most}")
        return value if kind == "integer" else float(value)
    if "contentEncoding" in schema:
        return read_picture(value, name, max(_LEAST_PIXELS, _TIMES * known["width"]["maximum"] ** 2))
    if kind == "boolean":
        if not isinstance(value, bool):
            raise ConfigError(f"{name} {cut(value)} is neither true nor false")
        return value
    check_prompt(value, name)
    if value not in schema.get("enum", [value]):
        raise ConfigError(f"{name} {value[:_SHOWN]!r} is not one of {', '.join(schema['enum'])}")
    if len(value) > schema.get("maxLength", math.inf):
        raise ConfigError(f"{name} has {len(value)} letters; use {MOST_LETTERS} at most")
    return value


def read_request(asked: Any, known: dict[str, dict]) -> dict:
    """The values of a request's JSON by name, defaults filled in. Raises ConfigError."""
    if not isinstance(asked, dict) or "prompt" not in asked:
        raise ConfigError('send an object with a "prompt"')
    if unknown := sorted(str(name) for name in asked.keys() - known):
        name = unknown[0][:_SHOWN]
        meant = f"did you mean {_SAID[name]}?" if name in _SAID else did_you_mean(name, known)
        raise ConfigError(f"no setting {name!r}; {meant}")
    values = {name: check(name, asked.get(name), known) for name in known}
    if not values["prompt"].strip():
        raise ConfigError("the prompt is empty; write what to draw")
    return values


def read_picture(value: Any, name: str, most_pixels: float | None = None) -> np.ndarray:
    """uint8 [H, W, 3] of a picture in base64, or a data URL, of at most so many pixels. Raises ConfigError."""
    if not isinstance(value, str):
        raise ConfigError(f"{name} is not text; send a PNG or JPEG file in base64")
    try:
        content = base64.b64decode(value[value.find(",") + 1 :] if value.startswith("data:") else value, validate=True)
        width, height = stored_size(content)
        if width * height > (most_pixels or _LEAST_PIXELS):
            raise ConfigError(f"{name} has {width} x {height} pixels; make it smaller, about as large as what is drawn")
        return decode_pixels(content, formats=("PNG", "JPEG", "WEBP"))
    except (binascii.Error, ValueError, RowError) as error:
        raise ConfigError(f"{name} is not a PNG, JPEG or WebP file in base64") from error


def cut(value: Any) -> str:
    """A value as a message shows it."""
    try:
        shown = repr(value)
    except ValueError:  # a number of more digits than Python writes
        return "of thousands of digits"
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…"

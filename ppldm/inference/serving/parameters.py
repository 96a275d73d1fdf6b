"""What a request may say and how much, as one table that checks requests and makes the OpenAPI document."""

import base64
import binascii
import math
from dataclasses import dataclass
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
_TYPES = {"text": "string", "choice": "string", "picture": "string", "integer": "integer", "number": "number",
          "flag": "boolean"}  # fmt: skip
_SHOWN = 60  # letters of a value in a message
_SAID = dict.fromkeys(("steps", "num_steps"), "num_inference_steps")  # which nothing is near to


@dataclass(frozen=True)
class Parameter:
    """One value of a request. kind: a key of `_TYPES`. default None: what the model has, or nothing."""

    name: str
    kind: str
    help: str
    default: Any = None
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()

    def check(self, value: Any) -> Any:
        """The value as it is used; a picture as uint8 [H, W, 3]. Raises ConfigError."""
        if value is None and self.name != "prompt":
            return self.default
        if self.kind in ("integer", "number"):
            return self._check_number(value)
        if self.kind == "picture":
            return read_picture(value, self.name, self.high)
        if self.kind == "flag":
            if not isinstance(value, bool):
                raise ConfigError(f"{self.name} {cut(value)} is neither true nor false")
            return value
        check_prompt(value, self.name)
        if self.kind == "choice" and value not in self.choices:
            raise ConfigError(f"{self.name} {value[:_SHOWN]!r} is not one of {', '.join(self.choices)}")
        if len(value) > MOST_LETTERS:
            raise ConfigError(f"{self.name} has {len(value)} letters; use {MOST_LETTERS} at most")
        return value

    def _check_number(self, value: Any) -> Any:
        whole = self.kind == "integer"
        good = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value) and not whole)
        if not good or isinstance(value, bool) or not self.low <= value <= self.high:
            what = "a whole number" if whole else "a number"
            most = self.high if isinstance(self.high, int) else f"{self.high:g}"
            raise ConfigError(f"{self.name} {cut(value)} must be {what} from {self.low:g} to {most}")
        return value if whole else float(value)

    def schema(self) -> dict:
        """As JSON Schema."""
        found: dict[str, Any] = {"type": _TYPES[self.kind], "description": self.help}
        if self.low is not None:
            found |= {"minimum": self.low, "maximum": self.high}
        if self.kind == "picture":
            found["contentEncoding"] = "base64"
        elif self.kind == "text":
            found["maxLength"] = MOST_LETTERS
        if self.choices:
            found["enum"] = list(self.choices)
        if self.default is not None:
            found["default"] = self.default
        return found


def make_parameters(
    models: tuple[str, ...], max_pictures: int = 16, max_side: int = 1024, max_steps: int = 250
) -> tuple[Parameter, ...]:
    """What a request may say of these models: so many pictures, of such sides in pixels, in so many steps."""
    pixels: dict[str, Any] = {"kind": "integer", "low": 8, "high": max_side}
    picture: dict[str, Any] = {"kind": "picture", "high": max(_LEAST_PIXELS, _TIMES * max_side**2)}
    share: dict[str, Any] = {"kind": "number", "low": 0, "high": 1, "default": 0.0}
    return (
        Parameter("prompt", "text", "what to draw"),
        Parameter("negative_prompt", "text", "what the pictures should not show", ""),
        Parameter("model", "choice", "which of the models draws", models[0], choices=models),
        Parameter("num_samples", "integer", "how many pictures", 1, 1, max_pictures),
        Parameter("seed", "integer", "the same seed and prompt give the same pictures", 23, 0, MAX_SEED),
        Parameter("width", help="pixels; by default as trained", **pixels),
        Parameter("height", help="pixels; by default as trained", **pixels),
        Parameter("num_inference_steps", "integer", "steps of the sampler; by default the model's", None, 1,
                  max_steps),
        Parameter("guidance_scale", "number", "how much to follow the prompt; 1: not guided; by default the model's",
                  None, 0, MOST_GUIDANCE),
        Parameter("sampler", "choice", "by default the model's", choices=SAMPLERS),
        Parameter("guidance_rescale", help="how much of the contrast that guidance adds is taken back", **share),
        Parameter("eta", help="share of fresh noise in each step of ddim", **share),
        Parameter("timestep_spacing", "choice", "by default the model's", choices=tuple(TIMESTEP_SPACINGS)),
        Parameter("sigma_schedule", "choice", "for samplers over sigmas", choices=SIGMA_SCHEDULES),
        Parameter("image", help="a picture to draw over: a PNG, JPEG or WebP file in base64", **picture),
        Parameter("mask", help="the same, light where the picture is drawn anew; the rest is kept", **picture),
        Parameter("strength", "number", "how much of a picture is changed; by default 0.8, with a mask 1", None, 0, 1),
    )  # fmt: skip


def read_request(asked: Any, parameters: tuple[Parameter, ...]) -> dict:
    """The values of a request's JSON by name, defaults filled in. Raises ConfigError."""
    if not isinstance(asked, dict) or "prompt" not in asked:
        raise ConfigError('send an object with a "prompt"')
    known = {one.name for one in parameters}
    if unknown := sorted(str(name) for name in asked.keys() - known):
        name = unknown[0][:_SHOWN]
        meant = f"did you mean {_SAID[name]}?" if name in _SAID else did_you_mean(name, known)
        raise ConfigError(f"no setting {name!r}; {meant}")
    values = {one.name: one.check(asked.get(one.name)) for one in parameters}
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
            size = f"{width} x {height}"
            raise ConfigError(f"{name} has {size} pixels; make it smaller, about as large as what is drawn")
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

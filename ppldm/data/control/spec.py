"""Filters of control images as a person names them: `canny`, `canny,low=50,high=150`, `my_filters:Depth,side=224`.

A name, or the import path of a class (`package.module:Class`), then its parameters.
"""

import importlib
import os
import sys

import numpy as np

from ...utils.errors import ConfigError
from ...utils.text import did_you_mean
from ..inputs import ControlFilter
from .filters import FILTERS


def make_filter(spec: str) -> ControlFilter:
    """The filter that `spec` names. Raises ConfigError."""
    name, *given = (word.strip() for word in spec.split(","))
    if any("=" not in word for word in given):
        raise ConfigError(f"--control {spec}: parameters are written NAME=VALUE after the filter, with commas between")
    parameters = {key.strip(): _value(text.strip()) for key, text in (word.split("=", 1) for word in given)}
    made_by = _find_class(name) if ":" in name else FILTERS.get(name)
    if made_by is None:
        raise ConfigError(f"--control: no filter {name!r}; {did_you_mean(name, FILTERS)}, or package.module:Class")
    if ":" not in name and (bad := next((key for key in parameters if key not in made_by.__match_args__), None)):
        known = ", ".join(made_by.__match_args__) or "it has none"
        raise ConfigError(f"--control {name}: no parameter {bad!r}; known: {known}")
    words = [key for key, value in parameters.items() if isinstance(value, str)]
    if ":" not in name and words:
        raise ConfigError(f"--control {name}: {words[0]} {parameters[words[0]]!r} must be a number")
    try:
        made = made_by(**parameters)
    except ConfigError:
        raise
    except Exception as error:  # of a class that we do not know
        raise ConfigError(f"--control {spec}: {type(error).__name__}: {error}; correct its parameters") from error
    channels = getattr(made, "num_channels", None)
    if not callable(made) or not isinstance(channels, int) or channels < 1:
        raise ConfigError(f"--control {name} needs num_channels, at least 1, and __call__(picture, generator)")
    return made


def apply_filter(made: ControlFilter, picture: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """The control image, uint8 [num_channels, H, W], of a picture, uint8 [3, H, W]. Raises ConfigError where a filter
    fails, or gives something else."""
    name = type(made).__name__
    try:
        image = made(picture, generator)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"the control filter {name} failed: {type(error).__name__}: {error}; correct it") from error
    due = (made.num_channels, *picture.shape[1:])
    if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.shape != due:
        shown = f"{image.dtype} {list(image.shape)}" if isinstance(image, np.ndarray) else type(image).__name__
        raise ConfigError(f"the control filter {name} gave {shown}; uint8 {list(due)} is due")
    return image


def _find_class(path: str):
    module, _, name = path.partition(":")
    # As `python -m` does it: a command's own folder is not the user's.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"--control {path}: {error}; give package.module:Class of a file in this folder, or of an installed package"
        ) from error


def _value(text: str):
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text

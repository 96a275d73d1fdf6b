"""What a method is: a module of this folder, named in a recipe by `--methods NAME` or `NAME:OPTION=VALUE,OPTION=VALUE`.

Its docstring says what it is, its mathematics, source and published figure; `METHOD` is its class, a frozen dataclass
whose fields are its options. It adds a term to a diffusion model's loss while that is trained, and may want more of a
row, of the network or of a checkpoint; nothing else knows of it. Modules are read without paddle, and only those that a
recipe names (docs/extending.md says how to add one).
"""

import importlib
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from ..data.inputs import Input
from ..utils.errors import ConfigError
from ..utils.text import did_you_mean

if TYPE_CHECKING:
    from ..networks.model import Component, Step


class Method:
    """Base of all methods: it does nothing. denoisers: the components whose networks it can look into; () for all.
    is_whole_loss: its term stands for all others; the model goes on from one that is trained, by the same noise
    schedule and prediction. with_muon: whether it can be."""

    denoisers: ClassVar[tuple[str, ...]] = ()
    is_whole_loss: ClassVar[bool] = False
    with_muon: ClassVar[bool] = True

    @property
    def name(self) -> str:
        """Its name in recipes: that of its module."""
        return type(self).__module__.rpartition(".")[2]

    def problem(self, config) -> str | None:
        """What is wrong with the options beside a family's settings, and what to do; None where nothing is."""

    def unsupported(self, config) -> tuple[str, ...]:
        """The settings of a training beside which it cannot be, of a family with these settings."""
        return ()

    def inputs(self, model) -> dict[str, Input]:
        """What else a batch must hold, by names that no model has; `taps` has it in a step."""
        return {}

    def attach(self, model, seed: int) -> dict[str, "Component"]:
        """Make the model ready: taps, buffers that a checkpoint keeps, how it is drawn (`usual`); returns networks by
        names of their own, which are not exported: those that are trained are saved and averaged."""
        return {}

    def changed_noise(self, model, predict, latents, noise, level):
        """The noise that a picture and its target are made of, in place of `noise`; predict: what the network says of
        noisy latents at levels [B]."""
        return noise

    def term(self, model, step: "Step"):
        """What is added to the loss, a float32 scalar that is a mean over samples; None: nothing."""

    def num_sums(self, model) -> int:
        """How many numbers `sums` are."""
        return 0

    def sums(self, model, step: "Step"):
        """Of these samples a float32 [num_sums], to be added up over an update and its ranks."""
        raise NotImplementedError

    def keep(self, model, sums) -> None:
        """Take what `sums` added up to, once an update."""


def list_methods() -> list[str]:
    """The names of all methods."""
    files = Path(__file__).parent.glob("*.py")
    return sorted(path.stem for path in files if "\nMETHOD = " in path.read_text(encoding="utf-8"))


def read_methods(words: list[str], config) -> tuple[Method, ...]:
    """The methods that a recipe names, beside the settings of its family. Raises ConfigError."""
    found = {word.partition(":")[0]: _read(word, config) for word in words}
    if len(found) < len(words):
        raise ConfigError(f"--methods {' '.join(words)} names one method twice; omit one")
    return tuple(found.values())


def _read(word: str, config) -> Method:
    name, _, told = word.partition(":")
    if name not in list_methods():
        raise ConfigError(f"--methods {name} is not known; {did_you_mean(name, list_methods())}")
    kind = importlib.import_module(f".{name}", __package__).METHOD
    if kind.denoisers and config.denoiser not in kind.denoisers:
        raise ConfigError(f"--methods {name} is for models with a {' or '.join(kind.denoisers)}; omit it")
    known, options = {one.name: one.type for one in fields(kind)}, {}
    for option, _, value in (part.partition("=") for part in told.split(",") if part):
        if option not in known:
            raise ConfigError(f"--methods {word}: {name} has no option {option}; {did_you_mean(option, [*known])}")
        try:
            options[option] = known[option](value)
        except ValueError as error:
            raise ConfigError(f"--methods {word}: {option} {value!r} is not a number; correct it") from error
    method = kind(**options)
    if wrong := method.problem(config):
        raise ConfigError(f"--methods {word}: {wrong}")
    return method


def attach_methods(model, methods: tuple[Method, ...], seed: int) -> None:
    """Make a built model train with these methods."""
    model.methods, model.taps = methods, {}
    for method in methods:
        inputs = method.inputs(model)
        model.inputs, model.method_inputs = {**model.inputs, **inputs}, (*model.method_inputs, *inputs)
        parts = method.attach(model, seed)
        for name, part in parts.items():
            model.add_sublayer(name, part.layer)
        model.method_parts = {**model.method_parts, **parts}

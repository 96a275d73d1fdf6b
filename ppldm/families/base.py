"""What a family of models is to everything else, and where families are found.

A family is a module of this folder that defines `FAMILY`; one with several, `FAMILIES`. Names are found in the source,
and a module is read without paddle: networks are imported inside its methods, so that help and errors in a
configuration take well under a second.
"""

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from ..config.load import file_layers, last_value
from ..config.network_files import published_network
from ..config.recipe import Recipe, merge_settings, recipe_of
from ..data.shapes import make_shapes
from ..networks.configs import read_new_config
from ..utils.errors import ConfigError, ModelError
from ..utils.processes.ranks import World
from ..utils.text import did_you_mean
from .settings import AverageSettings


@dataclass(frozen=True)
class Sitting:
    """What a family draws from while it trains, on each rank: averaged weights in evaluation mode, its last batch."""

    config: Any
    model: Any
    dataset: Any
    batch: dict
    prompts: list[str]
    guidance_scales: list[float]
    seed: int
    world: World


class Family:
    """A kind of model. Config: the dataclass of its settings, whose `family` is the name. plural: in messages.
    components: its networks by name, each with its kind in `networks.configs`, or the name of a class; those of
    `optional` are there with some settings. needs_process: whether its model.json must describe one. unsupported,
    half_precision_levels: training settings that it refuses, levels that it takes. export_folder: in the run's
    folder."""

    name: ClassVar[str]
    plural: ClassVar[str]
    Config: ClassVar[type]
    components: ClassVar[Mapping[str, str]]
    optional: ClassVar[tuple[str, ...]] = ()
    needs_process: ClassVar[bool] = False
    unsupported: ClassVar[tuple[str, ...]] = ()
    half_precision_levels: ClassVar[tuple[str, ...]] = ("O1", "O2")
    export_folder: ClassVar[str] = "model"

    def __init_subclass__(cls) -> None:
        if "Config" in vars(cls):
            cls.name = cls.Config.family

    def check(self, config, data) -> None:
        """Raises ConfigError, ModelError for what cannot work. Neither rows nor networks are needed, nor paddle."""

    def identity(self, config, data) -> dict:
        """What else the loss depends on, beside options of identity, by name, JSON-ready: the average."""
        return {"ema": str(self.average(config))}

    def average(self, config):
        """The form of the moving average that is asked for (`methods/averages`); None for none."""
        return config.decay() if isinstance(config, AverageSettings) else None

    def networks(self, config, data) -> dict:
        """What `build` would build, `model_file.Component`s by name, from configs. Raises ConfigError, ModelError."""
        raise ConfigError(f"--dry_run does not know the networks of {self.plural}; omit it")

    def unsaved(self, config) -> tuple[str, ...]:
        """The components that a checkpoint does not hold, beside the base of adapters."""
        return ()

    def exported(self, config) -> tuple[str, ...]:
        """The components in the folder of the trained model."""
        return tuple(self.components)

    def build(self, config, data, seed: int):
        """The `networks.model.Model` to train, with its inputs and its tokenizer. Raises ConfigError, ModelError."""
        raise NotImplementedError

    def draw(self, sitting: Sitting) -> tuple[dict, dict]:
        """(pictures, [H, W, 3] uint8, by tag, on the main process; numbers by name on all). A collective call."""
        return {}, {}

    def export(self, model, config, dataset, folder: Path, average, metadata: dict) -> None:
        """Write the trained model, with its averaged weights where there are some, and `metadata` beside them.
        `dataset`: None where an average is made after the training (`ppldm ema`)."""
        raise NotImplementedError


DEFAULT_FAMILY = "ldm"  # of a recipe that names none
_NAME = re.compile(r'^    family: ClassVar\[str\] = "(\w+)"', re.M)
_REGISTERED: dict[str, Family] = {}


def register(family: Family) -> Family:
    """Make a family known that is not of this folder."""
    _REGISTERED[family.name] = family
    return family


@cache
def _own_modules() -> dict[str, str]:
    """Family to module, of those of this folder."""
    found = {path.stem: path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("*.py")}
    return {name: module for module, text in found.items() for name in re.findall(_NAME, text)}


def list_families() -> list[str]:
    """The names of all families, the default first."""
    return sorted({*_own_modules(), *_REGISTERED}, key=lambda name: (name != DEFAULT_FAMILY, name))


def get_family(name: str) -> Family:
    """The family of this name. Raises ConfigError that names the nearest."""
    if name in _REGISTERED:
        return _REGISTERED[name]
    if name not in _own_modules():
        raise ConfigError(f"family {name} is not known; {did_you_mean(str(name), list_families())}")
    module = importlib.import_module(f".{_own_modules()[name]}", __package__)
    return next(one for one in vars(module).get("FAMILIES") or (module.FAMILY,) if one.name == name)


def saved_recipe(path: Path) -> tuple[Recipe, Family]:
    """The recipe that a run has left in a file, and its family. Raises ConfigError."""
    layers = file_layers(path)
    family = get_family(last_value(layers, "family"))
    return recipe_of(merge_settings(layers, True, family.Config), family.Config), family


def check_family(config, data, arguments) -> None:
    """Raises ConfigError, ModelError for settings that the family does not take; by configs, and without paddle."""
    family = get_family(config.family)
    unsupported = dict.fromkeys(family.unsupported, family.plural)
    for method in config.chosen_methods() if hasattr(config, "chosen_methods") else ():
        unsupported |= dict.fromkeys(method.unsupported(config), f"--methods {method.name}")
        if arguments.optimizer == "muon" and not method.with_muon:
            raise ConfigError(f"--optimizer muon is not for --methods {method.name}; omit either")
    for name, whose in unsupported.items():
        if getattr(arguments, name):
            raise ConfigError(f"--{name} is not supported for {whose}; omit it")
    if arguments.bf16 and arguments.fp16_opt_level not in family.half_precision_levels:
        raise ConfigError(
            f"--fp16_opt_level {arguments.fp16_opt_level} is not supported for {family.plural}; "
            f"use {' or '.join(family.half_precision_levels)}"
        )
    if getattr(config, "trains_adapters", False) and arguments.optimizer == "muon":
        raise ConfigError("--lora_rank and --train_tokens train no whole matrix; omit --optimizer muon")
    if getattr(config, "offload_ema", False) and arguments.sharding == "stage3":
        raise ConfigError("--sharding stage3 shares averages out among the devices; omit --offload_ema")
    make_shapes(data)
    family.check(config, data)


def published_config(kind: str, name: str, place: str) -> dict:
    """The completed config of a component of a published model that is not here. Raises ModelError where unknown."""
    # Of EfficientNets one is published, and that without its config.
    file = "effnet_v2_s" if kind == "effnet" else published_network(name, place)
    if file is None:
        raise ModelError(f"{place}: there is no config.json of its {name} here; download the model first")
    return read_new_config(kind, file, f"--{name}_name_or_path")


def check_sides(factor: int, whose: str, data, times: str = "") -> None:
    """Raises ConfigError where pictures have sides that are not multiples of a downscaling factor, times something."""
    what = f"{factor}, {whose} downscaling factor{times}"
    if data.resolution <= 0 or data.resolution % factor:
        raise ConfigError(f"--resolution {data.resolution} must be a multiple of {what}")
    made = data.buckets in ("ratios", "steps")
    for height, width in make_shapes(data) or ():
        if height % factor or width % factor:
            raise ConfigError(
                f"--buckets {data.buckets}: the sides of {width} x {height} must be multiples of {what}; "
                f"{'change --bucket_step' if made else 'correct it'}"
            )

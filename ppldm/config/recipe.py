"""All settings of a run: a family, its model, the data and the training, as one object and as a tree of plain values.

The tree has a section for each kind of setting, as YAML files have; `family` is a plain key of it.
"""

import re
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from ..utils.errors import PpldmError
from .data import DataOptions
from .load import Layer, Setting, load
from .option import Option, Schema, options
from .training import TrainingOptions

SECTIONS = ("model", "data", "optimizer", "compute", "run", "logging", "validation")


@dataclass(frozen=True)
class Recipe:
    """All settings of a run. `model` is an instance of the family's Config; `settings`: by key, with their origins."""

    family: str
    model: Any
    data: DataOptions
    training: TrainingOptions
    settings: dict[str, Setting] = field(default_factory=dict, compare=False, repr=False)

    def tree(self) -> dict:
        """Family and sections of plain values, as YAML holds them; `make_recipe` of it is this recipe again."""
        return {"family": self.family} | sections_of(self.model, self.data, self.training)


def sections_of(*groups) -> dict[str, dict]:
    """The values of groups of settings by section and name, lists and tables as copies."""
    found = {section: {} for section in SECTIONS}
    for group in groups:
        for name, stated in options(type(group)).items():
            value = getattr(group, name)
            if name == "output_dir" and group.output_store:
                value = group.output_store
            found[stated.section][name] = copy(value)
    return found


def groups_of(config: type) -> tuple[type, type, type]:
    """The three groups of settings of a family whose own are `config`."""
    return config, DataOptions, TrainingOptions


def schema_of(config: type) -> Schema:
    """All options of a family by section, in the order of `SECTIONS`."""
    found = {section: {} for section in SECTIONS}
    for group in groups_of(config):
        for name, stated in options(group).items():
            found[stated.section][name] = stated
    return found


def defaults(config: type, loop: bool) -> dict[str, dict]:
    """The default of every option, by section; REQUIRED for those that must be given.

    `config.loop_defaults` holds the family's own of the hand-written loop, by name.
    """
    own = getattr(config, "loop_defaults", {}) if loop else {}
    return {
        section: {name: own.get(name, stated.default_of(loop)) for name, stated in known.items()}
        for section, known in schema_of(config).items()
    }


def merge_settings(layers: list[Layer], loop: bool, config: type, keep_missing: bool = False) -> dict[str, Setting]:
    """All settings of a recipe by key, from `layers`, the weakest first (`load.load`).

    `loop`: whether the defaults are the hand-written loop's; `config`: the family's settings. Raises ConfigError.
    """
    family = Option("What is trained.", config.family, config.family, name="family", choices=(config.family,))
    schema = {"family": family} | {one.key: one for known in schema_of(config).values() for one in known.values()}
    return load(layers, schema, {"family": config.family} | flatten(defaults(config, loop)), keep_missing)


def recipe_of(settings: dict[str, Setting], config: type) -> Recipe:
    """The recipe of all settings by key. Raises ConfigError for those that do not go together."""
    values = {key.rpartition(".")[2]: setting.value for key, setting in settings.items()}
    made = [group(**{name: values[name] for name in options(group)}) for group in groups_of(config)]
    with naming_origins(settings):
        for group in made:
            group.check()
    made[2].written = {key: setting.written for key, setting in settings.items() if setting.written is not None}
    return Recipe(values["family"], *made, settings)  # type: ignore[call-arg]


@contextmanager
def naming_origins(settings: dict[str, Setting]):
    """Errors of the block that name a flag begin with the file, or the preset, that gave its value."""
    try:
        yield
    except PpldmError as error:
        origins = {key.rpartition(".")[2]: one.origin for key, one in settings.items()}
        named = (origins.get(name, "flag") for name in re.findall(r"--(\w+)", str(error)))
        origin = next((one for one in named if one not in ("default", "flag", "override", "tree")), None)
        if origin is None:
            raise
        raise type(error)(f"{origin}: {error}") from error


def make_recipe(tree: dict, loop: bool, config: type) -> Recipe:
    """The recipe of a tree of values, which are taken as they are; the others at their defaults. Raises ConfigError."""
    return recipe_of(merge_settings([Layer("tree", flatten(tree), is_literal=True)], loop, config), config)


def idle_settings(recipe: Recipe, loop: bool) -> list[tuple[Option, str]]:
    """Settings that do nothing though a flag gives them or they differ from their defaults, each with what stands
    against it. What only a preset says is nobody's wish."""
    groups = (recipe.model, recipe.data, recipe.training)
    given = SimpleNamespace(**{name: value for group in groups for name, value in vars(group).items()})
    usual = {name: value for known in defaults(type(recipe.model), loop).values() for name, value in known.items()}
    return [
        (stated, stated.needs.words)
        for group in groups
        for name, stated in options(type(group)).items()
        if stated.needs
        and _is_wanted(recipe, stated, getattr(given, name), usual[name])
        and not stated.needs.met(given)
    ]


def _is_wanted(recipe: Recipe, stated: Option, value, usual) -> bool:
    origin = recipe.settings[stated.key].origin if stated.key in recipe.settings else "tree"
    is_typed = origin in ("flag", "override") and value is not False
    return value is not None and (is_typed or value != usual) and not origin.startswith("preset ")


def flatten(tree: dict) -> dict:
    """A recipe's tree as dotted keys to values, such as data.resolution."""
    found = {}
    for section, given in tree.items():
        found |= (
            {f"{section}.{name}": value for name, value in given.items()}
            if isinstance(given, dict) and given
            else {section: given or None}
        )
    return found

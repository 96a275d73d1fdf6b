"""All settings of a run: a family, its model, the data and the training, as one object and as a tree of plain values.

The tree has a section for each kind of setting, as YAML files have; `family` is a plain key of it.
"""

import re
from collections.abc import Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from textwrap import wrap
from typing import Any

from ..utils.errors import PpldmError
from .data import DataOptions
from .load import Layer, Setting, escape, file_layers, for_yaml, load, preset_path
from .network_files import KNOWN_MODELS
from .option import Option, Schema, options
from .training import TrainingOptions

SECTIONS = ("model", "data", "optimizer", "compute", "run", "logging", "validation")
_PIPELINE = "model.model_name_or_path"


@dataclass(frozen=True)
class Recipe:
    """All settings of a run. `model` is an instance of the family's Config; `settings`: by key, with their origins."""

    family: str
    model: Any
    data: DataOptions
    training: TrainingOptions
    settings: dict[str, Setting] = field(default_factory=dict, compare=False, repr=False)


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
    """All options of a family by key, in the order of `SECTIONS`."""
    known = [stated for group in groups_of(config) for stated in options(group).values()]
    return {stated.key: stated for section in SECTIONS for stated in known if stated.section == section}


def defaults(config: type, loop: bool) -> dict[str, Any]:
    """The default of every option, by key. `config.loop_defaults`: a family's own of the hand-written loop, by name."""
    own = getattr(config, "loop_defaults", {}) if loop else {}
    return {key: own.get(stated.name, stated.default_of(loop)) for key, stated in schema_of(config).items()}


def merge_settings(layers: list[Layer], loop: bool, config: type, *may_lack) -> dict[str, Setting]:
    """All settings of a recipe by key, as `load.load`; `loop`: with the defaults of that loop. Raises ConfigError."""
    family = Option("What is trained.", config.family, config.family, name="family", choices=(config.family,))
    usual = {"family": config.family} | defaults(config, loop)
    return load(_without_replaced(layers, config), {"family": family} | schema_of(config), usual, *may_lack)


def _without_replaced(layers: list[Layer], config: type) -> list[Layer]:
    """The layers; where one names a whole pipeline, weaker ones lose the networks that it replaces."""
    named = [at for at, layer in enumerate(layers) if _PIPELINE in layer.values]
    if not named or layers[named[-1]].values[_PIPELINE] in (None, *KNOWN_MODELS):
        return layers
    at, replaced = named[-1], [f"model.{name}" for name in getattr(config, "replaced_by_pipeline", ())]
    kept = ({key: value for key, value in one.values.items() if key not in replaced} for one in layers[:at])
    return [replace(one, values=values) for one, values in zip(layers, kept, strict=False)] + layers[at:]


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
def naming_origins(settings: dict[str, Setting], kind: type[PpldmError] = PpldmError):
    """Errors of this kind that name a flag say what gave its value: a file, a preset, or nobody."""
    try:
        yield
    except kind as error:
        origins = {key.rpartition(".")[2]: one.origin for key, one in settings.items()}
        named = [origins.get(name, "flag") for name in re.findall(r"--(\w+)", str(error))]
        if origin := next((one for one in named if one not in ("default", "flag", "override", "tree")), None):
            raise type(error)(f"{origin}: {error}") from error
        if named[:1] == ["default"]:
            what = re.sub(r"^(--\w+)", r"\1 is not given; its default", str(error))
            if str(error).startswith("--file_list"):
                what = f"{what.rpartition('; ')[0]}; give --file_list LIST"
            raise type(error)(what) from error
        raise


class _Given:
    """All settings of a run, and what a family makes of its own, as attributes of one object."""

    def __init__(self, groups):
        self._groups = groups

    def __getattr__(self, name: str):
        group = next((one for one in self._groups if hasattr(one, name)), self._groups[-1])
        return getattr(group, name)


def idle_settings(recipe: Recipe, loop: bool) -> list[Option]:
    """Settings that do nothing though a flag gives them, or a file, but not a preset, differs from their defaults."""
    groups, found = (recipe.model, recipe.data, recipe.training), []
    given = _Given(groups)
    usual = defaults(type(recipe.model), loop)
    for group in groups:
        for name, stated in options(type(group)).items():
            value = getattr(group, name)
            origin = recipe.settings[stated.key].origin if stated.key in recipe.settings else "tree"
            is_typed = origin in ("flag", "override") and value is not False
            is_wanted = is_typed or (value != usual[stated.key] and not origin.startswith("preset "))
            if stated.needs and value is not None and is_wanted and not stated.needs.met(given):
                found.append(stated)
    return found


def flatten(tree: dict) -> dict:
    """A recipe's tree as dotted keys to values, such as data.resolution."""
    found = {}
    for section, given in tree.items():
        if isinstance(given, dict) and given:
            found |= {f"{section}.{name}": value for name, value in given.items()}
        else:
            found[section] = given or None
    return found


RECIPE_FILE = "recipe.yaml"  # in a run's folder, its checkpoints and its export

_ONCE = "run.overwrite_output_dir"  # belongs to one command; who repeats a recipe does not mean to clear its folder

_COMMENT_WIDTH = 110


def write_settings(found: dict[str, Setting], origins: bool = False, comments: Mapping[str, str] | None = None) -> str:
    """YAML of settings by key. `origins`: with a comment on where each came from. `comments`: by key, above it."""
    from omegaconf import OmegaConf

    text, section = "", ""
    for key, setting in sorted(found.items(), key=lambda one: "." in one[0]):  # those of no section come first
        above, _, name = key.rpartition(".")
        if above != section:
            text, section = f"{text}\n{above}:\n", above
        value = for_yaml(escape(setting.value) if setting.written is None else setting.written)
        lines = OmegaConf.to_yaml(OmegaConf.create({name: value})).rstrip("\n").split("\n")
        if origins and len(lines) == 1:
            lines = [f"{lines[0]}  # {setting.origin}"]
        elif origins:
            lines = [f"# {setting.origin}", *lines]
        lines = [f"# {line}" for line in wrap((comments or {}).get(key, ""), _COMMENT_WIDTH)] + lines
        text += "".join(f"{'  ' if above else ''}{line}\n" for line in lines)
    return text


def preset_recipe(preset: str, config: type, changes: dict, shown: tuple[str, ...] = ()) -> str:
    """YAML of a recipe that builds on a preset: `changes` by key, and the settings `shown` whatever they are, each
    under its help. config: the family's settings. Raises ConfigError."""
    known = schema_of(config)
    changed = Layer("changes", {"family": config.family, **changes}, is_literal=True)  # type: ignore[attr-defined]
    settings = merge_settings([*file_layers(preset_path(preset)), changed], True, config, lambda _: True)
    found = {key: settings[key] for key in known if key in changes or key in shown}
    comments = {key: known[key].help for key in found}
    return f"base: {preset}\nfamily: {config.family}\n" + write_settings(found, comments=comments)  # type: ignore[attr-defined]


def recipe_text(tree: dict, written: dict[str, str], version: str) -> str:
    """What recipe.yaml holds: a tree of sections; `written`: expressions by key, in place of their values."""
    found = {key: Setting(value, written=written.get(key)) for key, value in flatten(tree).items() if key != _ONCE}
    head = f"# All settings of a run of ppldm {version}. `ppldm train --config` of this file repeats it.\n"
    return head + write_settings(found)

"""A recipe as YAML: every setting under its section, so that it repeats the run whatever the defaults become.

Of a value that came from the environment the expression is written, `${oc.env:NAME}`, and never the value.
"""

from collections.abc import Mapping
from textwrap import wrap
from types import MappingProxyType

from .load import Layer, Setting, escape, preset_layers
from .recipe import flatten, merge_settings, schema_of
from .yaml_file import for_yaml

RECIPE_FILE = "recipe.yaml"  # in a run's folder, its checkpoints and its export

_ONCE = "run.overwrite_output_dir"  # belongs to one command; who repeats a recipe does not mean to clear its folder

_COMMENT_WIDTH = 110
_NONE: Mapping[str, str] = MappingProxyType({})


def write_settings(found: dict[str, Setting], origins: bool = False, comments: Mapping[str, str] = _NONE) -> str:
    """YAML of settings by key. `origins`: with a comment on each that says where it came from. comments: by key, above
    it."""
    text, section = "", ""
    for key, setting in sorted(found.items(), key=lambda one: "." in one[0]):  # those of no section come first
        above, _, name = key.rpartition(".")
        if above != section:
            text, section = f"{text}\n{above}:\n", above
        lines = _value_lines(name, setting)
        if origins and len(lines) == 1:
            lines = [f"{lines[0]}  # {setting.origin}"]
        elif origins:
            lines = [f"# {setting.origin}", *lines]
        lines = [f"# {line}" for line in wrap(comments.get(key, ""), _COMMENT_WIDTH)] + lines
        text += "".join(f"{'  ' if above else ''}{line}\n" for line in lines)
    return text


def preset_recipe(preset: str, config: type, changes: dict, shown: tuple[str, ...] = ()) -> str:
    """YAML of a recipe that builds on a preset: `changes` by key, and the settings `shown` whatever they are, each
    under its help. config: the family's settings. Raises ConfigError."""
    known = {one.key: one for section in schema_of(config).values() for one in section.values()}
    layers = [*preset_layers(preset), Layer("changes", {"family": config.family, **changes}, is_literal=True)]  # type: ignore[attr-defined]
    settings = merge_settings(layers, True, config, keep_missing=True)
    found = {key: settings[key] for key in known if key in changes or key in shown}
    comments = {key: known[key].help for key in found}
    return f"base: {preset}\nfamily: {config.family}\n" + write_settings(found, comments=comments)  # type: ignore[attr-defined]


def recipe_text(tree: dict, written: dict[str, str], version: str) -> str:
    """What recipe.yaml holds: a tree of sections; `written`: expressions by key, in place of their values."""
    found = {key: Setting(value, written=written.get(key)) for key, value in flatten(tree).items() if key != _ONCE}
    head = f"# All settings of a run of ppldm {version}. `ppldm train --config` of this file repeats it.\n"
    return head + write_settings(found)


def _value_lines(name: str, setting: Setting) -> list[str]:
    from omegaconf import OmegaConf

    value = for_yaml(setting.value if setting.written is None else setting.written)
    if setting.written is None:
        value = escape(value)
    return OmegaConf.to_yaml(OmegaConf.create({name: value})).rstrip("\n").split("\n")

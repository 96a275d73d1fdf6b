"""Adding a setting takes one statement: all that shows, reads, checks or compares settings follows from it."""

import dataclasses
from typing import ClassVar

import pytest

from ppldm.config.load import file_layers, load
from ppldm.config.option import Bounds, identity_of, option
from ppldm.config.recipe import defaults, flatten, schema_of
from ppldm.families.settings_table import settings_table
from ppldm.training.arguments import make_parser, read_recipe
from ppldm.utils.errors import ConfigError


class Base:
    """What a family's settings have besides options."""

    family: ClassVar[str] = "toy"

    def check(self) -> None:
        """Nothing can be wrong."""


# The one statement.
STATED = option(
    3, "Wheels of the cart.", bounds=Bounds(least=1, most=8), unit="wheels", also=("num_wheels",), identity=True,
    section="model",
)  # fmt: skip
Config = dataclasses.make_dataclass("Config", [("wheels", int, STATED)], bases=(Base,), kw_only=True)


def wheels_of(tmp_path, text: str) -> int:
    """`model.wheels` of a YAML file."""
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    schema = {stated.key: stated for known in schema_of(Config).values() for stated in known.values()}
    return load(file_layers(path), schema, flatten(defaults(Config, loop=True)))["model.wheels"].value


def test_it_is_a_flag_in_all_its_spellings():
    assert read_recipe([], True, Config).model.wheels == 3
    for flag in ("--wheels", "--num_wheels"):
        assert read_recipe([flag, "4"], True, Config).model.wheels == 4
    with pytest.raises(ConfigError, match="unknown flag --wheel; did you mean --wheels?"):
        read_recipe(["--wheel", "4"], True, Config)


def test_it_is_in_the_help_with_its_default():
    text = " ".join(make_parser(True, Config).format_help().split())
    assert "--wheels N, --num_wheels N Wheels of the cart. (default: 3 wheels)" in text


def test_it_is_in_yaml(tmp_path):
    assert wheels_of(tmp_path, "model:\n  wheels: 5\n") == 5
    assert wheels_of(tmp_path, "data:\n  resolution: 64\n") == 3
    with pytest.raises(ConfigError, match="recipe.yaml:2: model.wheel is not known; did you mean model.wheels?"):
        wheels_of(tmp_path, "model:\n  wheel: 5\n")


def test_a_wrong_value_is_refused_in_the_same_words(tmp_path):
    with pytest.raises(ConfigError, match="^--wheels 9 must be from 1 to 8$"):
        read_recipe(["--num_wheels", "9"], True, Config)
    with pytest.raises(ConfigError, match="recipe.yaml:2: model.wheels 9 must be from 1 to 8$"):
        wheels_of(tmp_path, "model:\n  wheels: 9\n")


def test_it_is_in_the_docs_table():
    cells = ["`model.wheels`, `--num_wheels`", "3", "whole number from 1 to 8; wheels"]
    row = " | ".join([*cells, "Wheels of the cart. *part of the run*"])
    assert f"| {row} |" in settings_table({"toy": Config}).splitlines()


def test_it_is_saved_and_part_of_the_identity():
    recipe = read_recipe(["--wheels", "6"], True, Config)
    assert recipe.tree()["model"] == {"wheels": 6} and identity_of(recipe.model) == {"wheels": 6}

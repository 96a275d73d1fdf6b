"""Adding a setting takes one statement: all that shows, reads, checks or compares settings follows from it."""

import dataclasses
from typing import ClassVar

import pytest
from command_line import tree_of
from settings_table import settings_table

from ppldm.config.load import file_layers, load
from ppldm.config.option import Bounds, identity_of, option
from ppldm.config.recipe import defaults, recipe_text, schema_of
from ppldm.training.commands.train import make_parser, read_recipe
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
    return load(file_layers(path), schema_of(Config), defaults(Config, loop=True))["model.wheels"].value


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
    assert tree_of(recipe)["model"] == {"wheels": 6} and identity_of(recipe.model) == {"wheels": 6}


TABLE = option(None, "Wheels by place.", bounds=Bounds(above=0), section="model")
Wheels = dataclasses.make_dataclass("Wheels", [("places", dict[str, float] | None, TABLE)], bases=(Base,), kw_only=True)


def test_a_table_is_the_same_in_all_its_spellings(tmp_path):
    table = {"front": 0.5, "rear": 2.0}
    path = tmp_path / "recipe.yaml"
    for text in ("{front: 0.5, rear: 2}", "front:0.5,rear:2", "\n    front: 0.5\n    rear: 2"):
        path.write_text(f"model:\n  places: {text}\n")
        assert read_recipe(["--config", str(path)], True, Wheels).model.places == table
    for words in (["--places", "front:0.5,rear:2"], ["model.places={front: 0.5, rear: 2}"]):
        assert read_recipe(words, True, Wheels).model.places == table
    recipe = read_recipe(["--places", "front:0.5,rear:2"], True, Wheels)
    path.write_text(recipe_text(tree_of(recipe), {}, "1"))
    assert read_recipe(["--config", str(path)], True, Wheels).model.places == table
    assert read_recipe([], True, Wheels).model.places is None
    assert "--places NAME:X,..." in make_parser(True, Wheels).format_help()
    assert "names, each with a number above 0" in settings_table({"toy": Wheels})


@pytest.mark.parametrize(
    "words, message",
    [
        ("front", "must be values by name"),
        ("front:1,front:2", "must be values by name"),
        (":1", "must be values by name"),
        ("front:0", "--places front: 0.0 must be above 0"),
        ("front:x", "--places front: x must be a number"),
    ],
)
def test_what_is_no_table_is_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        read_recipe(["--places", words], True, Wheels)

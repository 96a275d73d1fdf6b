"""Settings of a training, of its command line or of a tree."""

from ppldm.config.load import Layer
from ppldm.config.recipe import Recipe, flatten, merge_settings, recipe_of, sections_of
from ppldm.families.ldm import LdmConfig
from ppldm.training.commands.train import read_recipe, warn_of_idle


def parse_arguments(argv: list[str], loop: bool, config: type = LdmConfig) -> tuple:
    """(`config`, DataOptions, TrainingOptions), checked; says in the log which of them do nothing."""
    recipe = read_recipe(argv, loop, config)
    warn_of_idle(recipe, loop)
    return recipe.model, recipe.data, recipe.training


def make_recipe(tree: dict, loop: bool, config: type) -> Recipe:
    """The recipe of a tree of values, which are taken as they are; the others at their defaults."""
    return recipe_of(merge_settings([Layer("tree", flatten(tree), is_literal=True)], loop, config), config)


def tree_of(recipe: Recipe) -> dict:
    """Family and sections of plain values, as YAML holds them; `make_recipe` of it is this recipe again."""
    return {"family": recipe.family} | sections_of(recipe.model, recipe.data, recipe.training)

"""The entry of `ppldm train` and of the training scripts: a recipe is read and checked before Paddle is loaded.

What can be refused at once is refused before that, which takes seconds: wrong flags, paths that are not there, configs
that no network can have. Nothing heavy is imported here.
"""

from contextlib import contextmanager
from pathlib import Path

from ...config.flags import parse_known
from ...config.network_files import find_network_file
from ...config.option import Option, options
from ...config.recipe import Recipe, naming_origins
from ...data.filelist import list_of_folder, parts_of_folder
from ...data.text.tokenizer import check_tokenizer
from ...families.base import check_family
from ...families.ldm import LdmConfig
from ...utils.entry import entry
from ...utils.errors import ConfigError, PpldmError
from ...utils.machine.devices import parse_device
from ...utils.store.client import is_address
from ...utils.variables import network_forbidden
from ...weights.fetch import check_name
from .arguments import read_dry_run, read_recipe, warn_of_idle


def check_early(argv: list[str], loop: bool = True, config: type | None = LdmConfig, prog: str | None = None) -> Recipe:
    """The recipe of a command line. Raises ConfigError, ModelError where no run can be made of it; shows the help if
    asked to. `config`: the settings of a script's family; None for the family of the recipe."""
    recipe = read_recipe(argv, loop, config, prog)
    with naming_origins(recipe.settings):
        check_recipe(recipe)
    return recipe


def check_recipe(recipe: Recipe) -> None:
    """Raises ConfigError, ModelError for what a recipe names and what is not there, or no model can be made of."""
    for group in (recipe.model, recipe.data, recipe.training):
        for name, stated in options(type(group)).items():
            if stated.kind in _CHECKS and getattr(group, name):
                _CHECKS[stated.kind](stated, getattr(group, name))
    check_family(recipe.model, recipe.data, recipe.training)


def _check_file(stated: Option, value: str) -> None:
    if is_address(value):
        return  # the first rank that reads it asks the store, and says what is wrong
    if not Path(value).is_file():
        what = "is a folder" if Path(value).is_dir() else "is not there"
        raise ConfigError(f"--{stated.name} {value} {what}; give the path of a file")


def _check_rows(stated: Option, value: str) -> None:
    if is_address(value) or not (folder := Path(value)).is_dir():
        _check_file(stated, value)
        return
    with _naming(stated):
        if list_of_folder(folder) is None:
            parts_of_folder(folder)


def _check_network(stated: Option, value: str) -> None:
    find_network_file(value, f"--{stated.name}")


def _check_model(stated: Option, value: str) -> None:
    with _naming(stated):
        check_name(value)


def _check_tokenizer(stated: Option, value: str) -> None:
    with _naming(stated):
        check_tokenizer(value)


def _check_device(_stated: Option, value: str) -> None:
    parse_device(value)


@contextmanager
def _naming(stated: Option):
    try:
        yield
    except PpldmError as error:
        raise type(error)(f"--{stated.name}: {error}") from error


# What the value of an option must pass, by its kind.
_CHECKS = {
    "file": _check_file,
    "rows": _check_rows,
    "network": _check_network,
    "model": _check_model,
    "tokenizer": _check_tokenizer,
    "device": _check_device,
}


LOOPS = ("hand", "trainer")  # the hand-written loop, PaddleNLP's Trainer: the same results


def train(argv: list[str]):
    """Train a model by a preset, a config file, flags or all of them."""
    import argparse

    from .launched import is_wanted, launch, read_launch

    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--loop", choices=LOOPS, default="hand")
    words = [with_underscores(word) for word in argv]
    wanted, words = read_launch(words)
    given, rest = parse_known(parser, words)
    by_hand, prog = given.loop == "hand", "ppldm train [--loop hand|trainer]"
    rest = rest if by_hand else ["--do_train", *rest]
    if is_wanted(wanted) and not read_dry_run(rest):
        launch(wanted, words, check_early(rest, by_hand, None, prog))
    run_training(rest, loop=by_hand, config=None, prog=prog)


train.takes_words = True


def run_training(argv: list[str], loop: bool, config: type | None, prog: str | None = None) -> None:
    """Train by a command line. `config`: the settings of a script's family; None for the family of the recipe."""
    recipes = []
    with (
        entry(lambda: recipes.append(check_early(argv, loop, config, prog)), meets=True),
        network_forbidden(getattr(recipes[0].model, "offline", False)),
    ):
        if asked := read_dry_run(argv):
            from .dry_run import dry_run

            dry_run(*recipes, *asked)  # type: ignore[call-arg]
        else:
            run_recipe(*recipes, loop)  # type: ignore[call-arg]


def run_recipe(recipe: Recipe, loop: bool) -> None:
    """Train by a recipe: by the hand-written loop, or under PaddleNLP's Trainer. Raises PpldmError."""
    from ..train import run_loop, train_recipe

    warn_of_idle(recipe, loop)
    if loop:
        train_recipe(recipe, run_loop)
    else:
        from ..trainer import run_trainer

        train_recipe(recipe, run_trainer)


def with_underscores(word: str) -> str:
    """`--learning-rate=1` as `--learning_rate=1`: both spellings of a flag are the same flag."""
    flag, equals, value = word.partition("=")
    return flag.replace("-", "_").replace("__", "--", 1) + equals + value if word.startswith("--") else word

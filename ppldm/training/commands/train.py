"""The entry of `ppldm train` and of the training scripts: a recipe is read and checked before Paddle is loaded."""

from ...config.flags import parse_known
from ...config.recipe import Recipe
from ...utils.entry import entry
from ...utils.offline import network_forbidden
from ...utils.processes.world import World
from .arguments import read_dry_run
from .early import check_early

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
    """Train by a recipe: under PaddleNLP's Trainer, or by the hand-written loop. Raises PpldmError."""
    from ..doctor.machine import look_quickly
    from ..prepare import prepare
    from .arguments import warn_of_idle

    warn_of_idle(recipe, loop)
    if World.detect().is_main:
        look_quickly(recipe.training)
    run = prepare(recipe.model, recipe.data, recipe.training)
    if loop:
        from ..train import run_loop

        run_loop(run)
    else:
        from ..trainer import run_trainer

        run_trainer(run)


def with_underscores(word: str) -> str:
    """`--learning-rate=1` as `--learning_rate=1`: both spellings of a flag are the same flag."""
    flag, equals, value = word.partition("=")
    return flag.replace("-", "_").replace("__", "--", 1) + equals + value if word.startswith("--") else word

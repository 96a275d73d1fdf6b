"""What can be refused at once, before paddle is imported, which takes seconds: wrong flags, paths that are not there,
configs that no network can have. Nothing heavy is imported here."""

from contextlib import contextmanager
from pathlib import Path

from ...config.network_files import find_network_file
from ...config.option import Option, options
from ...config.recipe import Recipe, naming_origins
from ...data.filelist import list_of_folder, parts_of_folder
from ...data.text.tokenizer import check_tokenizer
from ...families.base import check_family
from ...families.ldm import LdmConfig
from ...utils.errors import ConfigError, PpldmError
from ...utils.machine.devices import parse_device
from ...utils.store.client import is_address
from ...weights.fetch import check_name
from .arguments import read_recipe


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

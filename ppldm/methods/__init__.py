"""A method is a file: what it is, its mathematics, source, published figure (docs/extending.md). Here are those that
`--methods` names; those in a folder are named by a setting, as their files are. None is imported before it is named."""

from dataclasses import fields
from functools import cache
from importlib import import_module
from pathlib import Path

from ..config.option import options


def names(folder: str, *first: str) -> tuple[str, ...]:
    """The methods of a folder: `first` in their order, as help texts have it, and then all others."""
    found = sorted(path.stem for path in Path(__file__).with_name(folder).glob("[!_]*.py"))
    return *first, *(name for name in found if name not in first)


@cache
def load(folder: str, name: str):
    return import_module(f".{folder}.{name}", __package__)


def make(folder: str, name: str, settings):
    """The `METHOD` of a module, whose fields are told by the settings of their names, unless these are None."""
    kind, known = load(folder, name).METHOD, options(type(settings))
    given = {one.name: getattr(settings, one.name) for one in fields(kind) if one.name in known}
    return kind(**{name: value for name, value in given.items() if value is not None})

"""Parsing that helps: an unknown flag is an error that names the nearest known one; help shows values as one types
them. The flags of training are made from the options of its groups."""

import argparse
from typing import Any

from ..utils.errors import ConfigError
from ..utils.text import nearest
from .option import REQUIRED, Option, Schema, negate, parse_value

PLACEHOLDERS: dict[Any, str] = {int: "N", float: "X"}  # what stands for a value in help, by its type


def parse_known_or_suggest(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    """`parser.parse_args(argv)`, with argparse's complaints and unknown flags as a one-line ConfigError."""
    namespace, unknown = parse_known(parser, argv)
    if unknown:
        raise ConfigError(explain_unknown(unknown[0], parser))
    return namespace


def parse_known(parser: argparse.ArgumentParser, argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """`parser.parse_known_args(argv)`, with argparse's complaints as a one-line ConfigError.

    Abbreviated flags are refused: `--max` must not silently mean `--max_steps` today and `--max_samples` tomorrow.
    """
    parser.allow_abbrev = False
    parser.exit_on_error = False
    parser.error = _raise_config_error  # type: ignore[method-assign]
    try:
        return parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error} (`--help` explains every flag)") from error


def add_options(parser: argparse.ArgumentParser, schema: Schema, usual: dict[str, dict], script: str) -> None:
    """Give `parser` a flag for each option, in a group for each section; those of another script without help.

    What is not given is not in the namespace that it makes; `given_options` reads those that are. `usual`: defaults.
    """
    for section, known in schema.items():
        group = parser.add_argument_group(section)
        for name, stated in known.items():
            _add_option(group, stated, usual[section][name], script in stated.scripts)


def given_options(namespace: argparse.Namespace, schema: Schema) -> dict[str, dict]:
    """The options that a command line gives, by section: in their types, their ranges not yet checked."""
    found = {}
    for section, known in schema.items():
        for name, stated in known.items():
            if hasattr(namespace, name):
                words = getattr(namespace, name)
                value = [parse_value(stated, word) for word in words] if stated.is_list else parse_value(stated, words)
                found.setdefault(section, {})[name] = value
    return found


def _add_option(group, stated: Option, default, shown: bool) -> None:
    flag = f"--{stated.name}"
    facts: dict[str, Any] = {"dest": stated.name, "default": argparse.SUPPRESS, "metavar": _placeholder(stated)}
    facts["help"] = _help_of(stated, default).replace("%", "%%") if shown else argparse.SUPPRESS
    if stated.type is bool:
        facts |= {"nargs": "?", "const": "true"}
    elif stated.is_list:
        facts["nargs"] = "+"
    group.add_argument(flag, *(f"--{other}" for other in stated.also), **facts)
    for other in stated.opposite:
        facts |= {"help": f"The opposite of {flag}." if shown else argparse.SUPPRESS, "type": negate}
        group.add_argument(f"--{other}", **facts)
    if stated.type is bool and stated.default is True:
        same = f"The same as {flag} false." if shown else argparse.SUPPRESS
        facts = {"dest": stated.name, "default": argparse.SUPPRESS, "help": same}
        group.add_argument(f"--no_{stated.name}", action="store_const", const="false", **facts)


def _help_of(stated: Option, default) -> str:
    """An option's help, with its choices where no placeholder shows them, and its default with its unit."""
    text = stated.help
    if stated.choices and _placeholder(stated) == "NAME":
        text += f" One of {', '.join(stated.choices)}."
    if default is REQUIRED:
        return text
    shown = str(default).lower() if isinstance(default, bool) else format_default(default)
    return f"{text} (default: {shown}{stated.unit and f' {stated.unit}'})" if shown else text


def _placeholder(stated: Option) -> str:
    if stated.choices:  # argparse would list them behind each spelling
        return "NAME" if stated.also or stated.is_list else f"{{{','.join(stated.choices)}}}"
    if stated.type is bool:
        return "BOOL"
    if stated.is_table:
        return f"NAME:{PLACEHOLDERS[stated.type]},..."
    return PLACEHOLDERS.get(stated.type, "PATH" if stated.kind else "TEXT")


def format_default(value) -> str | None:
    """A default as a user types it; None where there is nothing to show: no value, an empty one, a switch."""
    if value is None or isinstance(value, bool) or value == argparse.SUPPRESS:
        return None
    if isinstance(value, (list, tuple)):
        return " ".join(f"{one:g}" if isinstance(one, float) else str(one) for one in value) or None
    return f"{value:g}" if isinstance(value, float) else str(value) or None


def show_values(parser: argparse.ArgumentParser) -> None:
    """In the help of a parser of fastcore's: placeholders in place of types, and defaults as a user types them."""
    for action in parser._actions:
        if action.option_strings and action.nargs != 0 and not action.choices:
            named = action.metavar and not action.metavar.startswith("(")
            action.metavar = action.metavar if named else PLACEHOLDERS.get(action.type, action.dest.upper())
        if action.help and action.help != argparse.SUPPRESS:
            shown = format_default(action.default)
            if action.default is not None and " (default: " in action.help:  # fastcore has added it
                action.help = action.help.rpartition(" (default: ")[0]
            action.help += f" (default: {shown})" if shown and action.option_strings else ""


def _raise_config_error(message: str):
    raise ConfigError(f"{message} (`--help` explains every flag)")


def explain_unknown(word: str, parser: argparse.ArgumentParser) -> str:
    """What is wrong with a word that `parser` does not know, with the nearest flag."""
    if not word.startswith("-"):
        return f"unexpected argument {word!r}; flags start with --"
    flag = word.partition("=")[0]
    name = flag.lstrip("-").replace("-", "_")
    if any(name == action.dest for action in parser._actions if not action.option_strings):
        return f"unknown flag {flag}; give only its value, without a flag"
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    known = {one.lstrip("-").replace("-", "_"): one for action in shown for one in action.option_strings}
    near = known.get(nearest(name, known))
    hint = f"did you mean {near}?" if near else "`--help` lists the known ones"
    return f"unknown flag {flag}; {hint}"

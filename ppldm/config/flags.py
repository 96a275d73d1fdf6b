"""Parsing that helps: an unknown flag is an error that names the nearest known one; help shows values as one types
them."""

import argparse
import difflib

from ..utils.errors import ConfigError

PLACEHOLDERS = {int: "N", float: "X"}  # what stands for a value in help, by its type


def parse_known_or_suggest(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    """`parser.parse_args(argv)`, with argparse's complaints and unknown flags as a one-line ConfigError.

    Abbreviated flags are refused: `--max` must not silently mean `--max_steps` today and `--max_samples` tomorrow.
    """
    parser.allow_abbrev = False
    parser.exit_on_error = False
    parser.error = _raise_config_error
    try:
        namespace, unknown = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error} (`--help` explains every flag)") from error
    if unknown:
        raise ConfigError(_explain_unknown(unknown[0], parser))
    return namespace


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


def _explain_unknown(word: str, parser: argparse.ArgumentParser) -> str:
    if not word.startswith("-"):
        return f"unexpected argument {word!r}; flags start with --"
    flag = word.partition("=")[0]
    known = [name for action in parser._actions for name in action.option_strings]
    near = difflib.get_close_matches(flag, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else "`--help` lists the known ones"
    return f"unknown flag {flag}; {hint}"

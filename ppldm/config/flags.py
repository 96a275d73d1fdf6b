"""Parsing that helps: an unknown flag is an error that names the nearest known one."""

import argparse
import difflib

from ..utils.errors import ConfigError


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

"""One setting, stated once: a field of a group of settings that knows all facts about itself; and flags made from it.

`option` makes the field, `options` lists those of a group by name. Flags, YAML keys, help, docs and checks are made
from pathlib import Path
from these facts. A help that does not fit on the field's line stands below it. An unknown flag is an error that names
the nearest; help shows values as one types them.
"""

import argparse
import ast
import dataclasses
import functools
import inspect
import math
import sys
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Annotated, Any

from ..utils.errors import ConfigError
from ..utils.text import did_you_mean, nearest

SCRIPTS = ("trainer", "loop")  # under PaddleNLP's Trainer, and the hand-written loop
REQUIRED = dataclasses.MISSING  # the default of an option that must be given

_TRUE, _FALSE = ("yes", "true", "t", "y", "1"), ("no", "false", "f", "n", "0")
PLACEHOLDERS: dict[Any, str] = {int: "N", float: "X"}  # what stands for a value in help, by its type
_TYPE_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


@dataclass(frozen=True)
class Bounds:
    """The range of a number; a limit that is None does not hold."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None

    def hold(self, value: float) -> bool:
        """Whether `value` is inside."""
        is_inside = (self.least is None or value >= self.least) and (self.most is None or value <= self.most)
        return is_inside and (self.above is None or value > self.above) and (self.below is None or value < self.below)

    def __str__(self) -> str:
        """The range in words, as after "must be"."""
        if self.least is not None and self.most is not None:
            return f"from {self.least} to {self.most}"
        if self.least is not None and self.below is None:
            return f"{self.least} or more"
        limits = {"above": self.above, "at least": self.least, "at most": self.most, "below": self.below}
        return " and ".join(f"{word} {limit}" for word, limit in limits.items() if limit is not None)


# Kinds of numbers: the type of a setting says its bounds and its unit too, where they are not facts of its own.
ABOVE_0, FROM_0 = Bounds(above=0), Bounds(least=0)
Positive = Annotated[float, ABOVE_0]
NotNegative = Annotated[float, FROM_0]
Share = Annotated[float, Bounds(least=0, most=1)]
SmallShare = Annotated[float, Bounds(least=0, below=1)]
Count = Annotated[int, ABOVE_0]
Pixels = Annotated[int, ABOVE_0, "pixels"]
Rows = Annotated[int, ABOVE_0, "rows"]
Samples = Annotated[int, ABOVE_0, "samples"]
Seconds = Annotated[float, FROM_0, "seconds"]
Updates = Annotated[int, ABOVE_0, "updates"]
UpdatesOr0 = Annotated[int, FROM_0, "updates"]


@dataclass(frozen=True)
class Needs:
    """What an option does nothing without, or `beside`, in words; and whether it has an effect, given all settings."""

    words: str
    met: Callable[[typing.Any], bool]
    beside: bool = False

    @property
    def reason(self) -> str:
        """The words, as after "does nothing"."""
        return f"{'beside' if self.beside else 'without'} {self.words}"


@dataclass(frozen=True)
class Option:
    """All facts about a setting. `options` fills in name and type from the field."""

    help: str
    default: typing.Any
    loop_default: typing.Any  # of the hand-written loop
    choices: tuple = ()
    bounds: Bounds | None = None
    unit: str = ""
    needs: Needs | None = None
    also: tuple[str, ...] = ()  # further published spellings of the flag
    opposite: tuple[str, ...] = ()  # published flags that are true where a switch is false
    shorthand: typing.Mapping[str, str] = dataclasses.field(default_factory=dict)  # published switches for a value
    scripts: tuple[str, ...] = SCRIPTS  # those that implement it
    identity: bool = False  # whether what a step makes of its samples depends on it
    part_of: bool | str = False  # the entry of a run's identity made from it, where `identity` is false; True: its own
    section: str = "run"  # the section that it stands under in YAML
    secret: str = ""  # the variable that stands for its value wherever that would be shown or kept
    kind: str = ""  # of text: path; file, rows, network, model, tokenizer or device, looked at before all else
    name: str = ""
    type: type = str  # of each value, for lists and tables
    is_list: bool = False
    is_table: bool = False  # values by name
    may_be_none: bool = False

    @property
    def key(self) -> str:
        """Its name in YAML and in overrides, such as data.resolution."""
        return f"{self.section}.{self.name}"

    def default_of(self, loop: bool):
        """Its default in a script, a fresh one; REQUIRED where it must be given."""
        value = self.loop_default if loop else self.default
        return list(value) if isinstance(value, list | tuple) else value


Schema = dict[str, Option]  # by key, such as data.resolution


def option(default, help: str = "", *, loop_default=REQUIRED, **facts):
    """The field of a setting. `default`: REQUIRED where it must be given; `help`: by default the text below the field;
    `facts`: of `Option`."""
    metadata = {"option": Option(help, default, default if loop_default is REQUIRED else loop_default, **facts)}
    if isinstance(default, list | tuple):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@functools.cache
def options(group: type) -> dict[str, Option]:
    """The options of a dataclass by name, in order."""
    hints = typing.get_type_hints(group, include_extras=True)
    found = {}
    for field in dataclasses.fields(group):
        if stated := field.metadata.get("option"):
            text = stated.help or _text_below(field.name, group)
            found[field.name] = dataclasses.replace(stated, help=text, name=field.name, **_facts_of(hints[field.name]))
    return found


def _text_below(name: str, group: type) -> str:
    """The text below a field, in that one of a class and its bases that has the field."""
    texts = (_texts_of(owner.__module__).get((owner.__name__, name)) for owner in group.__mro__[:-1])
    return next(filter(None, texts), "")


@functools.cache
def _texts_of(module: str) -> dict[tuple[str, str], str]:
    """The texts below the fields of a module's classes, in one line, by the names of class and field."""
    found = {}
    for group in ast.parse(inspect.getsource(sys.modules[module])).body:
        for field, below in pairwise(group.body if isinstance(group, ast.ClassDef) else ()):
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                found[group.name, field.target.id] = " ".join(ast.literal_eval(below.value).split())
    return found


def identity_of(*groups) -> dict:
    """The settings that a checkpoint must share with the run that resumes it, by name."""
    return {
        name: getattr(group, name)
        for group in groups
        for name, stated in options(type(group)).items()
        if stated.identity
    }


def check_value(stated: Option, value, where: str = ""):
    """`value` in the option's type, a whole number for a float as that float, and YAML's `off` as the word. Raises
    ConfigError for what it may not be. `where`: what the value was given as; the flag if omitted."""
    where = where or f"--{stated.name}"
    if value is None and stated.may_be_none:
        return None
    if stated.is_list:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{where} {value!r} must be a list; write it in brackets")
        return [_check_one(stated, one, where) for one in value]
    if stated.is_table:
        table = _read_table(stated, value) if isinstance(value, str) else value
        if not isinstance(table, dict) or not table or not all(isinstance(name, str) for name in table):
            raise ConfigError(f"{where} {value!r} must be values by name, each once; write NAME:VALUE,NAME:VALUE")
        return {name: _check_one(stated, one, f"{where} {name}:") for name, one in table.items()}
    return _check_one(stated, value, where)


def table_text(table: dict | None) -> str | None:
    """A table as a flag takes it: NAME:VALUE,NAME:VALUE; None where there is none."""
    return ",".join(f"{name}:{value:g}" for name, value in table.items()) if table else None


def parse_value(stated: Option, text: str):
    """The value that a flag's word means, or the word where it means none; `check_value` says what is wrong."""
    if stated.type is bool and text.lower() in _TRUE + _FALSE:
        return text.lower() in _TRUE
    if stated.type in (int, float):
        try:
            return stated.type(text)
        except ValueError:
            pass
    return text


def negate(text: str) -> str:
    """The opposite of a switch's word; one that means neither as it is."""
    if text.lower() in _TRUE:
        return "false"
    return "true" if text.lower() in _FALSE else text


def _read_table(stated: Option, text: str) -> dict | None:
    """The table of NAME:VALUE,NAME:VALUE; None where a name comes twice, or has no value."""
    parts = [part.rpartition(":") for part in text.split(",")]
    table = {name.strip(): parse_value(stated, value.strip()) for name, _, value in parts}
    return None if len(table) < len(parts) or "" in table else table


def _check_one(stated: Option, value, where: str):
    value = float(value) if stated.type is float and type(value) is int else value
    if value is False and stated.type is str and "off" in (stated.default, *stated.choices):
        value = "off"  # what YAML 1.1 makes a switch of
    if type(value) is not stated.type:
        raise ConfigError(f"{where} {value} must be {_TYPE_WORDS[stated.type]}")
    if stated.choices and value not in stated.choices:
        known = [str(choice) for choice in stated.choices]
        hint = did_you_mean(str(value), known, listing=False)
        raise ConfigError(f"{where} {value} is not known; {hint}{hint and ' '}use one of {', '.join(known)}")
    if stated.type in (int, float) and not (
        (stated.type is int or math.isfinite(value)) and (stated.bounds is None or stated.bounds.hold(value))
    ):
        raise ConfigError(f"{where} {value} must be {stated.bounds or 'a number'}")
    return value


def _facts_of(hint) -> dict:
    """What an annotation such as list[Share] | None says of an option."""
    may_be_none = False
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        (hint,) = (one for one in typing.get_args(hint) if one is not types.NoneType)
        may_be_none = True
    is_list, is_table = (typing.get_origin(hint) is many for many in (list, dict))
    kind = typing.get_args(hint)[-1] if is_list or is_table else hint
    facts = {"is_list": is_list, "is_table": is_table, "may_be_none": may_be_none}
    for told in getattr(kind, "__metadata__", ()):
        facts["unit" if isinstance(told, str) else "bounds"] = told
    return facts | {"type": getattr(kind, "__origin__", kind)}


def parse_known_or_suggest(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    """`parser.parse_args(argv)`, with argparse's complaints and unknown flags as a one-line ConfigError."""
    namespace, unknown = parse_known(parser, argv)
    if unknown:
        raise ConfigError(explain_unknown(unknown[0], parser))
    return namespace


def parse_known(parser: argparse.ArgumentParser, argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """`parser.parse_known_args(argv)`, with argparse's complaints as a one-line ConfigError. Abbreviated flags are
    refused: `--max` must not silently mean `--max_steps` today and `--max_samples` tomorrow."""
    parser.allow_abbrev = False
    parser.exit_on_error = False
    parser.error = _raise_config_error  # type: ignore[method-assign]
    try:
        return parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        text = str(error).replace("invalid int value", "not an integer").replace("invalid float value", "not a number")
        raise ConfigError(f"{text} (`--help` explains every flag)") from error


def add_options(parser: argparse.ArgumentParser, schema: Schema, usual: dict[str, Any], script: str) -> None:
    """Give `parser` a flag for each option, in a group for each section; those of another script without help. What is
    not given is not in the namespace that it makes; `given_options` reads those that are. `usual`: defaults."""
    for section, members in groupby(schema.values(), key=lambda stated: stated.section):
        group = parser.add_argument_group(section)
        for stated in members:
            _add_option(group, stated, usual[stated.key], script in stated.scripts)


def given_options(namespace: argparse.Namespace, schema: Schema) -> dict[str, Any]:
    """The options that a command line gives, by name: in their types, their ranges not yet checked."""
    found = {}
    for stated in schema.values():
        if hasattr(namespace, stated.name):
            words = getattr(namespace, stated.name)
            value = [parse_value(stated, word) for word in words] if stated.is_list else parse_value(stated, words)
            found[stated.name] = value
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
    for other, value in stated.shorthand.items():
        same = f"The same as {flag} {value}." if shown else argparse.SUPPRESS
        facts = {"dest": stated.name, "default": argparse.SUPPRESS, "help": same}
        group.add_argument(f"--{other}", action="store_const", const=value, **facts)
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


def flag_formatter(formatter: Any = argparse.HelpFormatter) -> Any:
    """A class of argparse's that shows a flag's value after each of its names; Python 3.13 has it after the last."""

    def show_flag(self, action) -> str:
        if not action.option_strings or action.nargs == 0:
            return formatter._format_action_invocation(self, action)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return ", ".join(f"{flag} {value}" for flag in action.option_strings)

    return type("Formatter", (formatter,), {"_format_action_invocation": show_flag})


def show_values(parser: argparse.ArgumentParser) -> None:
    """In the help of a parser of fastcore's: placeholders in place of types, and defaults as a user types them."""
    parser.formatter_class = flag_formatter(parser.formatter_class)
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
        what = "name a path by its flag (`--help` lists them)" if Path(word).exists() else "flags start with --"
        return f"unexpected argument {word!r}; {what}"
    flag = word.partition("=")[0]
    name = flag.lstrip("-").replace("-", "_")
    if any(name == action.dest for action in parser._actions if not action.option_strings):
        return f"unknown flag {flag}; give only its value, without a flag"
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    known = {one.lstrip("-").replace("-", "_"): one for action in shown for one in action.option_strings}
    near = known.get(nearest(name, known))
    return f"unknown flag {flag}; {f'did you mean {near}?' if near else '`--help` lists the known ones'}"

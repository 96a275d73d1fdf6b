"""One setting, stated once: a field of a group of settings that knows all facts about itself.

`option` makes the field, `options` lists those of a group by name. Flags, YAML keys, help, docs and checks are made
from these facts; a setting is written down nowhere else.
"""

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass

from ..utils.errors import ConfigError
from ..utils.text import nearest

SCRIPTS = ("trainer", "loop")  # under PaddleNLP's Trainer, and the hand-written loop
REQUIRED = dataclasses.MISSING  # the default of an option that must be given

_TRUE, _FALSE = ("yes", "true", "t", "y", "1"), ("no", "false", "f", "n", "0")
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
        return (
            (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        """The range in words, as after "must be"."""
        if self.least is not None and self.most is not None:
            return f"from {self.least} to {self.most}"
        words = [f"above {self.above}"] if self.above is not None else []
        if self.least is not None:
            words = [f"{self.least} or more" if self.below is None else f"at least {self.least}"]
        words += [f"at most {self.most}"] if self.most is not None else []
        words += [f"below {self.below}"] if self.below is not None else []
        return " and ".join(words)


@dataclass(frozen=True)
class Needs:
    """What an option does nothing without, or with `beside` what it does nothing beside: in words, and whether the
    option has an effect, given all settings of a run."""

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
    scripts: tuple[str, ...] = SCRIPTS  # those that implement it
    identity: bool = False  # whether what a step makes of its samples depends on it
    part_of: bool | str = False  # the entry of a run's identity made from it, where `identity` is false; True: its own
    section: str = "run"  # the section that it stands under in YAML
    kind: str = (
        ""  # of text: path; file, rows, network, model, tokenizer or device, which are looked at before all else
    )
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


Schema = dict[str, dict[str, Option]]  # section -> name -> option


def option(
    default,
    help: str,
    *,
    choices: tuple = (),
    bounds: Bounds | None = None,
    unit: str = "",
    needs: Needs | None = None,
    also: tuple[str, ...] = (),
    opposite: tuple[str, ...] = (),
    loop_default=REQUIRED,
    scripts: tuple[str, ...] = SCRIPTS,
    identity: bool = False,
    part_of: bool | str = False,
    section: str = "run",
    kind: str = "",
):
    """The field of a setting. `default`: REQUIRED where it must be given; `loop_default`: the same if omitted."""
    stated = Option(
        help=help,
        default=default,
        loop_default=default if loop_default is REQUIRED else loop_default,
        choices=tuple(choices),
        bounds=bounds,
        unit=unit,
        needs=needs,
        also=also,
        opposite=opposite,
        scripts=scripts,
        identity=identity,
        part_of=part_of,
        section=section,
        kind=kind,
    )
    metadata = {"option": stated}
    if isinstance(default, list | tuple):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@functools.cache
def options(group: type) -> dict[str, Option]:
    """The options of a dataclass by name, in order."""
    hints = typing.get_type_hints(group)
    found = {}
    for field in dataclasses.fields(group):
        if stated := field.metadata.get("option"):
            found[field.name] = dataclasses.replace(stated, name=field.name, **_facts_of(hints[field.name]))
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
    """`value` in the option's type, a whole number for a float as that float, and YAML's `off` as the word.

    Raises ConfigError for what it may not be. `where`: what the value was given as; the flag if omitted.
    """
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
        near = nearest(str(value), known)
        hint = f"did you mean {near}? " if near else ""
        raise ConfigError(f"{where} {value} is not known; {hint}use one of {', '.join(known)}")
    if stated.type in (int, float) and not (
        (stated.type is int or math.isfinite(value)) and (stated.bounds is None or stated.bounds.hold(value))
    ):
        raise ConfigError(f"{where} {value} must be {stated.bounds or 'a number'}")
    return value


def _facts_of(hint) -> dict:
    """Type, whether a list or a table, whether None may stand for it, of an annotation such as list[str] | None."""
    may_be_none = False
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        (hint,) = (one for one in typing.get_args(hint) if one is not types.NoneType)
        may_be_none = True
    is_list, is_table = (typing.get_origin(hint) is many for many in (list, dict))
    return {
        "type": typing.get_args(hint)[-1] if is_list or is_table else hint,
        "is_list": is_list,
        "is_table": is_table,
        "may_be_none": may_be_none,
    }

"""What the value of a network's setting must be: rules, in words and as conditions. `config_fields` has the tables."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MOST_CHANNELS = 1 << 20  # and words, positions, sides: far beyond what any machine holds
MOST_LAYERS = 1024


@dataclass(frozen=True)
class Rule:
    """What a value must be, in words and as a condition; `one | other` takes either."""

    words: str
    holds: Callable[[Any], bool]

    def __or__(self, other: "Rule") -> "Rule":
        return Rule(f"{self.words} or {other.words}", lambda value: self.holds(value) or other.holds(value))


@dataclass(frozen=True)
class Setting:
    """One setting of a network: what the class takes where a config does not name it, and what it may be."""

    default: Any
    rule: Rule


def is_whole(value) -> bool:
    """True for a whole number, which JSON's true and 3.0 are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def whole(low: int, high: int) -> Rule:
    """A whole number from low to high, both included."""
    return Rule(f"a whole number from {low} to {high}", lambda value: is_whole(value) and low <= value <= high)


def lists_of(words: str, rule: Rule) -> Rule:
    """A list that is not empty, of what `rule` takes."""
    return Rule(words, lambda value: isinstance(value, list) and bool(value) and all(map(rule.holds, value)))


def one_of(*names: str) -> Rule:
    """One of these names."""
    return Rule(f"one of {', '.join(names)}", lambda value: isinstance(value, str) and value in names)


NULL = Rule("null", lambda value: value is None)
OFF = Rule("false (ppdiffusers' network does not run with it)", lambda value: value is None or value is False)
FLAG = Rule("true or false", lambda value: isinstance(value, bool))
NUMBER = Rule("a number", _is_real)
POSITIVE = Rule("a number above 0", lambda value: _is_real(value) and value > 0)
SHARE = Rule("a number from 0 to below 1", lambda value: _is_real(value) and 0 <= value < 1)
SIZE = whole(1, MOST_CHANNELS)
SIZES = lists_of("a list of such numbers", SIZE)
SIZE_LISTS = Rule(f"a list of {SIZE.words[2:]}", SIZES.holds)
SIDES = Rule("a list of two such numbers", lambda value: SIZES.holds(value) and len(value) == 2)
LAYERS = whole(1, MOST_LAYERS)
LAYER_LISTS = lists_of("a list of such numbers", LAYERS)
NESTED_LAYERS = lists_of("a list of such numbers or of lists of them", LAYERS | LAYER_LISTS)
KERNEL = Rule("an odd whole number from 1 to 31", lambda value: is_whole(value) and 1 <= value <= 31 and value % 2 == 1)
NUMBERS = lists_of("a list of numbers", NUMBER)
NOT_SET = Rule("null (ppdiffusers cannot build anything else)", lambda value: value is None)

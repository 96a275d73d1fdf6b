r"""Text made fit to be shown: in errors, logs, progress bars, tables and records of failures.

What servers, file names, captions and metadata hold is not ours: escape sequences clear a terminal, bidi controls make
a URL read as another one, a lone surrogate cannot be written at all. Such characters are shown as `\u001b`, as in JSON;
letters of all scripts, emoji, line breaks and tabs stay.

Text that came from the environment, such as a password in a path, is shown as `${oc.env:NAME}`. Settings files note
what they take from there; `escape` hides it, and whoever records a text of settings writes `hide` of it.
"""

import difflib
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from json import dumps, loads

from .variables import read

# Controls of C0 and C1 but tab and line feed, bidi controls, separators of lines, lone surrogates, byte order marks.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff\ufff9-\ufffb]"
)
NOT_UTF8 = "backslashreplace"  # how text with names of files is encoded, for what of them is not UTF-8
_LINE_BREAKS = re.compile("[\t-\r\x85\u2028\u2029]+")
_END_OF_COLOURS = "\x1b[0m"
_CUT = " … "
_LEAST_HIDDEN = 4  # letters of what is also hidden inside of longer text
_noted: dict[str, str] = {}
_inside: list[re.Pattern] = []  # the pattern of all of `_noted` that are long enough


def escape(text: str) -> str:
    r"""The text with all that a terminal would obey as `\uXXXX`, and with what came from the environment hidden."""
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found.group()):04x}", hide(text))


def one_line(text: str, max_length: int = 0) -> str:
    """The text escaped, in one line: tabs and line breaks as a space. With `max_length`, in characters, cut to it."""
    text = escape(_LINE_BREAKS.sub(" ", text))
    return shorten(text, max_length) if max_length else text


def shorten(text: str, max_length: int) -> str:
    """At most `max_length` characters (8 or more): what is longer loses its middle, so that subject and remedy stay."""
    if len(text) <= max_length:
        return text
    tail = (max_length - len(_CUT)) // 3
    return text[: max_length - len(_CUT) - tail] + _CUT + text[len(text) - tail :]


def count_of(number: int, thing: str) -> str:
    """`number` things: "1 list", "2 lists", "1,000 lists". `thing` takes a plain s."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def nearest(word: str, known: Iterable[str], cutoff: float = 0.5) -> str | None:
    """The one of the known words that was most likely meant; None where none is nearer than `cutoff`, of 1."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)), None)


def did_you_mean(word: str, known: Iterable[str], listing: bool = True) -> str:
    """ "did you mean NAME?" with the nearest known name; where none is near, their list, or "" without `listing`."""
    known = list(known)
    if near := nearest(word, known):
        return f"did you mean {near}?"
    return f"known: {', '.join(known)}" if listing else ""


def name_ranks(ranks: Iterable[int]) -> str:
    numbers = sorted(ranks)
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {', '.join(map(str, numbers))}"


class EscapingStream:
    """A text stream whose `write` escapes, but for what colorama writes at the end; all else is the stream's own."""

    def __init__(self, stream):
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(text if text == _END_OF_COLOURS else escape(text))
        return len(text)

    def writelines(self, lines) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str):
        return getattr(self._stream, name)


def find_changes(earlier: Mapping, settings: Mapping) -> list[str]:
    """Which settings differ, as words; those that only one of the two has are unset in the other."""
    settings = as_json(settings)
    return [
        f"{name} was {earlier.get(name)!r} and is {settings.get(name)!r}"
        for name in dict.fromkeys([*settings, *earlier])
        if earlier.get(name) != settings.get(name)
    ]


def as_json(value):
    """A value as it comes back from a record."""
    return loads(dumps(value))


def note_hidden(text: str, expression: str) -> None:
    """Hide a text from now on, also as part of a path in its plain form."""
    forms = {text, text.strip(), os.path.expanduser(text), os.path.normpath(text)} - {"", "."}
    for form in forms - _noted.keys():
        _noted[form] = expression
    words = sorted((re.escape(one) for one in _noted if len(one) >= _LEAST_HIDDEN), key=len, reverse=True)
    _inside[:] = [re.compile("|".join(words))] if words else []


def hide(text: str) -> str:
    """The text with expressions for all that came from the environment."""
    if text in _noted:
        return _noted[text]
    return _inside[0].sub(lambda found: _noted[found.group()], text) if _inside else text


def hide_all(value):
    if isinstance(value, list):
        return [hide_all(one) for one in value]
    return hide(value) if isinstance(value, str) else value


def reveal(text: str) -> str:
    """The inverse of `hide`, where the environment still has the variables."""
    return re.sub(r"\$\{oc\.env:(\w+)\}", lambda found: read(found.group(1), found.group()), text)


def print_report(report, describe: Callable, as_json: bool) -> None:
    """Write what a command has found to stdout: `describe(report)`, text of one line or several, or itself as JSON."""
    text = dumps(report, indent=2, ensure_ascii=False, default=str) if as_json else describe(report)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()

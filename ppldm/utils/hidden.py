"""Text that came from the environment, such as a password in a path, is never written: `${oc.env:NAME}` stands for it.

Settings files note what they take from the environment. Messages hide it by themselves (`text.escape`); whoever records
a text that a setting had a part in writes `hide` of it. Names of folders, and what a model needs to work, stay.
"""

import os
import re

from .variables import read

_LEAST_LENGTH = 4  # of what is also hidden inside of longer text
_noted: dict[str, str] = {}
_inside: list[re.Pattern] = []  # the pattern of all of `_noted` that are long enough


def note(text: str, expression: str) -> None:
    """Hide a text from now on, also as part of a path in its plain form."""
    forms = {text, text.strip(), os.path.expanduser(text), os.path.normpath(text)} - {"", "."}
    for form in forms - _noted.keys():
        _noted[form] = expression
    words = sorted((re.escape(one) for one in _noted if len(one) >= _LEAST_LENGTH), key=len, reverse=True)
    _inside[:] = [re.compile("|".join(words))] if words else []


def forget() -> None:
    """Hide nothing from now on."""
    _noted.clear()
    _inside.clear()


def hide(text: str) -> str:
    """The text with expressions for all that came from the environment."""
    if text in _noted:
        return _noted[text]
    return _inside[0].sub(lambda found: _noted[found.group()], text) if _inside else text


def hide_all(value):
    """`hide` of a text, or of those of a list."""
    if isinstance(value, list):
        return [hide_all(one) for one in value]
    return hide(value) if isinstance(value, str) else value


def reveal(text: str) -> str:
    """The inverse of `hide`, where the environment still has the variables."""
    return re.sub(r"\$\{oc\.env:(\w+)\}", lambda found: read(found.group(1), found.group()), text)

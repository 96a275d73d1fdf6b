"""Captions with choices in them: "a {red|{dark |}blue} heart" is a red, a dark blue or a blue heart.

Choices stand in braces, divided by bars, and may hold further ones. Each is as likely as the others. A choice may be
empty. A backslash makes the `{`, `|`, `}` or backslash behind it plain text. Braces without their counterpart, and bars
outside of braces, are plain text too: every caption has a meaning.
"""

import re
from collections.abc import Callable

_MARKS = re.compile(r"\\[{|}\\]|[{|}]")


def expand_wildcards(caption: str, draw: Callable[[], float]) -> str:
    """The caption with one choice of each `{a|b}`. `draw()` gives numbers uniform in [0, 1): one for each choice that
    is made, in the order in which they stand."""
    marks = list(_MARKS.finditer(caption))
    groups, skip_to = _match(marks)
    text, position, number = [], 0, 0
    while number < len(marks):
        mark = marks[number]
        text.append(caption[position : mark.start()])
        position = mark.end()
        if number in groups:
            begins = groups[number]
            number = begins[int(draw() * len(begins))]
            position = marks[number].end()
        elif number in skip_to:
            number = skip_to[number]
            position = marks[number].end()
        else:
            text.append(mark[0][-1])
        number += 1
    return "".join([*text, caption[position:]])


def _match(marks: list[re.Match]) -> tuple[dict[int, list[int]], dict[int, int]]:
    """(opening mark -> the marks behind which its choices begin, bar or closing mark -> the closing mark to go to), all
    by number."""
    groups, skip_to, open_groups = {}, {}, []
    for number, mark in enumerate(marks):
        if mark[0] == "{":
            open_groups.append([number])
        elif mark[0] == "|" and open_groups:
            open_groups[-1].append(number)
        elif mark[0] == "}" and open_groups:
            begins = open_groups.pop()
            groups[begins[0]] = begins
            skip_to |= dict.fromkeys([*begins[1:], number], number)
    return groups, skip_to

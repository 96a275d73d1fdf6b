"""Choices in prompts: "a {red|blue} heart", and `__colour__` for a line of FOLDER/colour.txt (`--wildcards FOLDER`).

Braces are those of captions (`data.text.wildcards`). A list is a text file of one choice a line; blank lines, and those
that begin with #, are none. A choice may hold braces and other lists. What is chosen is a function of (seed, prompt,
index), each choice as likely as the others.
"""

import os
import re
import zlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from ..data.text.captions import expand_wildcards
from ..utils.errors import ConfigError
from ..utils.files import read_given_text
from ..utils.rng import Stream, make_rng
from ..utils.text import did_you_mean

_SHOWN = 60  # letters of a prompt in a message
_DEEPEST = 100  # lists that lead to one another
_MOST_LETTERS = 100_000  # of all the choices of one prompt together
_NAME = re.compile(r"__([^\W_](?:[\w/-]*?[^\W_])?)__")  # no dots, so nothing outside of the folder


class Wildcards:
    """The lists of a folder. Raises ConfigError where it is none, or `check` does of one of `texts`."""

    def __init__(self, folder, texts: Iterable[str] = ()):
        self.folder = Path(folder).expanduser()
        if not os.path.isdir(self.folder):
            raise ConfigError(f"--wildcards {folder}: there is no such folder; give one with a text file for each list")
        self.choices = cache(self._read)
        self._depths: dict[str, int] = {}  # of the lists that have been checked
        for text in texts:
            self.check(text)

    def check(self, text: str, within: tuple[str, ...] = ()) -> int:
        """How many lists lead to one another below `text`. Raises ConfigError where one is not there, is empty, leads
        back to itself, or stands too deep. within: the lists that lead to the text."""
        deepest = 0
        for name in dict.fromkeys(_NAME.findall(text)):
            if name in within:
                circle = " -> ".join([*within[within.index(name) :], name])
                raise ConfigError(f"--wildcards {self.folder}: {circle} is a circle; take one of the names out")
            if name not in self._depths and len(within) < _DEEPEST:
                self._depths[name] = 1 + self.check("\n".join(self.choices(name)), (*within, name))
            deepest = max(deepest, self._depths.get(name, 1))
        if len(within) + deepest > _DEEPEST:
            way = " -> ".join(within[:3] or _NAME.findall(text)[:1])
            raise ConfigError(
                f"--wildcards {self.folder}: more than {_DEEPEST} lists lead to one another, from {way} on; put their "
                "choices in fewer lists"
            )
        return deepest

    def resolve(self, text: str, seed: int, index: int) -> str:
        """What picture `index` of the prompt `text`, which `check` has passed, is drawn of."""
        draw, letters = make_rng(seed, Stream.PROMPT_WILDCARD, zlib.crc32(text.encode()), index).random, 0

        def choose(found: re.Match) -> str:
            nonlocal letters
            lines = self.choices(found[1])
            line = lines[int(draw() * len(lines))]
            letters += len(line)
            if letters > _MOST_LETTERS:
                raise ConfigError(
                    f"--wildcards {self.folder}: the choices for {text[:_SHOWN]!r} come to more than "
                    f"{_MOST_LETTERS:,} letters; name fewer lists in the lists"
                )
            return expand(line)

        def expand(one: str) -> str:
            return _NAME.sub(choose, expand_wildcards(one, draw))

        return expand(text)

    def _read(self, name: str) -> list[str]:
        path = self.folder / f"{name}.txt"
        if path.exists() and not path.is_file():
            raise ConfigError(f"__{name}__: {path} is not a file; write one choice a line into one")
        try:
            lines = read_given_text(path).split("\n")
        except OSError as error:
            known = [one.relative_to(self.folder).with_suffix("").as_posix() for one in self.folder.rglob("*.txt")]
            raise ConfigError(
                f"__{name}__: cannot read {path} ({error.strerror}); {did_you_mean(name, sorted(known))}"
            ) from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"__{name}__: {path} is not UTF-8 text; write one choice a line") from error
        found = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not found:
            raise ConfigError(f"__{name}__: {path} holds no choices; write one a line")
        return found

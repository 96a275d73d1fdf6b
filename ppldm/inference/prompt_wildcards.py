"""Choices in prompts: "a {red|blue} heart", and `__colour__` for a line of FOLDER/colour.txt (`--wildcards FOLDER`).

Braces are those of captions (`data.text.wildcards`). A list is a text file of one choice a line; blank lines, and those
that begin with #, are none. A choice may hold braces and other lists. What is chosen is a function of (seed, prompt,
index), each choice as likely as the others.
"""

import re
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path

from ..data.text.wildcards import expand_wildcards
from ..utils.errors import ConfigError
from ..utils.files import read_given_text
from ..utils.rng import Stream, make_rng
from ..utils.text import did_you_mean

_NAME = re.compile(r"__([^\W_](?:[\w/-]*?[^\W_])?)__")  # no dots, so nothing outside of the folder


class Wildcards:
    """The lists of a folder. Raises ConfigError where it is none."""

    def __init__(self, folder):
        self.folder = Path(folder).expanduser()
        if not self.folder.is_dir():
            raise ConfigError(f"--wildcards {folder}: there is no such folder; give one with a text file for each list")
        self.choices = cache(self._read)

    def check(self, text: str, within: tuple[str, ...] = ()) -> None:
        """Raises ConfigError where a list that `text` may come to is not there, is empty, or leads back to itself.
        within: the lists that lead to the text."""
        for name in dict.fromkeys(_NAME.findall(text)):
            if name in within:
                circle = " -> ".join([*within[within.index(name) :], name])
                raise ConfigError(f"--wildcards {self.folder}: {circle} is a circle; take one of the names out")
            for line in self.choices(name):
                self.check(line, (*within, name))

    def resolve(self, text: str, seed: int, index: int) -> str:
        """What picture `index` of the prompt `text`, which `check` has passed, is drawn of."""
        return self._expand(text, make_rng(seed, Stream.PROMPT_WILDCARD, zlib.crc32(text.encode()), index).random)

    def _expand(self, text: str, draw: Callable[[], float]) -> str:
        def choose(found: re.Match) -> str:
            lines = self.choices(found[1])
            return self._expand(lines[int(draw() * len(lines))], draw)

        return _NAME.sub(choose, expand_wildcards(text, draw))

    def _read(self, name: str) -> list[str]:
        path = self.folder / f"{name}.txt"
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

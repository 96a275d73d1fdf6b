"""Columns of metadata tables: what LAION's releases call the same thing, and what a table at hand has of it."""

from collections.abc import Iterable
from dataclasses import dataclass

from ...utils.errors import ConfigError

# Of each column of the published LAION2B-en and LAION-Art tables: its other names, the likeliest first.
ALIASES = {
    "URL": ("url", "image_url", "img_url"),
    "TEXT": ("caption", "text", "alt_text", "alt"),
    "WIDTH": ("width", "original_width"),
    "HEIGHT": ("height", "original_height"),
    "LANGUAGE": ("language", "lang"),
    "AESTHETIC_SCORE": ("aesthetic", "aesthetic_score", "AESTHETIC"),
    "similarity": ("SIMILARITY", "clip_similarity"),
    "punsafe": ("PUNSAFE", "p_unsafe"),
    "pwatermark": ("PWATERMARK", "p_watermark"),
    "hash": ("HASH",),
}
# LAION2B-en and LAION-Art differ in this one; a table keeps the name it has.
_BOTH_PUBLISHED = {"aesthetic"}

INTEGER, NUMBER, TEXT, TRUTH, OTHER = "integer", "number", "text", "truth", "other"


@dataclass(frozen=True)
class Columns:
    """The columns of a table. `kinds`: by name, in their order, one of INTEGER, NUMBER, TEXT, TRUTH, OTHER."""

    kinds: dict[str, str]

    def find(self, name: str) -> str | None:
        """The column that `name` means: the one of that name, else of a name for the same thing; None if none is."""
        if name in self.kinds:
            return name
        names = {other.lower(): other for other in self.kinds}
        for candidate in (name, *_same_thing(name)):
            if candidate.lower() in names:
                return names[candidate.lower()]
        return None

    def need(self, name: str) -> str:
        """As `find`. Raises ConfigError where there is none."""
        found = self.find(name)
        if found is None:
            raise ConfigError(
                f"no column is {name!r} (known by the names {', '.join(dict.fromkeys([name, *_same_thing(name)]))}); "
                f"the table has {', '.join(self.kinds)}"
            )
        return found

    def report(self) -> tuple[dict[str, str], list[str]]:
        """(the column of each published name that was found, the published names that were not)."""
        found = {name: self.find(name) for name in ALIASES}
        return {name: column for name, column in found.items() if column}, [n for n, c in found.items() if not c]

    def published_names(self) -> dict[str, str]:
        """The name that each column is written under: the published one where it is known, else its own."""
        new_names = {self.find(name): name for name in ALIASES if self.find(name) not in (None, *_BOTH_PUBLISHED)}
        taken = {name.lower(): name for name in self.kinds}
        return {
            name: new_names[name] if taken.get(new_names.get(name, "").lower(), name) == name in new_names else name
            for name in self.kinds
        }


def check_names(names: Iterable[str], path) -> None:
    """Raises ConfigError where names of columns differ only in case, which engines take for one."""
    seen: dict[str, str] = {}
    for name in names:
        other = seen.setdefault(name.lower(), name)
        if other != name:
            raise ConfigError(f"{path} has columns {other!r} and {name!r}, alike but for case; rename one of them")


def _same_thing(name: str) -> tuple[str, ...]:
    """All names of what `name` is a name of, in any case."""
    for published, aliases in ALIASES.items():
        names = (published, *aliases)
        if name.lower() in {other.lower() for other in names}:
            return names
    return ()

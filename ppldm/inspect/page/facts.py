"""What rows say of themselves beside pictures and captions: languages, domains, licences, scores, copies.

What rows carry is read from their metadata by the names in common use. Copies are looked for among all rows
(`copies`), all else in every `stride`-th row of each part, the first among them, so that memory and time stay bounded
however many rows there are.
"""

import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from ...data.formats.row import Row
from ...prepare.provenance.forgotten import host_of
from .copies import Copies
from .languages import find_language

MOST_ROWS = 500_000  # that are looked at in full, about
SHOWN = 20  # values of a table
_DIGITS = 3  # of scores
_URLS = ("url", "URL", "image_url")
_LICENCES = ("license", "licence", "LICENSE", "license_name")
_LANGUAGES = ("language", "LANGUAGE", "lang")
_COPIES = {"key": ("key",), "sha256": ("sha256",), "url": _URLS}


@dataclass
class Facts:
    """Counts over rows. stride: of the rows that are looked at in full; `looked` are these. languages: of captions, as
    found; said: as the rows say. scores: how often each number comes in a field, rounded to three digits. real: the
    fields in which a number is not whole. copies: by what rows carry, and of captions; pictures: of these, as
    `copies.read_labels` has it, where labels were named."""

    stride: int = 1
    looked: int = 0
    captions: int = 0
    languages: Counter = field(default_factory=Counter)
    said: Counter = field(default_factory=Counter)
    domains: Counter = field(default_factory=Counter)
    licences: Counter = field(default_factory=Counter)
    fields: Counter = field(default_factory=Counter)
    scores: dict[str, Counter] = field(default_factory=lambda: defaultdict(Counter))
    real: set[str] = field(default_factory=set)
    copies: dict[str, Copies] = field(default_factory=lambda: {name: Copies() for name in (*_COPIES, "caption")})
    pictures: dict = field(default_factory=dict)

    def add(self, number: int, row: Row, captions: list[str]) -> None:
        """Count row `number` of a part."""
        for name, fields in _COPIES.items():
            if value := _text(row.meta, fields):
                self.copies[name].add(value)
        for caption in captions:
            self.copies["caption"].add(caption)
        if number % self.stride:
            return
        self.looked += 1
        for caption in captions:
            self.captions += 1
            self.languages[find_language(caption)] += 1
        for counter, value in (
            (self.said, _text(row.meta, _LANGUAGES)),
            (self.domains, host_of(_text(row.meta, _URLS)).removeprefix("www.")),
            (self.licences, _text(row.meta, _LICENCES)),
        ):
            counter.update([value] * bool(value))
        for name, value in row.meta.items():
            self.fields[name] += 1
            if (score := _number(value)) is not None:
                self.scores[name][float(f"{score:.{_DIGITS}g}")] += 1
                if not score.is_integer():
                    self.real.add(name)

    def merge(self, other: "Facts") -> None:
        """Count what another has counted."""
        self.looked, self.captions = self.looked + other.looked, self.captions + other.captions
        for name in ("languages", "said", "domains", "licences", "fields"):
            getattr(self, name).update(getattr(other, name))
        for name, counts in other.scores.items():
            self.scores[name].update(counts)
        self.real |= other.real
        for name, copies in other.copies.items():
            self.copies[name].merge(copies)

    @property
    def shown_scores(self) -> dict[str, Counter]:
        """Those of fields with a number that is not whole."""
        return {name: self.scores[name] for name in sorted(self.real)}

    def report(self) -> dict:
        """As JSON has it."""
        tables = {name: top(getattr(self, name)) for name in ("languages", "said", "domains", "licences", "fields")}
        copies = {name: copies.report() for name, copies in self.copies.items() if copies.rows}
        copies |= {"picture": self.pictures} if self.pictures else {}
        kept = {"domains": len(self.domains), "licences": len(self.licences)}
        return {"looked": self.looked, "captions": self.captions, **tables, "different": kept, "copies": copies}


def top(counts: Counter) -> dict[str, int]:
    """The most frequent values, of equal ones the first by name."""
    return dict(sorted(counts.items(), key=lambda one: (-one[1], one[0]))[:SHOWN])


def _text(meta: dict, names: Iterable[str]) -> str:
    return next((str(meta[name]) for name in names if isinstance(meta.get(name), str | int) and meta[name] != ""), "")


def _number(value) -> float | None:
    """A finite number of the metadata; None for all else."""
    if not isinstance(value, int | float) or isinstance(value, bool) or abs(value) > sys.float_info.max:
        return None
    return None if math.isnan(value) else float(value)

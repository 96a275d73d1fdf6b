"""Which caption a sample has: a draw of (seed, epoch, row) from the texts of its row.

In this order: dropped or not; which of the row's texts; one choice of each wildcard; its tags dropped and shuffled;
cleaned. Each has random numbers of its own, so that switching one on changes nothing that the others draw.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ...config.captions import CaptionOptions
from ...config.option import check_value, options
from ...utils.errors import ConfigError, RowError
from ...utils.rng import Stream
from ..formats.row import Row
from .clean import clean_caption
from .tags import TagRule
from .wildcards import expand_wildcards

VOCABULARY_SIZE = 30_000  # tokens at most of a tokenizer of one's own
OWN = "caption"  # the name of the row's own caption among the fields of its metadata


@dataclass(frozen=True)
class CaptionRule:
    """How a caption is chosen and what is made of it.

    drop_probability: how often it is the empty one. weights: (name, weight) of what to choose from, `OWN` or a field of
    the metadata that holds a text or a list of texts; empty: the row's own. A row without one of these texts chooses
    from the others by their weights. choice: which of several texts of a name, "random" or "first". tags: None: no
    tags. wildcards, clean: whether these are made.
    """

    drop_probability: float = 0.0
    weights: tuple[tuple[str, float], ...] = ()
    choice: str = "random"
    tags: TagRule | None = None
    wildcards: bool = False
    clean: bool = False

    def __post_init__(self):
        if not 0 <= self.drop_probability <= 1:
            raise ConfigError(f"caption_drop_probability is {self.drop_probability}; it must be in [0, 1]")

    @classmethod
    def of(cls, given: CaptionOptions) -> "CaptionRule":
        """The rule that settings describe."""
        tags = TagRule(given.shuffle_tags, given.tag_drop_probability, given.keep_tags, given.tag_separator,
                       given.keep_tags_separator, given.tag_group_separator)  # fmt: skip
        return cls(
            given.caption_drop,
            tuple((given.captions or {}).items()),
            given.caption_choice,
            tags if tags.shuffle or tags.drop_probability else None,
            given.caption_wildcards,
            given.clean_captions,
        )

    @classmethod
    def of_flags(cls, captions: str, clean: bool, choice: str = "random") -> "CaptionRule":
        """The rule of a command's `--captions` (as that of training; empty: the rows' own), `--clean-captions` and
        `--caption-choice`, with nothing dropped. Raises ConfigError."""
        given = {"captions": captions or None, "caption_choice": choice, "clean_captions": clean}
        stated = options(CaptionOptions)
        values = {name: value if value is None else check_value(stated[name], value) for name, value in given.items()}
        return cls.of(CaptionOptions(caption_drop=0.0, **values))

    def fixed(self) -> "CaptionRule":
        """The same for measuring: nothing is dropped, tags stay in order."""
        tags = self.tags and replace(self.tags, shuffle=False, drop_probability=0.0)
        return replace(self, drop_probability=0.0, tags=tags)

    def check(self, row: Row) -> None:
        """Raises RowError "no_caption" for a row that has none of the texts to choose from."""
        if self.weights and not self._choices(row):
            raise RowError("no_caption", f"none of {', '.join(name for name, _ in self.weights)} holds text")

    def texts(self, row: Row) -> list[str]:
        """All texts that may be drawn of a row; what becomes of wildcards and tags left out."""
        texts = [text for _, own in self._choices(row) for text in own]
        return [clean_caption(text) for text in texts] if self.clean else texts

    def draw(self, row: Row, generator: Callable[[Stream], np.random.Generator]) -> str:
        """The caption of a sample of `row`, which `check` has passed; `generator` gives the sample's random numbers of
        a purpose."""
        place = self.draw_place(row, generator)
        if place is None:
            return ""
        caption = [text for _, texts in self._choices(row) for text in texts][place]
        if self.wildcards and ("{" in caption or "\\" in caption):
            caption = expand_wildcards(caption, generator(Stream.CAPTION_WILDCARD).random)
        if self.tags:
            caption = self.tags.apply(caption, generator)
        return clean_caption(caption) if self.clean else caption

    def draw_place(self, row: Row, generator: Callable[[Stream], np.random.Generator]) -> int | None:
        """Which of `texts(row)` the caption is made of; None where it is dropped."""
        if self.drop_probability and generator(Stream.CAPTION_DROP).random() < self.drop_probability:
            return None
        choices = self._choices(row)
        if len(choices) == len(choices[0][1]) == 1:
            return 0
        rng, choice = generator(Stream.CAPTION_CHOICE), 0
        if len(choices) > 1:
            ends = np.cumsum([weight for weight, _ in choices])
            choice = min(int(np.searchsorted(ends, rng.random() * ends[-1], side="right")), len(choices) - 1)
        counts = [len(texts) for _, texts in choices]
        return sum(counts[:choice]) + int(rng.random() * counts[choice])

    def _choices(self, row: Row) -> list[tuple[float, tuple[str, ...]]]:
        """(weight, texts to choose from) of each name of which the row has a text."""
        own, few = (row.caption, *row.other_captions), slice(1 if self.choice == "first" else None)
        if not self.weights:
            return [(1.0, own[few])]
        found = ((weight, own if name == OWN else _texts_of(row.meta.get(name))) for name, weight in self.weights)
        return [(weight, texts[few]) for weight, all_texts in found if (texts := tuple(filter(str.strip, all_texts)))]


def _texts_of(value) -> tuple[str, ...]:
    """The texts of a field: one, or those of a list."""
    values = value if isinstance(value, list) else [value]
    return tuple(one for one in values if isinstance(one, str))

"""Captions that are lists of tags: "1girl, red hair, smile", as sd-scripts of kohya shuffle and drop them.

A caption is cut at the separator, and blanks around tags are removed. The head, and with a separator of its own the
tail, stays in its place; of the tags between each is dropped with the same probability, and what is left is shuffled.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ...utils.rng import Stream


@dataclass(frozen=True)
class TagRule:
    """What happens to tags. keep: how many at the beginning stay. keep_separator: where it is in a caption, what stands
    before it stays instead, and what stands behind a second one. group_separator: joins tags into one; it becomes
    `separator` in the end."""

    shuffle: bool = False
    drop_probability: float = 0.0
    keep: int = 0
    separator: str = ","
    keep_separator: str = ""
    group_separator: str = ""

    def apply(self, caption: str, generator: Callable[[Stream], np.random.Generator]) -> str:
        """The caption with its tags dropped and shuffled; `generator`: as of `CaptionRule.draw`."""
        if self.keep_separator and self.keep_separator in caption:
            head, tags, tail = map(self._cut, (*caption.split(self.keep_separator, 2), "")[:3])
        else:
            tags, tail = self._cut(caption), []
            head, tags = tags[: self.keep], tags[self.keep :]
        if self.drop_probability and tags:
            stays = generator(Stream.CAPTION_TAG_DROP).random(len(tags)) >= self.drop_probability
            tags = [tag for tag, stay in zip(tags, stays, strict=True) if stay]
        if self.shuffle and len(tags) > 1:
            # Sorting by random numbers: what `permutation` makes of a generator may change with numpy.
            order = np.argsort(generator(Stream.CAPTION_TAGS).random(len(tags)), kind="stable")
            tags = [tags[place] for place in order]
        joint = self.separator if self.separator[-1:].isspace() else f"{self.separator} "
        text = joint.join([*head, *tags, *tail])
        if not self.group_separator:
            return text
        return joint.join(tag.strip() for tag in text.split(self.group_separator))

    def _cut(self, text: str) -> list[str]:
        return [tag for tag in map(str.strip, text.split(self.separator)) if tag]

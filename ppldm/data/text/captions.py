"""Which caption a sample has: a draw of (seed, epoch, row) from the texts of its row.

In this order: dropped or not; which of the row's texts; one choice of each wildcard; its tags dropped and shuffled;
cleaned. Each has random numbers of its own, so that switching one on changes nothing that the others draw.

Tags ("1girl, red hair, smile") are shuffled and dropped as by kohya's sd-scripts: of the tags between the head and,
with a separator of its own, the tail, each is dropped with the same probability, and what is left is shuffled.
Captions from web pages are cleaned as those of CC12M are before training: lower case, without what no picture shows
(`_STEPS`). All of it is done twice, for what goes may uncover more.

Wildcards are choices in braces, divided by bars, each as likely as the others: "a {red|{dark |}blue} heart" is a red, a
dark blue or a blue heart. A backslash makes the `{`, `|`, `}` or backslash behind it plain text; braces without their
counterpart, and bars outside of braces, are plain text too.

`Coverage` says how well a tokenizer fits captions: words that it does not know, and captions that are too long for it.
"""

import html
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any
from urllib.parse import unquote_plus

import numpy as np

from ...config.data import CaptionOptions
from ...config.option import check_value, options
from ...utils.errors import ConfigError, RowError
from ...utils.rng import Stream
from ..formats.row import Row

_MARKS = re.compile(r"\\[{|}\\]|[{|}]")  # of wildcards
_FILES = "png|jpe?g|bmp|webp|eps|pdf|apk|mp4"

# In this order: what to find, what to put in its place. The text is in lower case.
_STEPS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        ("<person>", "person"),  # what CC12M has in place of names
        (r"(?:https?:/{1,3}|www\.)\S+", " "),
        (r"(?<![\w.-])[\w.-]+\.(?:com?|ru|net|org|edu|gov|it)\b[\w/-]*", " "),
        (r"<[a-z/!][^<>]*>", " "),
        (r"@\w+", " "),
        ("[\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\uff00-\uffef\U00020000-\U0003ffff]+", " "),
        ("[\u2010-\u2015\u2212\u2043\u2e3a\u2e3b\u30a0\ufe58\ufe63]", "-"),
        ("[`\u00b4\u00ab\u00bb\u201c-\u201f\u00a8]", '"'),
        ("[\u2018-\u201b]", "'"),
        (r"\b\d{1,3}(?:\.\d{1,3}){3}\b", " "),
        (r"\d:\d\d\s*$", " "),
        (r"#\d{1,3}\b|#\d{5,}\b|\b\d{6,}\b", " "),
        (rf"(?<!\S)\S+\.(?:{_FILES})\b", " "),
        (r"[\"']{2,}", '"'),
        (r"\.{2,}", " "),
        (r"[][#®•©™&@·º½¾¿¡§~(){}|\\/*]+", " "),
        (r"\s\.\s", " "),
        # Codes: jc6640, jc6640vc, 6640vc231, j2d1a2a.
        (r"\b(?:[a-z]{1,3}\d{3,15}|[a-z]+\d+[a-z]+|\d+[a-z]+\d+|\d*[a-z]+\d+[a-z]+\d+[a-z\d]*)\b", " "),
        (r"\b(?:worldwide\s+)?(?:free\s+)?shipping\b", " "),
        (r"\b(?:free\s+)?download(?:\s+free)?\b", " "),
        (r"\bclick\s+(?:for|on)\s+\w+", " "),
        (rf"\b(?:{_FILES})(?:\s+images?)?\b", " "),
        (r"\bpage\s+\d+\b", " "),
        (r"\b\d+(?:\.\d+)?[x\u0445×]\d+(?:\.\d+)?\b", " "),
        (r"\s+:\s+", ": "),
        (r"\s+,", ","),
        (r"(\D[,.])\b", r"\1 "),
        (r"\s+", " "),
    )
]
_JOINED_WORDS = 3  # more hyphens and underscores than these join the words of a file's name
_ENDS = re.compile(r"^[\s'_,:;-]+|[\s'_,:+-]+$")
_QUOTED = re.compile(r"^[\"'](.+)[\"']$", re.DOTALL)
VOCABULARY_SIZE = 30_000  # tokens at most of a tokenizer of one's own
OWN = "caption"  # the name of the row's own caption among the fields of its metadata


def clean_caption(caption: str) -> str:
    """The caption, cleaned; "" where nothing is left."""
    return _clean(_clean(caption))


def _clean(caption: str) -> str:
    text = html.unescape(html.unescape(unquote_plus(caption))).lower()
    for pattern, replacement in _STEPS:
        text = pattern.sub(replacement, text)
    if sum(map(text.count, "-_")) > _JOINED_WORDS:
        text = re.sub(r"[-_\s]+", " ", text)
    return _ENDS.sub("", _QUOTED.sub(r"\1", text.strip()))


@dataclass(frozen=True)
class TagRule:
    """What happens to tags. keep: how many at the beginning stay. keep_separator: what stands before it stays instead,
    and what stands behind a second one. group_separator: joins tags into one; it becomes `separator` in the end."""

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


@dataclass(frozen=True)
class CaptionRule:
    """How a caption is chosen and what is made of it. drop_probability: how often it is the empty one. weights: (name,
    weight) of what to choose from, `OWN` or a field of the metadata that holds a text or a list of texts; empty: the
    row's own. A row without one of these texts chooses from the others by their weights. choice: which of several texts
    of a name, "random" or "first". tags: None: no tags. wildcards, clean: whether these are made."""

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
        """The rule of `--captions` (empty: rows' own), `--clean-captions`, `--caption-choice`. Raises ConfigError."""
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
        """The caption of a sample of a row that `check` has passed; `generator`: of the sample, by purpose."""
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
        found = []
        for name, weight in self.weights:
            value = list(own) if name == OWN else row.meta.get(name)
            all_texts = [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, str)]
            if texts := tuple(filter(str.strip, all_texts)):
                found.append((weight, texts[few]))
        return found


def expand_wildcards(caption: str, draw: Callable[[], float]) -> str:
    """The caption with one choice of each `{a|b}`; `draw()`, uniform in [0, 1), is called for each choice in turn."""
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
    """By number: (opening mark -> marks behind which its choices begin, bar or closing mark -> closing mark)."""
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


_SHOWN = 60  # characters of what is cut


@dataclass
class Coverage:
    """Counts over captions. `lengths`: of captions by number of tokens, special ones included, before cutting.
    `unknown`: words without a token, counted. `empty`: only spaces. `lost`: what is cut from one that is too long."""

    captions: int = 0
    words: int = 0
    unknown: Counter = field(default_factory=Counter)
    lengths: Counter = field(default_factory=Counter)
    empty: int = 0
    lost: str = ""

    def __add__(self, other: "Coverage") -> "Coverage":
        sums = {name: value + getattr(other, name) for name, value in vars(self).items() if name != "lost"}
        return Coverage(**sums, lost=self.lost or other.lost)

    @property
    def unknown_share(self) -> float:
        """Of all words, from 0 to 1."""
        return self.unknown.total() / max(1, self.words)

    def cut_share(self, max_length: int) -> float:
        """The share of captions with more than `max_length` tokens, from 0 to 1."""
        return sum(count for length, count in self.lengths.items() if length > max_length) / max(1, self.captions)

    def length_at(self, share: float) -> int:
        """The number of tokens that at least `share` of the captions do not exceed; 0 without captions."""
        lengths = sorted(self.lengths)
        covered = zip(lengths, accumulate(self.lengths[length] for length in lengths), strict=True)
        return next((length for length, count in covered if count >= share * self.captions), 0)

    def describe(self, max_length: int) -> str:
        """A sentence for the log."""
        words = f"{self.unknown_share:.1%} of their words are unknown"
        if self.unknown:
            words += f" ({', '.join(word for word, _ in self.unknown.most_common(5))})"
        if self.empty:
            words = f"{self.empty / self.captions:.1%} are empty, {words}"
        lengths = f"the median has {self.length_at(0.5)}, the longest {self.length_at(1)}"
        example = f"; one loses {self.lost[:_SHOWN]!r}{'…' * (len(self.lost) > _SHOWN)}" if self.lost else ""
        return f"{words}, {self.cut_share(max_length):.1%} are cut at {max_length} tokens ({lengths}{example})"


@dataclass(frozen=True)
class CoverageMeter:
    """Measures captions with a `tokenizer.WordTokenizer`."""

    tokenizer: Any

    def measure(self, captions: list[str]) -> Coverage:
        """Counts over these captions."""
        found = Coverage(captions=len(captions), empty=sum(not caption.strip() for caption in captions))
        captions, most = self.tokenizer.read(captions), self.tokenizer.max_length
        for caption, encoding in zip(captions, self.tokenizer.whole.encode_batch(captions), strict=True):
            found.lengths[len(encoding.ids)] += 1
            if not found.lost and len(encoding.ids) > most:
                found.lost = caption[encoding.offsets[most - 1][0] :].strip()  # the last place is the end's
            found.words += len({word for word in encoding.word_ids if word is not None})
            found.unknown.update(
                caption[start:end].lower()
                for number, (start, end) in zip(encoding.ids, encoding.offsets, strict=True)
                if number == self.tokenizer.unknown_id and end > start
            )
        return found

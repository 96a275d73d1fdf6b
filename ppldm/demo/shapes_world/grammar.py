"""Scenes of the shapes world: what a caption says of a picture, and what no training row may show; their captions in
English and Chinese, and back: `parse_caption(make_caption(scene, language)) == scene`. "a small red circle left of two
blue squares" is 一个红色的小圆形在两个蓝色的正方形的左边.

A scene is one group of one to three like objects, or two groups, three objects in all, with a relation between them. A
group has a colour and a shape, and may have a size; a single object may have a position. The picture chooses what is
left open. Places are in units of the picture's side, x to the right and y down.

Held out are the pairs of colour and shape on one diagonal of their table: every colour and every shape is seen with
others, and a picture of a held-out pair takes putting two known words together (compositional generalisation; Johnson
et al. 2017, arXiv:1612.06890, section 4.7).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import yaml

from ...utils.errors import DataError

COLOURS = {
    "red": (214, 40, 40),
    "yellow": (238, 196, 24),
    "green": (44, 158, 64),
    "cyan": (24, 184, 208),
    "blue": (40, 76, 212),
    "purple": (156, 44, 184),
}
SHAPES = ("circle", "square", "triangle", "cross")
SIZES = ("small", "large")
# As directions: from the middle of the picture to the object, and from the second group to the first.
POSITIONS = {"left": (-1, 0), "right": (1, 0), "top": (0, -1), "bottom": (0, 1), "middle": (0, 0)}
RELATIONS = {"left of": (-1, 0), "right of": (1, 0), "above": (0, -1), "below": (0, 1)}
MAX_OBJECTS = 3
MIDDLE = 0.1  # an object nearer to the middle of the picture, along both axes, is in the middle

PAIRS = tuple(product(COLOURS, SHAPES))
HELD_OUT = frozenset((colour, SHAPES[number]) for number, colour in enumerate(COLOURS) if number < len(SHAPES))
_GROUPINGS = {1: ((1,),), 2: ((2,), (1, 1)), 3: ((3,), (1, 2), (2, 1))}  # by objects in all: counts of the groups


@dataclass(frozen=True)
class Group:
    """`count` objects of one colour and shape; of one size, or of any where it is None."""

    count: int
    colour: str
    shape: str
    size: str | None = None


@dataclass(frozen=True)
class Scene:
    """One group, with the `position` of a single object or None; or two, with the `relation` of the first."""

    groups: tuple[Group, ...]
    relation: str | None = None
    position: str | None = None

    @property
    def objects(self) -> tuple[Group, ...]:
        """The group of each object."""
        return tuple(group for group in self.groups for _ in range(group.count))

    @property
    def is_held_out(self) -> bool:
        """Whether it shows a pair of colour and shape that no training row does."""
        return any((group.colour, group.shape) in HELD_OUT for group in self.groups)


def all_scenes() -> Iterator[Scene]:
    """Every scene of the grammar, 52,416 of them."""
    groups = {count: [Group(count, *pair, size) for pair in PAIRS for size in (None, *SIZES)] for count in (1, 2, 3)}
    for counts in (counts for groupings in _GROUPINGS.values() for counts in groupings):
        if len(counts) == 1:
            positions = (None, *POSITIONS) if counts == (1,) else (None,)
            yield from (Scene((group,), position=name) for group in groups[counts[0]] for name in positions)
        else:
            for first, second in product(groups[counts[0]], groups[counts[1]]):
                if first.colour != second.colour:
                    yield from (Scene((first, second), relation) for relation in RELATIONS)


def draw_scene(rng: np.random.Generator, held_out: bool, max_objects: int = MAX_OBJECTS) -> Scene:
    """A scene of at most `max_objects` objects. Half of all scenes have one object; with `held_out` one group has a
    held-out pair of colour and shape, else none has. Two groups differ in colour."""

    def choose(names):
        return names[rng.integers(len(names))]

    total = 1 if rng.random() < 0.5 or max_objects == 1 else int(rng.integers(2, max_objects + 1))
    counts = choose(_GROUPINGS[total])
    while True:
        pairs = [choose(PAIRS) for _ in counts]
        if len({colour for colour, _ in pairs}) == len(counts) and held_out == any(pair in HELD_OUT for pair in pairs):
            break
    sizes = [choose((None, *SIZES)) for _ in counts]
    groups = tuple(Group(count, *pair, size) for count, pair, size in zip(counts, pairs, sizes, strict=True))  # type: ignore[call-arg]
    if len(groups) == 2:
        return Scene(groups, relation=choose((*RELATIONS,)))
    return Scene(groups, position=choose((None, *POSITIONS)) if total == 1 else None)


def lies(offset: np.ndarray, direction: tuple[int, int], margin: float = 0.0) -> np.ndarray:
    """Whether `offset`, [..., 2] as (x, y), lies in a direction of POSITIONS: outside of the middle and more along its
    axis than across, by `margin`; or, of (0, 0), in the middle."""
    reach = np.abs(offset)
    if direction == (0, 0):
        return reach.max(-1) <= MIDDLE - margin
    axis = 0 if direction[0] else 1
    along = offset[..., axis] * direction[axis]
    return along > np.maximum(reach[..., 1 - axis], MIDDLE) + margin


_TABLES, _PARAGRAPHS = yaml.safe_load_all(Path(__file__).with_name("languages.yaml").read_text(encoding="utf-8"))
LANGUAGES = tuple(_TABLES)
_LANGUAGES = {language: SimpleNamespace(**words) for language, words in _TABLES.items()}
PARAGRAPHS = SimpleNamespace(**_PARAGRAPHS)
_OPENING = re.compile("|".join(phrase.replace("{scene}.", r"([^.]+)\. ") for phrase in PARAGRAPHS.opening))


def make_caption(scene: Scene, language: str) -> str:
    """The caption of a scene in `language`, one of LANGUAGES."""
    words = _LANGUAGES[language]
    groups = [_describe(group, words) for group in scene.groups]
    if scene.relation:
        return words.relation.format(first=groups[0], relation=words.relations[scene.relation], second=groups[1])
    if scene.position:
        return words.position.format(group=groups[0], position=words.positions[scene.position])
    return groups[0]


def shorten(caption: str) -> str:
    """The short caption that a long one (paragraphs.py) opens with; any other text as it is."""
    opening = _OPENING.match(caption)
    return next(filter(None, opening.groups())) if opening else caption


def parse_caption(caption: str) -> Scene:
    """The scene that a caption in any of LANGUAGES says, of a long one that of its opening. Raises DataError for a text
    that no scene has."""
    caption = shorten(caption)
    for language, pattern in _PATTERNS.items():
        if found := pattern.fullmatch(caption):
            scene = _read(found, _LANGUAGES[language])
            if make_caption(scene, language) == caption:
                return scene
    raise DataError(
        f"{caption!r} is not a caption of the shapes world; `ppldm demo-data --world shapes` writes prompts that are"
    )


def _describe(group: Group, words: SimpleNamespace) -> str:
    plural = (words.plural if not words.shapes[group.shape].endswith("s") else "es") if group.count > 1 else ""
    return words.group.format(
        count=words.counts[group.count],
        colour=words.colours[group.colour],
        size=words.sizes.get(group.size, ""),
        shape=words.shapes[group.shape] + (plural if words.plural else ""),
    )


def _make_pattern(words: SimpleNamespace) -> re.Pattern:
    def one_of(name: str, choices, optional: str = "") -> str:
        return f"(?P<{name}>{'|'.join(map(re.escape, choices))}){optional}"

    def group(number: int) -> str:
        return words.group.format(
            count=one_of(f"count{number}", words.counts.values()),
            colour=one_of(f"colour{number}", words.colours.values()),
            size=one_of(f"size{number}", words.sizes.values(), "?"),
            shape=one_of(f"shape{number}", words.shapes.values()) + "(?:es|s)?",
        )

    single = words.position.format(group="", position=one_of("position", words.positions.values()))
    pair = words.relation.format(first="", relation=one_of("relation", words.relations.values()), second=group(2))
    return re.compile(f"{group(1)}(?:{single}|{pair})?")


def _read(found: re.Match, words: SimpleNamespace) -> Scene:
    def name(field: str, known: dict):
        return next((key for key, word in known.items() if word == found[field]), None)

    def group(number: int) -> Group:
        fields = {"count": words.counts, "colour": words.colours, "shape": words.shapes, "size": words.sizes}
        return Group(**{field: name(f"{field}{number}", known) for field, known in fields.items()})

    relation = name("relation", words.relations)
    return Scene((group(1), group(2)) if relation else (group(1),), relation, name("position", words.positions))


_PATTERNS = {language: _make_pattern(words) for language, words in _LANGUAGES.items()}

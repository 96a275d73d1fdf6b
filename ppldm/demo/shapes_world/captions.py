"""Captions of scenes in English and Chinese, and back: `parse_caption(make_caption(scene, language)) == scene`.

"a small red circle left of two blue squares" is 一个红色的小圆形在两个蓝色的正方形的左边.
"""

import re
from dataclasses import dataclass

from ...utils.errors import DataError
from .grammar import Group, Scene

LANGUAGES = ("en", "zh")


@dataclass(frozen=True)
class _Language:
    """The words of the grammar's names, by their kind, and how they are put together. `group`: the fields of a group;
    `plural`: what is behind the shape's word from two objects on."""

    counts: dict[int, str]
    colours: dict[str, str]
    shapes: dict[str, str]
    sizes: dict[str, str]
    positions: dict[str, str]
    relations: dict[str, str]
    group: str
    position: str
    relation: str
    plural: str = ""


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


_ENGLISH = _Language(
    counts={1: "a ", 2: "two ", 3: "three "},
    colours={name: f"{name} " for name in ("red", "yellow", "green", "cyan", "blue", "purple")},
    shapes=_same("circle", "square", "triangle", "cross"),
    sizes={"small": "small ", "large": "large "},
    positions={"left": "on the left", "right": "on the right", "top": "at the top", "bottom": "at the bottom",
               "middle": "in the middle"},
    relations=_same("left of", "right of", "above", "below"),
    group="{count}{size}{colour}{shape}",
    position="{group} {position}",
    relation="{first} {relation} {second}",
    plural="s",
)  # fmt: skip
_CHINESE = _Language(
    counts={1: "一个", 2: "两个", 3: "三个"},
    colours={"red": "红色的", "yellow": "黄色的", "green": "绿色的", "cyan": "青色的", "blue": "蓝色的",
             "purple": "紫色的"},
    shapes={"circle": "圆形", "square": "正方形", "triangle": "三角形", "cross": "十字形"},
    sizes={"small": "小", "large": "大"},
    positions={"left": "在左边", "right": "在右边", "top": "在上方", "bottom": "在下方", "middle": "在中间"},
    relations={"left of": "左边", "right of": "右边", "above": "上方", "below": "下方"},
    group="{count}{colour}{size}{shape}",
    position="{group}{position}",
    relation="{first}在{second}的{relation}",
)  # fmt: skip
_LANGUAGES = {"en": _ENGLISH, "zh": _CHINESE}


def make_caption(scene: Scene, language: str) -> str:
    """The caption of a scene in `language`, one of LANGUAGES."""
    words = _LANGUAGES[language]
    groups = [_describe(group, words) for group in scene.groups]
    if scene.relation:
        return words.relation.format(first=groups[0], relation=words.relations[scene.relation], second=groups[1])
    if scene.position:
        return words.position.format(group=groups[0], position=words.positions[scene.position])
    return groups[0]


def parse_caption(caption: str) -> Scene:
    """The scene that a caption in any of LANGUAGES says. Raises DataError for a text that no scene has."""
    for language, pattern in _PATTERNS.items():
        if found := pattern.fullmatch(caption):
            scene = _read(found, _LANGUAGES[language])
            if make_caption(scene, language) == caption:
                return scene
    raise DataError(
        f"{caption!r} is not a caption of the shapes world; `ppldm demo-data --world shapes` writes prompts that are"
    )


def _describe(group: Group, words: _Language) -> str:
    plural = (words.plural if not words.shapes[group.shape].endswith("s") else "es") if group.count > 1 else ""
    return words.group.format(
        count=words.counts[group.count],
        colour=words.colours[group.colour],
        size=words.sizes.get(group.size, ""),
        shape=words.shapes[group.shape] + (plural if words.plural else ""),
    )


def _make_pattern(words: _Language) -> re.Pattern:
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


def _read(found: re.Match, words: _Language) -> Scene:
    def name(field: str, known: dict):
        return next((key for key, word in known.items() if word == found[field]), None)

    def group(number: int) -> Group:
        return Group(
            name(f"count{number}", words.counts),
            name(f"colour{number}", words.colours),
            name(f"shape{number}", words.shapes),
            name(f"size{number}", words.sizes),
        )

    relation = name("relation", words.relations)
    groups = (group(1), group(2)) if relation else (group(1),)
    return Scene(groups, relation, name("position", words.positions))


_PATTERNS = {language: _make_pattern(words) for language, words in _LANGUAGES.items()}

"""How much of a caption a picture shows: `ppldm evaluate --metrics composition`.

A picture is right or wrong in each attribute of which its caption speaks:

    count       as many objects as the caption says
    colour      of every object that the caption names; shape and size likewise
    position    of a single object
    relation    of the first group to the second, by the mean of their centres; also by each relation's name
    everything  all of these

The objects that were found are given to those of the caption so that most is right, colours, shapes and sizes before
position and relation. One that is missing is wrong in all of its attributes.

A share of pictures comes with its 95 % interval (Wilson 1927, doi:10.1080/01621459.1927.10502953), and with `chance`:
the same share where each picture is graded by the captions of others of the same kind, as a model has it that draws
such scenes and does not read.
"""

from collections.abc import Sequence
from itertools import permutations

import numpy as np

from ...demo.shapes_world.captions import parse_caption
from ...demo.shapes_world.grammar import POSITIONS, RELATIONS, Scene, lies
from ...utils.errors import DataError
from .segment import Found, find_objects

ATTRIBUTES = ("count", "colour", "shape", "size", "position", "relation", *RELATIONS, "everything")
_Z = 1.959964  # of a normal distribution, 95 % lie within as many standard deviations
_SHIFTS = 8  # captions of others that each picture is graded by


def grade_pictures(pictures: Sequence[np.ndarray], captions: Sequence[str]) -> dict:
    """Grade pictures, uint8 [S, S, 3], each by its caption in any language of the shapes world.

    {"pictures": N, "scores": [{"split": "seen" or "held_out", "scenes": "single" (one object) or "several",
    "attribute": one of ATTRIBUTES, "value", "low", "high", "chance": shares in 0 .. 1 (chance is None without others),
    "pictures": how many have it, "right": of each of these whether it is}]}, without attributes that no caption has.
    Raises DataError for a caption of no scene, unlike numbers of pictures and captions, or a picture not square.
    """
    if len(pictures) != len(captions):
        raise DataError(f"{len(pictures)} pictures and {len(captions)} captions; each picture needs one")
    scenes = [parse_caption(caption) for caption in captions]
    found = [find_objects(pictures[number]) for number in range(len(pictures))]
    scores = []
    for split, held_out in (("seen", False), ("held_out", True)):
        for kind, several in (("single", False), ("several", True)):
            wanted = (held_out, several)
            own = [n for n, scene in enumerate(scenes) if (scene.is_held_out, len(scene.objects) > 1) == wanted]
            scores += [{"split": split, "scenes": kind, **score} for score in _score(own, found, scenes)]
    return {"pictures": len(pictures), "scores": scores}


def grade(found: Sequence[Found], scene: Scene) -> dict[str, bool]:
    """What of `scene` the objects of a picture show: {attribute: whether it is right}."""
    objects = scene.objects
    places = [*found, *[None] * len(objects)]
    grades = (_grade_given(given, scene) for given in dict.fromkeys(permutations(places, len(objects))))
    best = max(grades, key=lambda grade: (grade.pop("matches"), sum(grade.values())))
    best["count"] = len(found) == len(objects)
    best["everything"] = all(best.values())
    return best


def _grade_given(given: tuple[Found | None, ...], scene: Scene) -> dict:
    """The grade where the i-th object of a scene is `given[i]`, with the number of matches."""
    matches = {
        name: [one is not None and getattr(one, name) == getattr(group, name)
               for one, group in zip(given, scene.objects, strict=True) if getattr(group, name)]
        for name in ("colour", "shape", "size")
    }  # fmt: skip
    result = {name: all(right) for name, right in matches.items() if right}
    result["matches"] = sum(map(sum, matches.values()))
    centres = None if None in given else np.array([one.centre for one in given])
    if scene.position:
        result["position"] = centres is not None and bool(lies(centres[0] - 0.5, POSITIONS[scene.position]))
    if scene.relation:
        first = scene.groups[0].count
        offset = None if centres is None else centres[:first].mean(0) - centres[first:].mean(0)
        right = offset is not None and bool(lies(offset, RELATIONS[scene.relation]))
        result |= {"relation": right, scene.relation: right}
    return result


def _score(numbers: list[int], found: list[list[Found]], scenes: list[Scene]) -> list[dict]:
    """The scores of the pictures of these numbers, those of one split and kind."""
    count = len(numbers)
    shifts = [shift for shift in (count * number // (_SHIFTS + 1) for number in range(1, _SHIFTS + 1)) if shift]
    grades = [grade(found[number], scenes[number]) for number in numbers]
    others = [
        grade(found[numbers[(place + shift) % count]], scenes[numbers[place]])
        for shift in dict.fromkeys(shifts)
        for place in range(count)
    ]
    scores = []
    for name in ATTRIBUTES:
        right = [one[name] for one in grades if name in one]
        by_chance = [one[name] for one in others if name in one]
        if right:
            low, high = wilson_interval(sum(right), len(right))
            chance = sum(by_chance) / len(by_chance) if by_chance else None
            scores.append({"attribute": name, "value": sum(right) / len(right), "low": low, "high": high,
                           "chance": chance, "pictures": len(right), "right": right})  # fmt: skip
    return scores


def wilson_interval(right: int, total: int) -> tuple[float, float]:
    """The 95 % interval of a share, `right` of `total` independent trials."""
    share, weight = right / total, _Z**2 / total
    middle = (share + weight / 2) / (1 + weight)
    reach = _Z / (1 + weight) * np.sqrt(share * (1 - share) / total + weight / (4 * total))
    return max(0.0, float(middle - reach)), min(1.0, float(middle + reach))


def describe(report: dict) -> str:
    """The scores as a table of text."""
    lines = [f"{'split':<9}{'scenes':<9}{'attribute':<11}{'right':>7}  {'95 % interval':<16}{'chance':>7}  pictures"]
    for score in report["scores"]:
        chance = "-" if score["chance"] is None else f"{score['chance']:.1%}"
        interval = f"{score['low']:.1%} .. {score['high']:.1%}"
        lines.append(f"{score['split']:<9}{score['scenes']:<9}{score['attribute']:<11}{score['value']:>7.1%}  "
                     f"{interval:<16}{chance:>7}{score['pictures']:>10}")  # fmt: skip
    return "\n".join(lines)

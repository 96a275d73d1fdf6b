"""Long captions of the shapes world, in English: a paragraph of at most 160 words that says all that a picture shows.

It opens with the short caption (`grammar.shorten` finds it). Then follow, in a drawn order, the background, of
every object its size and place, how each two lie to one another, and what is absent: all as it was drawn, also where
the short caption leaves it open.
"""

import re
from itertools import combinations

import numpy as np

from .draw import EXTENTS, Arrangement
from .grammar import COLOURS, MIDDLE, PARAGRAPHS, RELATIONS, SHAPES, Scene

MAX_WORDS = 160
TEXTS = re.sub(r"{\w+}|\d|[^\w ,.;]", " ", f"{[*vars(PARAGRAPHS).values()]} or")  # of all phrases, without their fields
_SHADES = (217, 232)  # means of the three channels where the next shade begins


def write_paragraph(scene: Scene, caption: str, drawn: Arrangement, rng: np.random.Generator) -> str:
    """The long caption of a scene that is drawn so; `caption`: its short one; the phrasings are drawn from `rng`."""

    def say(sentence: str, **fields) -> str:
        phrases = getattr(PARAGRAPHS, sentence)
        text = phrases[rng.integers(len(phrases))].format(**fields)
        return text[0].upper() + text[1:]

    objects, first = scene.objects, scene.groups[0].count
    from_left = sorted(range(len(objects)), key=lambda i: (i >= first, drawn.centres[i, 0]))  # those of each group
    places = {i: place - first * (i >= first) for place, i in enumerate(from_left)}
    names = [f"the {PARAGRAPHS.names[one.count][places[i]]}{one.colour} {one.shape}" for i, one in enumerate(objects)]
    told = []
    for i in from_left:
        size = "large" if drawn.extents[i] >= EXTENTS["large"][0] else "small"
        (x, y), width = drawn.centres[i] - 0.5, PARAGRAPHS.widths[size]
        place = PARAGRAPHS.places[_side(y) + 1][_side(x) + 1]
        told.append(say("object", name=names[i], size=size, width=width, place=place,
                        quarter=PARAGRAPHS.quarters[int(y > 0)][int(x > 0)]))  # fmt: skip
    for i, j in combinations(from_left, 2):
        told.append(say("pair", first=names[i], second=names[j], relation=_relate(drawn.centres[i] - drawn.centres[j])))
    absent = [[name for name in known if name not in {getattr(one, kind) for one in objects}]
              for kind, known in (("colour", COLOURS), ("shape", SHAPES))]  # fmt: skip
    colours, shapes = (f"{', '.join(names[:-1])} or {names[-1]}" for names in absent)
    shade = PARAGRAPHS.shades[np.searchsorted(_SHADES, drawn.background.mean())]
    count = PARAGRAPHS.counts[len(objects)]
    blocks = [" ".join(told), say("background", shade=shade), say("colours", colours=colours),
              say("shapes", shapes=shapes), say("count", count=count), say("room")]  # fmt: skip
    blocks = [blocks[i] for i in np.argsort(rng.random(len(blocks)), kind="stable")]
    return " ".join([say("opening", scene=caption), *blocks])


def _side(offset: float) -> int:
    return 0 if abs(offset) <= MIDDLE else int(np.sign(offset))


def _relate(offset: np.ndarray) -> str:
    """The relations of an object to another that it lies off by (x, y), the stronger one first."""
    true = [name for name, direction in RELATIONS.items() if offset @ direction > MIDDLE]
    return " and ".join(sorted(true, key=lambda name: -(offset @ RELATIONS[name])))

"""How much of a caption a picture shows: `ppldm evaluate --metrics composition`.

A picture is right or wrong in each attribute that its caption names:

    count       as many objects as the caption says
    colour      of every object that the caption names; shape and size likewise
    position    of a single object
    relation    of the first group to the second, by the mean of their centres; also by each relation's name
    everything  all of these

Objects are given to those of the caption so that most is right, colours, shapes and sizes first; a missing one is wrong
in all. A share of pictures comes with its 95 % interval (Wilson 1927, doi:10.1080/01621459.1927.10502953), and with
`chance`: that of pictures graded by the captions of others of their kind, as of a model that does not read.

Objects are found without any network (`find_objects`), in at most 64 x 64 pixels:

1. The background is the median of the border; a pixel of an object differs from it in a channel by over half of the
   least contrast that objects have.
2. Connected regions of such pixels are objects. One with large shares of two colours is cut by colour; one that falls
   apart where only its stronger pixels are kept is as many objects, since edges run into each other first. Colour is
   the direction in which a pixel leaves the background, which blur and edges do not change.
3. The share that an object has of each pixel is compared with each shape at several extents and blurs; the nearest in
   squares is its shape and extent.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations

import numpy as np
from PIL import Image
from scipy import ndimage

from ..demo.shapes_world.draw import EXTENTS, coverage
from ..demo.shapes_world.grammar import COLOURS, POSITIONS, RELATIONS, SHAPES, Scene, lies, parse_caption
from ..utils.errors import DataError

_MAX_SIDE = 64
_CONTRAST = 75  # of 255, in one channel at least
_MIN_AREA = 0.006  # of the picture; half of what the smallest object keeps after blurring
_CUT_SHARE = 0.25  # of a region's pixels, and at least twice _MIN_AREA, from which a second colour is an object
_STRONG = 0.6  # of a region's largest difference from the background
_MAX_OBJECTS = 6  # the largest; scenes have at most three
_LARGE = (EXTENTS["small"][1] + EXTENTS["large"][0]) / 2
_SCALES = (0.92, 1.0, 1.08)  # extents that are tried, by that which the area gives
# Adds to each channel eight times the luma (ITU-R BT.601), which JPEG files keep at twice the resolution of colours.
_WEIGHTED = np.eye(3) + 8 * np.outer((0.299, 0.587, 0.114), (1, 1, 1))
_BLURS = (0.02, 0.04)  # standard deviations that are tried beside none, by the picture's side
ATTRIBUTES = ("count", "colour", "shape", "size", "position", "relation", *RELATIONS, "everything")
_Z = 1.959964  # of a normal distribution, 95 % lie within as many standard deviations
_SHIFTS = 8  # captions of others that each picture is graded by


@dataclass(frozen=True)
class Found:
    """An object. `extent` and `centre` (x, y): by the picture's side."""

    colour: str
    shape: str
    extent: float
    centre: tuple[float, float]

    @property
    def size(self) -> str:
        """One of the grammar's SIZES."""
        return "large" if self.extent > _LARGE else "small"


def find_objects(picture: np.ndarray) -> list[Found]:
    """The objects of a picture, uint8 [S, S, 3], at most 6, the largest first. Raises DataError if it is not square."""
    if picture.ndim != 3 or picture.shape[0] != picture.shape[1] or picture.shape[2] != 3:
        raise DataError(f"a picture of the shapes world is [S, S, 3] and this is {list(picture.shape)}; draw it square")
    if len(picture) > _MAX_SIDE:
        picture = np.asarray(Image.fromarray(picture).resize((_MAX_SIDE, _MAX_SIDE), Image.Resampling.BOX))
    side = len(picture)
    border = np.concatenate([picture[0], picture[-1], picture[:, 0], picture[:, -1]])
    background = np.median(border, axis=0)
    difference = picture - background
    colours = np.array([*COLOURS.values()]) - background
    colours /= np.maximum(np.linalg.norm(colours, axis=-1, keepdims=True), 1e-6)
    regions = _find_regions(difference, colours, round(_MIN_AREA * side * side))
    if not regions:
        return []
    nearest = np.argmin([ndimage.distance_transform_edt(~region) for region in regions], axis=0)
    found = []
    for number, region in enumerate(regions):
        shares = _shares(difference, region, nearest == number)
        rows, columns = ndimage.find_objects(shares > 0)[0]
        shape, extent, centre = _fit_shape(shares[rows, columns], side)
        place = (centre[0] + columns.start) / side, (centre[1] + rows.start) / side
        colour = _name_colours(difference[region].sum(0), colours)
        found.append(Found(list(COLOURS)[colour], shape, extent / side, place))
    return found


def _name_colours(difference: np.ndarray, directions: np.ndarray) -> np.ndarray:
    """The number of the colour that each difference [..., 3] points to. directions: [colours, 3], unit vectors."""
    return (difference @ directions.T).argmax(-1)


def _find_regions(difference: np.ndarray, directions: np.ndarray, min_area: int) -> list[np.ndarray]:
    """A mask, bool [S, S], of each object, the largest first."""
    mask = np.abs(difference).max(-1) > _CONTRAST
    colours = np.where(mask, _name_colours(difference, directions), -1)
    regions = []
    for region in _connected(mask, min_area):
        areas = np.bincount(colours[region], minlength=len(COLOURS))
        several = np.flatnonzero(areas >= max(_CUT_SHARE * region.sum(), 2 * min_area))
        if len(several) < 2:
            strength = np.abs(difference).max(-1) * region
            strong = _connected(strength > _STRONG * strength.max(), 2 * min_area)
            regions += strong if len(strong) > 1 else [region]
        else:
            regions += [part for colour in several for part in _connected(region & (colours == colour), min_area)]
    return sorted(regions, key=np.count_nonzero, reverse=True)[:_MAX_OBJECTS]


def _connected(mask: np.ndarray, min_area: int) -> list[np.ndarray]:
    labels, count = ndimage.label(mask)
    masks = (labels == number for number in range(1, count + 1))
    return [region for region in masks if region.sum() >= min_area]


def _shares(difference: np.ndarray, region: np.ndarray, own: np.ndarray) -> np.ndarray:
    """The share that an object has of each pixel, float [S, S], 0 away from it and where another object is nearer."""
    strength = np.abs(difference).max(-1) * region
    difference = difference @ _WEIGHTED
    core = difference[strength >= 0.8 * strength.max()].mean(0)
    shares = (difference @ core / (core @ core)).clip(0, 1)
    around = ndimage.binary_dilation(region, iterations=max(2, round(len(region) / 16)))
    return np.where(own & around, shares, 0)


def _fit_shape(shares: np.ndarray, side: int) -> tuple[str, float, tuple[float, float]]:
    """(shape, extent, centre), in pixels, of the drawn shape nearest to `shares`, of a picture of `side` pixels."""
    area = shares.sum()
    y, x = ndimage.center_of_mass(shares)
    x, y = x + 0.5, y + 0.5
    best = (np.inf, "", 0.0, (0.0, 0.0))
    for shape in SHAPES:
        fill, drop = _moments(shape)
        for scale in _SCALES:
            extent = scale * np.sqrt(area / fill)
            centre = (x, y - drop * extent)
            sharp = coverage(shape, centre, extent, shares.shape)
            for blurred in (sharp, *(ndimage.gaussian_filter(sharp, blur * side) for blur in _BLURS)):
                error = ((blurred - shares) ** 2).sum()
                best = min(best, (error, shape, extent, centre))
    return best[1:]


@cache
def _moments(shape: str) -> tuple[float, float]:
    """(area of a shape of extent 1, how far its centre of mass lies below the middle of its box)."""
    drawn = coverage(shape, (50, 50), 100, (100, 100))
    return drawn.sum() / 1e4, float((np.arange(100) + 0.5) @ drawn.sum(1) / drawn.sum() - 50) / 100


def grade_pictures(pictures: Sequence[np.ndarray], captions: Sequence[str]) -> dict:
    """{"pictures": N, "scores": [{"split": "seen" or "held_out", "scenes": "single" (one object) or "several",
    "attribute", "value", "low", "high", "chance" (None without others), "pictures": how many have it, "right": of
    each whether it is}]} of pictures, uint8 [S, S, 3], by captions of the shapes world, without attributes that no
    caption has. Raises DataError for captions of no scene, other numbers of these than pictures, unequal sides."""
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

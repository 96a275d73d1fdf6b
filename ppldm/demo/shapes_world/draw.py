"""Pictures of scenes: objects on a light background, none of which touches another or the border.

An object of extent e fills a box of e x e. Sizes, places and shades that a scene leaves open are drawn; what it says
holds with a margin, so that a picture is never a borderline case of its own caption. Edges are antialiased by 8 x 8
samples a pixel.
"""

from typing import NamedTuple

import numpy as np

from .grammar import COLOURS, POSITIONS, RELATIONS, SIZES, Scene, lies

# By the picture's side: extents of objects, and the room that each keeps to others and to the border.
EXTENTS = {"small": (0.28, 0.31), "large": (0.39, 0.42)}
GAP, BORDER, MARGIN = 0.06, 0.03, 0.04
_SAMPLES = 8
_CANDIDATES = 512
_ARM = 0.36  # half the width of a cross' arms, by half its extent
_INSIDE = {
    "circle": lambda x, y: x * x + y * y <= 1,
    "square": lambda x, y: (abs(x) <= 1) & (abs(y) <= 1),
    "triangle": lambda x, y: (abs(y) <= 1) & (abs(x) <= (y + 1) / 2),
    "cross": lambda x, y: (np.maximum(abs(x), abs(y)) <= 1) & (np.minimum(abs(x), abs(y)) <= _ARM),
}


class Arrangement(NamedTuple):
    """What is drawn before the pixels: the background's colour [3], and what `place_objects` gives."""

    background: np.ndarray
    extents: np.ndarray
    centres: np.ndarray


def arrange(scene: Scene, rng: np.random.Generator) -> Arrangement:
    return Arrangement(rng.uniform(200, 250) + rng.uniform(-6, 6, 3), *place_objects(scene, rng))


def draw_picture(scene: Scene, size: int, rng: np.random.Generator, drawn: Arrangement | None = None) -> np.ndarray:
    """The picture of a scene, uint8 [size, size, 3]; `drawn`: what was drawn from `rng` for it, where it was."""
    drawn = drawn or arrange(scene, rng)
    picture = np.broadcast_to(drawn.background, (size, size, 3))
    for group, extent, centre in zip(scene.objects, drawn.extents * size, drawn.centres * size, strict=True):
        colour = np.array(COLOURS[group.colour]) + rng.uniform(-12, 12, 3)
        share = coverage(group.shape, centre, extent, (size, size))[..., None]
        picture = picture * (1 - share) + colour * share
    noise = rng.normal(0, rng.uniform(0, 3), picture.shape)
    return (picture + noise).round().clip(0, 255).astype(np.uint8)


def coverage(shape: str, centre, extent: float, window: tuple[int, int]) -> np.ndarray:
    """The share of each pixel of a window (height, width) that a shape covers, float [height, width]. `centre`: (x, y)
    of its box in the window, and `extent`, in pixels."""
    y, x = ((np.arange(side * _SAMPLES) + 0.5) / _SAMPLES for side in window)
    x, y = (x - centre[0]) / (extent / 2), (y - centre[1]) / (extent / 2)
    return _INSIDE[shape](x[None], y[:, None]).reshape(window[0], _SAMPLES, window[1], _SAMPLES).mean((1, 3))


def place_objects(scene: Scene, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(extents [N], centres [N, 2] as (x, y)) of a scene's objects, by the picture's side: the first of random places
    that keep GAP, BORDER, and position and relation with MARGIN."""
    objects = scene.objects
    # Objects of a group without a size choose each for itself.
    low, high = np.array([EXTENTS[group.size or SIZES[rng.integers(len(SIZES))]] for group in objects]).T
    first = scene.groups[0].count
    while True:
        extents = rng.uniform(low, high, (_CANDIDATES, len(objects)))
        room = extents[..., None] / 2 + BORDER
        centres = room + rng.random((_CANDIDATES, len(objects), 2)) * (1 - 2 * room)
        fits = np.ones(_CANDIDATES, dtype=bool)
        for i in range(len(objects)):
            for j in range(i):
                apart = np.abs(centres[:, i] - centres[:, j]).max(-1)
                fits &= apart >= (extents[:, i] + extents[:, j]) / 2 + GAP
        if scene.position:
            fits &= lies(centres[:, 0] - 0.5, POSITIONS[scene.position], MARGIN)
        if scene.relation:
            offset = centres[:, :first].mean(1) - centres[:, first:].mean(1)
            fits &= lies(offset, RELATIONS[scene.relation], MARGIN)
        if fits.any():
            found = int(fits.argmax())
            return extents[found], centres[found]

"""Rows to measure loaders with: JPEG files like photographs, made here, and captions of random words.

A picture is a sum of smooth random fields, each of half the size and half the strength of the one before, with some
noise: short side 512, four aspect ratios, JPEG quality 90, about 64 KB. It takes a decoder and a resizer as long as a
photograph does, and looks like coloured clouds.
"""

import io

import numpy as np
from PIL import Image

from ppldm.data.formats.row import Row

SHORT_SIDE = 512
_ASPECT_RATIOS = (1, 4 / 3, 3 / 2, 16 / 9)
_WORDS = """
a the of in on with near under old new red green blue white small large quiet bright street river bridge house garden
mountain boat window chair table dog horse bird tree flower cloud morning evening winter summer photograph
"""


def make_rows(count: int, seed: int = 0) -> list[Row]:
    """That many rows, the same for the same seed."""
    return [_make_row(np.random.default_rng((seed, number)), number) for number in range(count)]


def _make_row(rng: np.random.Generator, number: int) -> Row:
    sides = [SHORT_SIDE, int(SHORT_SIDE * rng.choice(_ASPECT_RATIOS))]
    width, height = sides[:: rng.choice([1, -1])]
    file = io.BytesIO()
    _draw_clouds(rng, width, height).save(file, "JPEG", quality=90)
    caption = " ".join(rng.choice(_WORDS.split(), size=rng.integers(8, 25)))
    return Row(caption, file.getvalue(), {"key": f"{number:06}", "width": width, "height": height})


def _draw_clouds(rng: np.random.Generator, width: int, height: int) -> Image.Image:
    picture = np.full((height, width, 3), 118, dtype=np.float32)
    for octave in range(7):
        cells = 3 << octave
        grey = rng.normal(size=(cells, cells * width // height, 1))
        field = (0.7 * grey + 0.45 * rng.normal(size=(*grey.shape[:2], 3))).astype(np.float32)
        for channel in range(3):
            plane = Image.fromarray(field[:, :, channel]).resize((width, height), Image.Resampling.BICUBIC)
            picture[:, :, channel] += 54 * 0.55**octave * np.asarray(plane)
    picture += rng.normal(size=(height, width, 1)) * rng.uniform(0.5, 4)
    return Image.fromarray(picture.clip(0, 255).astype(np.uint8))

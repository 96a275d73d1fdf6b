"""What aspect-ratio buckets would make of parts: which rows get which shape, and what is cut away, to be seen."""

from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial

import numpy as np
from PIL import Image, ImageDraw

from ..config.data import DataOptions
from ..config.load import load, override_layer
from ..config.option import options
from ..data.images import decode_image, find_corner, scale_to_cover
from ..data.select.selection import Selection, select_rows
from ..data.shapes import Shape, make_shapes, shape_rule
from ..utils.errors import ConfigError, DataError, RowError
from ..utils.pictures import pad_alike, prompt_grid
from ..utils.text import count_of
from .parts import Indexed, locate, open_rows

_PICTURES = 6  # of each shape, in a sheet
_SIDE = 160  # pixels


def read_settings(buckets: str, words: Sequence[str]) -> DataOptions:
    """The settings of a run's data, from words such as resolution=512. Raises ConfigError."""
    schema = {stated.key: stated for stated in options(DataOptions).values()}
    words = [f"data.buckets={buckets}", *(word if word.startswith("data.") else f"data.{word}" for word in words)]
    usual = {key: stated.default_of(loop=False) for key, stated in schema.items()}
    found = load([override_layer(words, schema)], schema, usual)
    settings = DataOptions(**{schema[key].name: setting.value for key, setting in found.items()})
    if make_shapes(settings) is None:
        raise ConfigError("--buckets off makes no shapes to report on; use ratios, steps or a list")
    return settings


def preview_shapes(indexed: Indexed, settings: DataOptions) -> tuple[dict, Callable[[], Image.Image]]:
    """(which rows of the parts that can be opened get which shape, and why the others none, JSON-ready; what draws
    their sheet). Raises DataError where there are none."""
    sources = [replace(name.source, parts=(name.path,), weight=None) for name in indexed.rows]
    if not sources:
        raise DataError("no part can be opened, so that no row has a shape; correct the list of parts")
    selection = select_rows(sources, shapes=shape_rule(settings, batch_size=1))
    report = selection.buckets.report() | {"skipped": dict(selection.skipped.most_common())}
    return report, partial(draw_sheet, indexed, selection, settings)


def draw_sheet(indexed: Indexed, selection: Selection, settings: DataOptions) -> Image.Image:
    """A few rows of each shape, with what is cut away darkened; of a random crop the middle."""
    captions, pictures = [], []
    for code, one in enumerate(selection.buckets.report()["shapes"]):
        places = np.flatnonzero(selection.buckets.codes == code)
        shape, shaded = selection.buckets.shapes[code], [np.full((_SIDE, _SIDE, 3), 255, np.uint8)]
        for place in places[np.unique(np.linspace(0, len(places) - 1, _PICTURES).astype(int))].tolist():
            name, number = locate(indexed, selection[place])
            with closing(open_rows(name)) as part, suppress(RowError):  # `stats` counts it by its reason
                shaded.append(np.asarray(shade_cut(decode_image(part.read(number).image), shape, settings)))
        captions.append(f"{one['width']} x {one['height']}: {count_of(one['rows'], 'row')}, {one['cut']:.0%} cut away")
        # Padded to the white square before them, which stands alone where no picture can be read.
        pictures.append(list(pad_alike(shaded))[min(1, len(shaded) - 1) :])
    return prompt_grid(captions, pictures, side=_SIDE, columns=1)


def shade_cut(picture: Image.Image, shape: Shape, settings: DataOptions) -> Image.Image:
    """A picture shrunk to _SIDE pixels, with all but the crop of a shape darkened, and a line around the crop."""
    height, width = shape
    scaled = scale_to_cover(picture.height, picture.width, height, width, settings.crop_fraction)
    corner = find_corner(np.asarray(picture), scaled, (3, height, width)) if settings.smart_crop else (0.5, 0.5)
    box = []
    for where, whole, new, kept in zip(corner, picture.size, scaled, (width, height), strict=True):
        start = int(where * (new - kept + 1))
        box += [round(start * whole / new), round((start + kept) * whole / new)]
    left, right, top, bottom = box
    shaded = picture.point(lambda value: value // 3)
    shaded.paste(picture.crop((left, top, right, bottom)), (left, top))
    line = max(1, max(picture.size) // _SIDE)
    ImageDraw.Draw(shaded).rectangle((left, top, right - 1, bottom - 1), outline="#ff3333", width=line)
    shaded.thumbnail((_SIDE, _SIDE), Image.Resampling.LANCZOS)
    return shaded

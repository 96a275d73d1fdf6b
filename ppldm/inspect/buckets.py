"""What aspect-ratio buckets would make of parts: which rows get which shape, and what is cut away, to be seen."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from ..config.data import DataOptions
from ..config.load import load, override_layer
from ..config.option import options
from ..data.images.crop import scale_to_cover
from ..data.images.decode import decode_image
from ..data.images.saliency import find_corner
from ..data.select.selection import Selection, select_rows
from ..data.shape_chart import draw_chart
from ..data.shapes import Shape, make_shapes, shape_rule
from ..utils.errors import ConfigError, DataError, RowError
from ..utils.pictures import caption_font, save_png
from ..utils.text import count_of
from .parts import Indexed, locate, open_rows

_PICTURES = 6  # of each shape, in a sheet
_SIDE, _GAP, _LABEL, _LINE_HEIGHT = 160, 8, 130, 18  # pixels
_FRAME = "#bbbbbb"


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


def report_shapes(indexed: Indexed, settings: DataOptions, sheet: str = "", chart: str = "") -> dict:
    """`preview_shapes`, drawn to `sheet` and `chart`, where they are given. Raises as that, OutputError."""
    report, draw = preview_shapes(indexed, settings)
    if chart:
        draw_chart(Path(chart), report, report["skipped"])
    if sheet:
        save_png(Path(sheet), draw())
    return report


def preview_shapes(indexed: Indexed, settings: DataOptions) -> tuple[dict, Callable[[], Image.Image]]:
    """(which rows of the parts that can be opened get which shape, and why the others none, JSON-ready; what draws
    their contact sheet). Shapes are merged where the settings say the size of a group.

    Raises DataError where no row gets one.
    """
    sources = [replace(name.source, parts=(name.path,), weight=None) for name in indexed.rows]
    if not sources:
        raise DataError("no part can be opened, so that no row has a shape; correct the list of parts")
    selection = select_rows(sources, shapes=shape_rule(settings, batch_size=1))
    report = selection.buckets.report() | {"skipped": dict(selection.skipped.most_common())}
    return report, partial(draw_sheet, indexed, selection, settings)


def draw_sheet(indexed: Indexed, selection: Selection, settings: DataOptions) -> Image.Image:
    """A contact sheet: a line for each shape, of a few of its rows, whole, with what is cut away darkened. Of a random
    crop the middle is shown."""
    lines = []
    for code, one in enumerate(selection.buckets.report()["shapes"]):
        places = np.flatnonzero(selection.buckets.codes == code)
        chosen = places[np.unique(np.linspace(0, len(places) - 1, _PICTURES).astype(int))]
        pictures = [_read_picture(indexed, selection[place]) for place in chosen.tolist()]
        shape = selection.buckets.shapes[code]
        lines.append((one, [shade_cut(picture, shape, settings) for picture in pictures if picture]))
    heights = [max([3 * _LINE_HEIGHT, *(picture.height for picture in pictures)]) + _GAP for _, pictures in lines]
    sheet = Image.new("RGB", (_LABEL + _PICTURES * (_SIDE + _GAP), sum(heights) + _GAP), "white")
    draw, top = ImageDraw.Draw(sheet), _GAP
    for (one, pictures), height in zip(lines, heights, strict=True):
        label = f"{one['width']} x {one['height']}\n{count_of(one['rows'], 'row')}\n{one['cut']:.0%} cut away"
        draw.text((_GAP, top), label, fill="black", font=caption_font(12))
        for column, picture in enumerate(pictures):
            # In the middle of its cell, with a frame, which tells white pictures from the paper.
            left = _LABEL + column * (_SIDE + _GAP) + (_SIDE - picture.width) // 2
            above = top + (height - _GAP - picture.height) // 2
            sheet.paste(picture, (left, above))
            draw.rectangle((left - 1, above - 1, left + picture.width, above + picture.height), outline=_FRAME)
        top += height
    return sheet


def _read_picture(indexed: Indexed, row: int) -> Image.Image | None:
    name, number = locate(indexed, row)
    with closing(open_rows(name)) as part:
        try:
            return decode_image(part.read(number).image)
        except RowError:
            return None  # `stats` counts it by its reason


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

"""`ppldm show` and `ppldm head`: rows as a person sees them, on a contact sheet or as text."""

import sys
from contextlib import closing
from json import dumps
from typing import Annotated

import numpy as np
from PIL import Image, ImageDraw

from ..data.control import ControlPreview, make_filter
from ..data.formats.layouts import DEFAULT_LAYOUT
from ..data.images import decode_image
from ..utils.errors import ConfigError, DataError, RowError
from ..utils.log import get_logger
from ..utils.pictures import caption_font, fit_text, save_png, wrap_text
from ..utils.processes.workers import check_workers
from .parts import Indexed, check_output, index_parts, list_parts, locate, open_rows

_CAPTION_LINES = 3
_LINE_HEIGHT = 16
_GAP = 8


def show(
    filelists: Annotated[str, {"nargs": "+", "metavar": "FILELIST"}],  # filelists, lists of filelists, or folders
    out: Annotated[str, {"opt": True, "required": True}],  # the PNG to write
    n: int = 24,  # rows to show
    seed: int = 0,  # chooses the rows
    side: int = 192,  # longer side of a picture at most; small ones are enlarged by a whole factor up to it
    control: str = None,  # show control images beside the pictures: canny, canny,low=50,… as training's --control
    resolution: int = 256,  # with --control, side of the crops that they are made of, those of the centre
    layout: str = DEFAULT_LAYOUT,  # column order of the parts of lists that name none (docs/data.md)
    latents_dir: str = "",  # folder with the latents of parts that are not here; by default they lie beside them
    num_workers: int = 0,  # processes that index parts without an index; 0 means one per core
):
    """Draw a contact sheet of rows chosen at random, with their captions, sizes and places.

    A bad row is shown by its reason; rows of which there are only cached latents by these, three channels of them as
    colours.
    """
    if n < 1 or side < 32:
        raise ConfigError(f"-n is {n} and --side {side}; they must be at least 1 and 32")
    if seed < 0:
        raise ConfigError(f"--seed {seed} must not be negative")
    if resolution < 1:
        raise ConfigError(f"--resolution {resolution} must be above 0")
    preview = ControlPreview(make_filter(control), resolution, seed) if control else None
    check_output(out)
    indexed = _index(filelists, layout, num_workers, latents_dir)
    rows = choose_rows(indexed.num_rows, n, seed)
    save_png(out, draw_sheet([read_tile(indexed, row, preview) for row in rows], side))
    sys.stdout.write(f"{len(rows)} of {indexed.num_rows} rows are drawn in {out}\n")


def head(
    filelists: Annotated[str, {"nargs": "+", "metavar": "FILELIST"}],  # filelists, lists of filelists, or folders
    n: int = 5,  # rows to print
    layout: str = DEFAULT_LAYOUT,  # column order of the parts of lists that name none (docs/data.md)
    latents_dir: str = "",  # folder with the latents of parts that are not here; by default they lie beside them
    num_workers: int = 0,  # processes that index parts without an index; 0 means one per core
    json: bool = False,  # print each row as a JSON object in a line of its own
):
    """Print the first rows: caption, image size, bytes, metadata."""
    if n < 1:
        raise ConfigError(f"-n is {n}; it must be at least 1")
    indexed = _index(filelists, layout, num_workers, latents_dir)
    for row in range(min(n, indexed.num_rows)):
        record = read_record(indexed, row)
        sys.stdout.write((dumps(record, ensure_ascii=False) if json else _describe(record)) + "\n")


def choose_rows(num_rows: int, n: int, seed: int) -> list[int]:
    """n different rows in random order, or all where there are fewer."""
    rng = np.random.Generator(np.random.Philox(seed))
    return rng.choice(num_rows, min(n, num_rows), replace=False, shuffle=True).tolist()


def read_record(indexed: Indexed, row: int) -> dict:
    """What is known of a row; of a bad one, its reason and error in place of caption, bytes and metadata."""
    name, number = locate(indexed, row)
    with closing(open_rows(name)) as part:
        size = {"width": int(part.widths[number]), "height": int(part.heights[number])}
        record = {"part": str(name.path), "row": number, **size}
        try:
            read = part.read(number)
        except RowError as error:
            return record | {"reason": error.reason, "error": str(error)}
    second = {"second_image_bytes": len(read.control)} if read.control else {}
    return record | {"caption": read.caption, "bytes": len(read.image), **second, "meta": read.meta}


def read_tile(indexed: Indexed, row: int, preview: ControlPreview | None = None):
    """(PIL image or None, caption or the reason why there is no image, a line that says which row this is). With
    `preview`, the image is a crop beside its control image."""
    name, number = locate(indexed, row)
    place = f"{name.path.name} row {number}"
    with closing(open_rows(name)) as part:
        try:
            read = part.read(number)
            if preview and part.has_images:
                return preview.draw(read, row), read.caption, place
            image = decode_image(read.image) if part.has_images else draw_latents(part.read_preview(number))
        except RowError as error:
            return None, f"{error.reason}: {error}", place
    if part.has_images or image is None:
        return image, read.caption, f"{image.width} x {image.height}, {place}" if image else f"no latents, {place}"
    return image, read.caption, f"latents of {image.width} x {image.height}, {place}"


def draw_latents(latents: np.ndarray | None):
    """The first three channels of latents, [C, h, w], as red, green and blue of a PIL image: from the darkest to the
    brightest hundredth of each. Fewer channels are repeated. None of None."""
    if latents is None:
        return None
    channels = latents[np.minimum(np.arange(3), len(latents) - 1)]
    low, high = (np.percentile(channels, share, axis=(1, 2), keepdims=True) for share in (1, 99))
    scaled = (channels - low) / np.maximum(high - low, 1e-6)
    return Image.fromarray((255 * scaled.clip(0, 1)).round().astype(np.uint8).transpose(1, 2, 0))


def draw_sheet(tiles: list, side: int):
    """The tiles, as `read_tile` gives them, in a sheet about as wide as it is high."""
    height = side + (_CAPTION_LINES + 1) * _LINE_HEIGHT + _GAP
    columns = max(1, min(len(tiles), round((len(tiles) * height / (side + _GAP)) ** 0.5 * 1.2)))
    lines = -(-len(tiles) // columns)
    sheet = Image.new("RGB", (columns * (side + _GAP) + _GAP, lines * (height + _GAP) + _GAP), "white")
    draw, small = ImageDraw.Draw(sheet), caption_font(10)
    font = caption_font(12, "".join(caption for _, caption, _ in tiles))
    for number, (image, caption, place) in enumerate(tiles):
        x, y = _GAP + number % columns * (side + _GAP), _GAP + number // columns * (height + _GAP)
        if image is None:
            draw.rectangle((x, y, x + side - 1, y + side - 1), fill="#eeeeee", outline="#bb3333")
            draw.text((x + 6, y + 6), "no image", fill="#bb3333", font=font)
        else:
            image = fit_image(image, side)
            left, top = x + (side - image.width) // 2, y + side - image.height  # on its caption
            sheet.paste(image, (left, top))
            draw.rectangle((left - 1, top - 1, left + image.width, top + image.height), outline="#cccccc")
        draw.text((x, y + side + 2), fit_text(place, small, side), fill="#777777", font=small)
        for line, text in enumerate(wrap_text(caption, font, side, _CAPTION_LINES), start=1):
            color = "black" if image else "#bb3333"
            draw.text((x, y + side + line * _LINE_HEIGHT), text, fill=color, font=font)
    return sheet


def fit_image(image: Image.Image, side: int) -> Image.Image:
    """An image of at most `side` pixels: a larger one shrunk, a small one enlarged by a whole factor."""
    factor = side // max(image.size)
    if factor:
        return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    image.thumbnail((side, side), Image.Resampling.LANCZOS, reducing_gap=3)
    return image


def _index(filelists: list[str], layout: str, num_workers: int, latents_dir: str) -> Indexed:
    indexed = index_parts(list_parts(filelists, layout, latents_dir=latents_dir), check_workers(num_workers))
    if not indexed.rows:
        raise DataError(next(iter(indexed.bad.values())))
    for error in indexed.bad.values():
        get_logger().warning("left out: %s", error)
    return indexed


def _describe(record: dict) -> str:
    where = f"{record['part']} row {record['row']}: {record['width']} x {record['height']}"
    if "reason" in record:
        return f"{where}, bad ({record['reason']}): {record['error']}"
    size = f"{record['bytes'] / 1000:.1f} KB" if record["bytes"] else "no picture here"
    if "second_image_bytes" in record:
        size += f", second image {record['second_image_bytes'] / 1000:.1f} KB"
    text = f"{where}, {size}\n  {record['caption']}"
    return text + (f"\n  {dumps(record['meta'], ensure_ascii=False)}" if record["meta"] else "")

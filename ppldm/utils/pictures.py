"""Pictures with words under them, grids of them that a person can judge at a glance, and where they are written."""

import io
import json
from bisect import bisect_right
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

from .files import atomic_write
from .log import get_logger
from .text import NOT_UTF8, hide

_CJK_FAMILIES = ("Noto Sans CJK", "Source Han Sans", "WenQuanYi", "Droid Sans Fallback", "SimHei", "Microsoft YaHei")
TITLE_HEIGHT, _TITLE_MARGIN = 22, 6
_ORDINARY_STYLES = ("Regular", "Book", "Normal", "Medium")
CAPTION_HEIGHT, LINE_HEIGHT = 38, 16
_WIDE = 240  # pixels, of a block whose captions need no third line
GAP = 6
CELLS = "ppldm:cells"  # keyword of the text in a PNG that says where each prompt's pictures are
SIDES = (128, 256)  # of a picture in the grid, pixels: smaller ones are enlarged, larger ones shrunk


def caption_font(size: int = 14, text: str = ""):
    """DejaVu Sans, which matplotlib ships; for Chinese, Japanese or Korean a font of the machine that has it."""
    import matplotlib

    own = str(Path(matplotlib.get_data_path(), "fonts/ttf/DejaVuSans.ttf"))
    return ImageFont.truetype((any(c >= "\u2e80" for c in text) and _cjk_font()) or own, size)


@lru_cache(maxsize=1)
def _cjk_font() -> str | None:
    # Not matplotlib's list of fonts, which is as old as its cache.
    from matplotlib.font_manager import findSystemFonts

    found = find_face(_CJK_FAMILIES, findSystemFonts())
    if found is None:
        get_logger().warning(
            "no font with Chinese characters is installed, so boxes stand for them; on Debian and Ubuntu: "
            "sudo apt install fonts-noto-cjk"
        )
    return found


def find_face(families: tuple[str, ...], files: Iterable[str]) -> str | None:
    """The file of the first family (by its beginning) that there is, if possible upright and of ordinary weight."""
    found = []
    for path in files:
        try:
            family, style = ImageFont.truetype(path, 10).getname()
        except OSError:
            continue  # not a font that FreeType reads
        for rank, known in enumerate(families):
            if (family or "").startswith(known):
                found.append((rank, style not in _ORDINARY_STYLES, family, path))
    return min(found)[-1] if found else None


def fit_text(text: str, font, width: int) -> str:
    """The text, cut and ended by an ellipsis where it is over `width` pixels wide."""
    if font.getlength(text) <= width:
        return text
    fitting = bisect_right(range(1, len(text) + 1), width, key=lambda count: font.getlength(text[:count] + "…"))
    return text[:fitting] + "…"


def wrap_text(text: str, font, width: int, max_lines: int) -> list[str]:
    """The words of a text in lines at most `width` pixels wide; the last line takes the rest, cut by an ellipsis."""
    lines, words = [], text.split()
    while words and len(lines) < max_lines - 1:
        taken = 1
        while taken < len(words) and font.getlength(" ".join(words[: taken + 1])) <= width:
            taken += 1
        lines.append(fit_text(" ".join(words[:taken]), font, width))
        words = words[taken:]
    return lines + ([fit_text(" ".join(words), font, width)] if words else [])


def with_title(picture: np.ndarray, title: str) -> np.ndarray:
    """[H, W, 3] uint8 with a line of text above it, on white; at least as wide as the text."""
    font = caption_font(14, title)
    width = max(picture.shape[1], int(font.getlength(title)) + 2 * _TITLE_MARGIN)
    canvas = Image.new("RGB", (width, picture.shape[0] + TITLE_HEIGHT), "white")
    ImageDraw.Draw(canvas).text((_TITLE_MARGIN, 3), title, fill="black", font=font)
    canvas.paste(Image.fromarray(picture), (0, TITLE_HEIGHT))
    return np.asarray(canvas)


def save_png(path, image, texts: dict[str, str] | None = None) -> None:
    """Write a PIL image or an [H, W, 3] uint8 array as PNG, atomically. `texts` by keyword go into the file."""
    with atomic_write(path) as file:
        file.write(as_png(image, texts))


def as_png(image, texts: dict[str, str] | None = None) -> bytes:
    """The content of such a file."""
    if isinstance(image, np.ndarray):
        image = Image.fromarray(image)
    info = PngInfo()
    for keyword, text in (texts or {}).items():
        info.add_itxt(keyword, text.encode(errors=NOT_UTF8).decode())
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", pnginfo=info)
    return buffer.getvalue()


def bicubic_filter(old: int, new: int) -> np.ndarray:
    """float32 [new, old]: Pillow's bicubic filter along one axis, which is that of PyTorch with `antialias`."""
    return np.asarray(Image.fromarray(np.eye(old, dtype=np.float32)).resize((old, new), Image.Resampling.BICUBIC))


def prompt_grid(
    captions: list[str], pictures: list[list[np.ndarray]], side: int | None = None, columns: int = 2
) -> Image.Image:
    """Blocks of a caption over its pictures ([H, W, 3] uint8, all of one size), `columns` blocks a row.

    side: pixels of a picture's longer side; by default its own, within SIDES. The picture's info has `cells`: each
    caption with the left, top, right and bottom of its pictures.
    """
    captions = [hide(caption) for caption in captions]
    height, width, _ = pictures[0][0].shape
    side = side or min(max(height, width, SIDES[0]), SIDES[1])
    width, height = (max(1, round(pixels * side / max(height, width))) for pixels in (width, height))
    columns = min(columns, len(captions))
    block_width = max(len(row) for row in pictures) * (width + GAP) + 3 * GAP
    font, most = caption_font(text="".join(captions)), 2 if block_width >= _WIDE else 3
    wrapped = [wrap_text(caption, font, block_width - 4 * GAP, most) for caption in captions]
    num_lines = max(2, *map(len, wrapped))
    above = CAPTION_HEIGHT + (num_lines - 2) * LINE_HEIGHT
    block_height, rows = height + above + GAP, -(-len(captions) // columns)
    canvas = Image.new("RGB", (columns * block_width + GAP, rows * block_height + GAP), "white")
    draw = ImageDraw.Draw(canvas)
    canvas.info["cells"] = cells = []
    for block, (caption, lines, row) in enumerate(zip(captions, wrapped, pictures, strict=True)):
        x, y = (block % columns) * block_width + 2 * GAP, (block // columns) * block_height + GAP
        for number, line in enumerate(lines, num_lines - len(lines)):  # one line stands right above its pictures
            draw.text((x, y + number * LINE_HEIGHT), line, fill="black", font=font)
        for index, picture in enumerate(row):
            tile = Image.fromarray(picture).resize((width, height), Image.Resampling.LANCZOS)
            left, top = x + index * (width + GAP), y + above
            canvas.paste(tile, (left, top))
            draw.rectangle((left - 1, top - 1, left + width, top + height), outline="#cccccc")
        cells.append([caption, [x, y + above, left + width, top + height]])
    return canvas


def labelled_grid(
    title: str, rows: list[str], columns: list[str], cells: list[list[list[np.ndarray]]], side: int | None = None
) -> Image.Image:
    """A table of pictures ([H, W, 3] uint8, all of one size) under a title: each cell's stand beside one another, under
    the name of its column and, where rows have names, behind that of its row. side: as of `prompt_grid`."""
    shape = cells[0][0][0].shape[:2]
    side = side or min(max(*shape, SIDES[0]), SIDES[1])
    height, width = (max(1, round(pixels * side / max(shape))) for pixels in shape)
    font = caption_font(text="".join([title, *rows, *columns]))
    left = 2 * GAP + max(int(font.getlength(name)) + 1 for name in rows)
    cell = max(len(cells[0][0]) * (width + GAP), *(int(font.getlength(name)) + 1 for name in columns)) + 2 * GAP
    size = (left + len(columns) * cell, CAPTION_HEIGHT + LINE_HEIGHT + len(rows) * (height + 2 * GAP) + GAP)
    canvas = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(canvas)
    for number, line in enumerate(wrap_text(title, font, size[0] - 2 * GAP, 2)):
        draw.text((GAP, number * LINE_HEIGHT), line, fill="black", font=font)
    for number, name in enumerate(columns):
        draw.text((left + number * cell, CAPTION_HEIGHT), name, fill="black", font=font)
    for row, (name, line) in enumerate(zip(rows, cells, strict=True)):
        top = CAPTION_HEIGHT + LINE_HEIGHT + GAP + row * (height + 2 * GAP)
        draw.text((GAP, top + (height - LINE_HEIGHT) // 2), name, fill="black", font=font)
        for column, pictures in enumerate(line):
            for index, picture in enumerate(pictures):
                tile = Image.fromarray(picture).resize((width, height), Image.Resampling.LANCZOS)
                canvas.paste(tile, (left + column * cell + index * (width + GAP), top))
    return canvas


def cells_as_text(picture, shift: int = 0) -> dict[str, str]:
    """What `save_png` writes of a grid of prompts into its file, moved down by `shift` pixels; {} of other pictures."""
    cells = getattr(picture, "info", {}).get("cells")
    moved = [[caption, [x, y + shift, right, bottom + shift]] for caption, (x, y, right, bottom) in cells or ()]
    return {CELLS: json.dumps(moved)} if cells else {}


def read_cells(path) -> list[tuple[str, list[int]]]:
    """(caption, [left, top, right, bottom]) of the prompts of such a picture; [] of another one. Raises OSError."""
    with Image.open(path) as picture:
        try:
            found = [(str(caption), [int(one) for one in box]) for caption, box in json.loads(picture.info[CELLS])]
        except (KeyError, ValueError, TypeError, OverflowError, RecursionError):
            return []
        return found if all(len(box) == 4 for _, box in found) else []


def pad_alike(pictures: list[np.ndarray]) -> np.ndarray:
    """[H, W, 3] uint8 of any sizes to [N, H, W, 3], as high and as wide as the largest, each in the middle of white."""
    height, width = (max(picture.shape[axis] for picture in pictures) for axis in (0, 1))
    padded = np.full((len(pictures), height, width, 3), 255, dtype=np.uint8)
    for place, picture in zip(padded, pictures, strict=True):
        top, left = (height - picture.shape[0]) // 2, (width - picture.shape[1]) // 2
        place[top : top + picture.shape[0], left : left + picture.shape[1]] = picture
    return padded


def titled_rows(rows: dict[str, list[np.ndarray]]) -> np.ndarray:
    """One picture, [H, W, 3] uint8, of rows of as many pictures of any sizes, each row below its name."""
    alike, count = pad_alike([picture for row in rows.values() for picture in row]), len(next(iter(rows.values())))
    places = enumerate(rows)
    found = [with_title(tile(alike[place * count : (place + 1) * count], count), name) for place, name in places]
    width = max(row.shape[1] for row in found)
    beside = [((0, 0), (0, width - row.shape[1]), (0, 0)) for row in found]
    return np.concatenate([np.pad(row, one, constant_values=255) for row, one in zip(found, beside, strict=True)])


def tile(pictures: np.ndarray, columns: int) -> np.ndarray:
    """[N, H, W, 3] uint8 to one picture [rows H, columns W, 3], row by row, white where N does not fill it."""
    count, height, width, _ = pictures.shape
    rows = -(-count // columns)
    padded = np.full((rows * columns, height, width, 3), 255, dtype=np.uint8)
    padded[:count] = pictures
    return padded.reshape(rows, columns, height, width, 3).swapaxes(1, 2).reshape(rows * height, columns * width, 3)

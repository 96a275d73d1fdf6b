"""Pictures beside pictures, with their captions: one PNG that a person can judge at a glance."""

import json

import numpy as np
from PIL import Image, ImageDraw

from .hidden import hide
from .pictures import caption_font, wrap_text

CAPTION_HEIGHT, LINE_HEIGHT = 38, 16
_WIDE = 240  # pixels, of a block whose captions need no third line
GAP = 6
CELLS = "ppldm:cells"  # keyword of the text in a PNG that says where each prompt's pictures are
SIDES = (128, 256)  # of a picture in the grid, pixels: smaller ones are enlarged, larger ones shrunk


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
    """(caption, [left, top, right, bottom]) of the prompts of a picture that has been written so; [] of another one.
    Raises OSError."""
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


def tile(pictures: np.ndarray, columns: int) -> np.ndarray:
    """[N, H, W, 3] uint8 to one picture [rows H, columns W, 3], row by row, white where N does not fill it."""
    count, height, width, _ = pictures.shape
    rows = -(-count // columns)
    padded = np.full((rows * columns, height, width, 3), 255, dtype=np.uint8)
    padded[:count] = pictures
    return padded.reshape(rows, columns, height, width, 3).swapaxes(1, 2).reshape(rows * height, columns * width, 3)

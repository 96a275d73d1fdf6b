"""Pictures beside pictures, with their captions: one PNG that a person can judge at a glance."""

import numpy as np
from PIL import Image, ImageDraw

from ..utils.pictures import caption_font, fit_text

CAPTION_HEIGHT = 34
GAP = 6


def prompt_grid(
    captions: list[str], pictures: list[list[np.ndarray]], side: int = 128, columns: int = 2
) -> Image.Image:
    """Blocks of a caption over its pictures ([H, W, 3] uint8, drawn `side` pixels wide), `columns` blocks a row."""
    samples = max(len(row) for row in pictures)
    width, height = samples * (side + GAP) + 3 * GAP, side + CAPTION_HEIGHT + GAP
    rows = -(-len(captions) // columns)
    canvas = Image.new("RGB", (columns * width + GAP, rows * height + GAP), "white")
    draw, font = ImageDraw.Draw(canvas), caption_font(text="".join(captions))
    for block, (caption, row) in enumerate(zip(captions, pictures, strict=True)):
        x, y = (block % columns) * width + 2 * GAP, (block // columns) * height + GAP
        draw.text((x, y + 8), fit_text(caption, font, width - 4 * GAP), fill="black", font=font)
        for index, picture in enumerate(row):
            tile = Image.fromarray(picture).resize((side, side), Image.Resampling.LANCZOS)
            left = x + index * (side + GAP)
            canvas.paste(tile, (left, y + CAPTION_HEIGHT))
            draw.rectangle(
                (left - 1, y + CAPTION_HEIGHT - 1, left + side, y + CAPTION_HEIGHT + side), outline="#cccccc"
            )
    return canvas


def tile(pictures: np.ndarray, columns: int) -> np.ndarray:
    """[N, H, W, 3] uint8 to one picture [rows H, columns W, 3], row by row, white where N does not fill it."""
    count, height, width, _ = pictures.shape
    rows = -(-count // columns)
    padded = np.full((rows * columns, height, width, 3), 255, dtype=np.uint8)
    padded[:count] = pictures
    return padded.reshape(rows, columns, height, width, 3).swapaxes(1, 2).reshape(rows * height, columns * width, 3)

"""Encoded images: the one place that opens them."""

import io
import struct
import zlib

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from ..utils.errors import RowError

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")

# What Pillow raises on damaged bytes, which is more than the UnidentifiedImageError (an OSError) that it documents.
_DAMAGED = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    EOFError,
    OverflowError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)
_EXIF_ORIENTATION = 0x0112


def image_size(image: bytes) -> tuple[int, int]:
    """(width, height) in pixels as shown, from the header of an encoded image; (0, 0) where it has none."""
    try:
        with Image.open(io.BytesIO(image), formats=FORMATS) as opened:
            width, height = opened.size
            turned = opened.getexif().get(_EXIF_ORIENTATION, 1) in (5, 6, 7, 8)
    except _DAMAGED:
        return 0, 0
    return (height, width) if turned else (width, height)


def decode_image(image: bytes) -> Image.Image:
    """An encoded image as RGB: turned as its EXIF says, transparency laid on white, 16-bit grey scaled to 8.

    Raises RowError "image" where it is damaged, of no known format, or so large that Pillow calls it a bomb (179
    million pixels).
    """
    try:
        with Image.open(io.BytesIO(image), formats=FORMATS) as opened:
            return _to_rgb(ImageOps.exif_transpose(opened))
    except UnidentifiedImageError as error:  # whose own words name an address in memory, another one each time
        raise RowError("image", f"the image is of no known format ({', '.join(FORMATS)})") from error
    except _DAMAGED as error:
        raise RowError("image", f"the image cannot be decoded ({error})") from error


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16-bit grey, which Pillow's own conversion would clip to white
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")

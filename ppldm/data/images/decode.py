"""Encoded images: the one place that opens them."""

import io
import struct
import warnings
import zlib

import numpy as np
import simplejpeg
from PIL import Image, ImageOps, UnidentifiedImageError, features

from ...utils.errors import RowError
from .scans import check_scans

# Between 89 and 179 million pixels Pillow warns; a picture is a bad row only where it refuses.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
# What the web has besides, and a download turns into JPEG. Pillow has AVIF from 11.3 on, where its libavif is there.
WEB_FORMATS = (*FORMATS, "TIFF", *(["AVIF"] if "avif" in features.modules and features.check("avif") else []))

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
_JPEG_START, _START_OF_SCAN = b"\xff\xd8\xff", b"\xda"
# What in a JPEG file may say that it is to be turned: EXIF data, or Adobe's XMP.
_TURNERS = (b"Exif\0\0", b"tiff:Orientation")


def image_size(image: bytes, formats: tuple[str, ...] = FORMATS) -> tuple[int, int]:
    """(width, height) in pixels as shown, from the header of an encoded image; (0, 0) where it has none."""
    try:
        with Image.open(io.BytesIO(image), formats=formats) as opened:
            width, height = opened.size
            # Of TIFF files Pillow gives the size as shown.
            turned = opened.format != "TIFF" and opened.getexif().get(_EXIF_ORIENTATION, 1) in (5, 6, 7, 8)
    except _DAMAGED:
        return 0, 0
    return (height, width) if turned else (width, height)


def shows_otherwise(image: bytes) -> bool:
    """Whether an image is turned by EXIF or may be transparent, so that readers which ignore both show something else
    than `decode_image`; False where it cannot be read."""
    try:
        with Image.open(io.BytesIO(image), formats=FORMATS) as opened:
            return opened.has_transparency_data or opened.getexif().get(_EXIF_ORIENTATION, 1) in range(2, 9)
    except _DAMAGED:
        return False


def decode_image(image: bytes, formats: tuple[str, ...] = FORMATS) -> Image.Image:
    """An encoded image as RGB: turned as its EXIF says, transparency laid on white, 16-bit grey scaled to 8.

    Raises RowError "image" where it is damaged, of none of the formats, or so large that Pillow calls it a bomb (179
    million pixels).
    """
    check_scans(image)
    try:
        with Image.open(io.BytesIO(image), formats=formats) as opened:
            return _to_rgb(ImageOps.exif_transpose(opened))
    except UnidentifiedImageError as error:  # whose own words name an address in memory, another one each time
        raise RowError("image", f"the image is of no known format ({', '.join(formats)})") from error
    except _DAMAGED as error:
        raise RowError("image", f"the image cannot be decoded ({error})") from error


def decode_pixels(image: bytes, exact: bool = True, formats: tuple[str, ...] = FORMATS) -> np.ndarray:
    """The pixels of `decode_image`, uint8 [height, width, 3], faster.

    Pillow and simplejpeg decode with the same library to the same bits, if `exact`; else chroma is enlarged by
    repetition, in 8 % less time. simplejpeg takes plain JPEG files, which nearly all are; the others and the damaged
    ones are Pillow's. Raises RowError "image".
    """
    if (pixels := _decode_plain_jpeg(image, fastupsample=not exact)) is not None:
        return pixels
    return np.asarray(decode_image(image, formats))


def check_pixels(image: bytes) -> np.ndarray:
    """As `decode_pixels`, and refuses what that refuses; of plain JPEG files in grey, uint8 [height, width, 1], in two
    thirds of the time. Enough to see that an image is sound, and how large. Raises RowError "image"."""
    if (pixels := _decode_plain_jpeg(image, colorspace="GRAY")) is not None:
        return pixels
    return np.asarray(decode_image(image))


def _decode_plain_jpeg(image: bytes, **how) -> np.ndarray | None:
    """None for all that is not a sound JPEG file in colour or grey, of usual size, to be shown as it lies."""
    check_scans(image)
    if not image.startswith(_JPEG_START) or _may_be_turned(image):
        return None
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(image)
        if colours not in ("YCbCr", "Gray", "RGB") or height * width > Image.MAX_IMAGE_PIXELS:
            return None
        return simplejpeg.decode_jpeg(image, **how)
    except ValueError:
        return None


def _may_be_turned(jpeg: bytes) -> bool:
    """Looks only at the segments before the pixels; those are fifty times as long."""
    place = len(_JPEG_START) - 1
    while jpeg[place : place + 1] == b"\xff" and jpeg[place + 1 : place + 2] != _START_OF_SCAN:
        length = int.from_bytes(jpeg[place + 2 : place + 4], "big")
        if any(turner in jpeg[place : place + 2 + length] for turner in _TURNERS):
            return True
        place += 2 + max(length, 2)
    return jpeg[place + 1 : place + 2] != _START_OF_SCAN


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16-bit grey, which Pillow's own conversion would clip to white
        pixels = np.asarray(image)
        if pixels.min() < 0 or pixels.max() > 0xFFFF:
            raise RowError("image", "the image cannot be decoded (32 bits a pixel)")
        image = Image.fromarray((pixels >> 8).astype(np.uint8))
    if image.mode == "F":  # nothing says which values are black and white
        raise RowError("image", "the image cannot be decoded (floating-point pixels)")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")

"""Pictures: the one place that decodes them, whichever door they enter by.

A JPEG file may go over its pixels any number of times. Each scan of a few bytes costs a pass over all of them, so that
2 MB can take minutes to decode. Encoders write about ten scans; libjpeg-turbo advises readers to stop at 500.
"""

import io
import re
import struct
import warnings
import zlib
from collections.abc import Callable
from functools import partial

import numpy as np
import simplejpeg
from PIL import Image, ImageOps, UnidentifiedImageError, features

from ...utils.errors import RowError

# Between 89 and 179 million pixels Pillow warns; a picture is a bad row only where it refuses.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)

# Pillow has AVIF from 11.3 on, where its libavif is there.
_AVIF = ("AVIF",) if "avif" in features.modules and features.check("avif") else ()
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", *_AVIF)

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
# What stands at the head of JPEG, PNG and WebP files with a colour profile; of the others Pillow is asked.
_PROFILE_MARKS, _UNMARKED = (b"ICC_PROFILE\0", b"iCCP", b"ICCP"), (b"II*\0", b"MM\0*")
_SRGB = (b"sRGB", "sRGB".encode("utf-16-be"))
# What in a JPEG file may say that it is to be turned: EXIF data, or Adobe's XMP.
_TURNERS = (b"Exif\0\0", b"tiff:Orientation")
_MAX_SCANS = 500
# So many are taken of any size, and more as long as scans x pixels, the passes, stay within this.
_FEW_SCANS, _MAX_PASSES = 64, 2_000_000_000
_START, _SCAN, _END = b"\xff\xd8\xff", b"\xff\xda", 0xD9
# Within pixels, FF 00 is a byte of them, and FF D0 to FF D7 stand between them.
_MARKER = re.compile(rb"\xff+([^\x00\xff\xd0-\xd7])", re.DOTALL)
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_WITHOUT_LENGTH = (0x01, 0xD8)


def check_scans(image: bytes) -> None:
    """Raises RowError "image" for a JPEG file of more scans than any encoder writes; other files are let through."""
    if image.startswith(_START) and image.count(_SCAN) > _FEW_SCANS:
        scans, pixels = _count_scans(image)
        if scans > _MAX_SCANS or (scans > _FEW_SCANS and scans * pixels > _MAX_PASSES):
            raise RowError("image", f"the image cannot be decoded ({scans:,} scans of {pixels:,} pixels)")


def _count_scans(jpeg: bytes) -> tuple[int, int]:
    """(scans, pixels) up to the end of the picture; what cameras put behind it may look like scans."""
    place, scans, pixels = 2, 0, 0
    while found := _MARKER.search(jpeg, place):
        marker, place = found[1][0], found.end()
        if marker == _END:
            break
        if marker in _FRAMES:
            height, width = (int.from_bytes(jpeg[at : at + 2], "big") for at in (place + 3, place + 5))
            pixels = max(pixels, height * width)
        scans += marker == _SCAN[1]
        if marker not in _WITHOUT_LENGTH:
            place += max(2, int.from_bytes(jpeg[place : place + 2], "big"))
    return scans, pixels


def image_size(image: bytes) -> tuple[int, int]:
    """(width, height) in pixels as shown, from the header of an encoded image; (0, 0) where it has none."""
    try:
        with Image.open(io.BytesIO(image), formats=FORMATS) as opened:
            width, height = opened.size
            # Of TIFF files Pillow gives the size as shown.
            turned = opened.format != "TIFF" and opened.getexif().get(_EXIF_ORIENTATION, 1) in (5, 6, 7, 8)
    except _DAMAGED:
        return 0, 0
    return (height, width) if turned else (width, height)


def stored_size(image: bytes) -> tuple[int, int]:
    """The same as it is stored, without a look at EXIF, for which Pillow decodes a whole PNG file."""
    try:
        with Image.open(io.BytesIO(image), formats=FORMATS) as opened:
            return opened.size
    except _DAMAGED:
        return 0, 0


def shows_otherwise(image: bytes) -> bool:
    """Whether an image is turned by EXIF or may be transparent, so that readers which ignore both show something else
    than `decode_image`; False where it cannot be read."""
    try:
        with Image.open(io.BytesIO(image), formats=FORMATS) as opened:
            return opened.has_transparency_data or opened.getexif().get(_EXIF_ORIENTATION, 1) in range(2, 9)
    except _DAMAGED:
        return False


def has_other_profile(image: bytes) -> bool:
    """Whether an image has a colour profile other than sRGB, which is ignored; False where it cannot be read."""
    head = image[: 1 << 16]
    if not (any(mark in head for mark in _PROFILE_MARKS) or head.startswith(_UNMARKED) or head[4:8] == b"ftyp"):
        return False
    try:
        with Image.open(io.BytesIO(image), formats=FORMATS) as opened:
            profile = opened.info.get("icc_profile") or b""
    except _DAMAGED:
        return False
    return bool(profile) and not any(name in profile for name in _SRGB)


def open_upright(image: bytes | Image.Image, formats: tuple[str, ...] = FORMATS) -> Image.Image:
    """A picture, encoded or Pillow's, turned as its EXIF says, 16-bit grey scaled to 8: as RGBA where it may be
    transparent, else as RGB.

    Raises RowError "image" where it is damaged, of none of the formats, or so large that Pillow calls it a bomb (179
    million pixels).
    """
    try:
        if isinstance(image, Image.Image):
            _refuse_wrong(image)
            return _to_rgb(ImageOps.exif_transpose(image), _depth(image))
        check_scans(image)
        with Image.open(io.BytesIO(image), formats=formats) as opened:
            _refuse_wrong(opened)
            depth, upright = _depth(opened), ImageOps.exif_transpose(opened)
        return _to_rgb(upright, depth, partial(_low_bytes, image))
    except UnidentifiedImageError as error:  # whose own words name an address in memory, another one each time
        raise RowError("image", f"the image is of no known format ({', '.join(formats)})") from error
    except _DAMAGED as error:
        raise RowError("image", f"the image cannot be decoded ({error})") from error


def decode_image(image: bytes | Image.Image, formats: tuple[str, ...] = FORMATS) -> Image.Image:
    """As `open_upright`, as RGB with transparency laid on white. Raises RowError "image"."""
    return lay_on_white(open_upright(image, formats))


def lay_on_white(picture: Image.Image) -> Image.Image:
    """What `open_upright` gives, as RGB."""
    if picture.mode == "RGB":
        return picture
    return Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture).convert("RGB")


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
    if not image.startswith(_START) or _may_be_turned(image):
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
    place = len(_START) - 1
    while jpeg[place : place + 1] == b"\xff" and jpeg[place + 1 : place + 2] != _SCAN[1:]:
        length = int.from_bytes(jpeg[place + 2 : place + 4], "big")
        if any(turner in jpeg[place : place + 2 + length] for turner in _TURNERS):
            return True
        place += 2 + max(length, 2)
    return jpeg[place + 1 : place + 2] != _SCAN[1:]


def _refuse_wrong(opened: Image.Image) -> None:
    """Raise RowError for kinds of TIFF that Pillow decodes to other pixels without a word."""
    tags = getattr(opened, "tag_v2", {})
    deep, kind, fill, is_raw = max(tags.get(258, (1,))) > 8, tags.get(262), tags.get(266, 1), tags.get(259, 1) == 1
    for what, is_so in (
        ("planes of one channel each", tags.get(284, 1) == 2),
        ("12 bits", 12 in tags.get(258, ())),
        ("16 bits whose 0 is white", deep and kind == 0),
        ("16 bits in reversed order", deep and fill == 2),
        ("YCbCr without compression", is_raw and kind == 6),
    ):
        if is_so:
            raise RowError("image", f"Pillow decodes TIFF of {what} wrongly; convert the image to PNG")


def _depth(opened: Image.Image) -> str:
    """How samples lie in a file that is opened and not yet decoded, in Pillow's words: "L;2", "RGB;16B"."""
    tiles = getattr(opened, "tile", None)
    return str(tiles[0][3]) if opened.format == "PNG" and tiles else ""


def _low_bytes(png: bytes) -> Image.Image:
    """The less significant halves of 16-bit colours, of which Pillow keeps the others."""
    with Image.open(io.BytesIO(png), formats=("PNG",)) as opened:
        opened.tile = [tile._replace(args="RGB;16L") for tile in opened.tile]
        return ImageOps.exif_transpose(opened)


def _to_rgb(image: Image.Image, depth: str, low_bytes: Callable[[], Image.Image] | None = None) -> Image.Image:
    transparent = _is_key(image, depth, low_bytes)
    if image.mode.startswith("I"):  # 16-bit grey, which Pillow's own conversion would clip to white
        pixels = np.asarray(image)
        if pixels.min() < 0 or pixels.max() > 0xFFFF:
            raise RowError("image", "the image cannot be decoded (32 bits a pixel)")
        image = Image.fromarray((pixels >> 8).astype(np.uint8))
    if image.mode == "F":  # nothing says which values are black and white
        raise RowError("image", "the image cannot be decoded (floating-point pixels)")
    if transparent is not None:
        image = image.convert("RGB")
        image.putalpha(Image.fromarray(np.where(transparent, np.uint8(0), np.uint8(255))))
        return image
    if image.mode == "La":
        image = image.convert("LA")
    return image.convert("RGBA" if image.has_transparency_data else "RGB")


def _is_key(image: Image.Image, depth: str, low_bytes: Callable[[], Image.Image] | None) -> np.ndarray | None:
    """bool [height, width]: where an image has the one grey or colour that is transparent; None where none is.

    Pillow compares pixels of 8 bits with the key as it stands in the file, in 2, 4 or 16 bits.
    """
    key = image.info.get("transparency")
    if image.mode == "RGB" and isinstance(key, tuple):
        high = [part >> 8 for part in key] if depth == "RGB;16B" else [part & 0xFF for part in key]
        found = (np.asarray(image) == high).all(-1)
        if depth == "RGB;16B" and found.any():
            if low_bytes is None:
                raise RowError("image", "of 16-bit colours, one transparent, Pillow reads half; give the file itself")
            found &= (np.asarray(low_bytes()) == [part & 0xFF for part in key]).all(-1)
        return found
    if image.mode in ("1", "L", "I;16") and isinstance(key, int):
        most = {"L;2": 3, "L;4": 15, "I;16B": 0xFFFF}.get(depth, 0xFF)
        key = (key & most) * (1 if most > 0xFF else 0xFF // most)
        return np.asarray(image.convert("L") if image.mode == "1" else image) == key
    return None

"""From an encoded image to the pixels of a sample, with every random number handed in: the one place that decodes
pictures, whichever door they enter by.

A JPEG file may go over its pixels any number of times, so that 2 MB can take minutes to decode. Encoders write about
ten scans; libjpeg-turbo advises readers to stop at 500. Crops are drawn anew for every sample; or, with `num_crops`,
each row has that many places, a function of its number in its part alone, of which a sample draws one: what is made of
each of them once (cached latents) serves every epoch, seed and order.
"""

import io
import re
import struct
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import simplejpeg
from PIL import Image, ImageOps, UnidentifiedImageError, features

from ..utils.errors import ConfigError, RowError
from ..utils.rng import Stream, make_rng

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
    LookupError,
    EOFError,
    OverflowError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)
T = TypeVar("T")
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


def _look(image: bytes, ask: Callable[[Image.Image], T], otherwise: T) -> T:
    """What an image says that is opened and not decoded; `otherwise` where it cannot be read."""
    try:
        with Image.open(io.BytesIO(image), formats=FORMATS) as opened:
            return ask(opened)
    except _DAMAGED:
        return otherwise


def image_size(image: bytes) -> tuple[int, int]:
    """(width, height) in pixels as shown, from the header of an encoded image; (0, 0) where it has none."""

    def shown(opened: Image.Image) -> tuple[int, int]:
        # Of TIFF files Pillow gives the size as shown.
        turned = opened.format != "TIFF" and opened.getexif().get(_EXIF_ORIENTATION, 1) in (5, 6, 7, 8)
        return opened.size[::-1] if turned else opened.size

    return _look(image, shown, (0, 0))


def stored_size(image: bytes) -> tuple[int, int]:
    """The same as it is stored, without a look at EXIF, for which Pillow decodes a whole PNG file."""
    return _look(image, lambda opened: opened.size, (0, 0))


def shows_otherwise(image: bytes) -> bool:
    """Whether EXIF turns an image, or it may be transparent, which some readers ignore; False if unreadable."""
    odd = range(2, 9)
    return _look(image, lambda one: one.has_transparency_data or one.getexif().get(_EXIF_ORIENTATION, 1) in odd, False)


def has_other_profile(image: bytes) -> bool:
    """Whether an image has a colour profile other than sRGB, which is ignored; False where it cannot be read."""
    head = image[: 1 << 16]
    if not (any(mark in head for mark in _PROFILE_MARKS) or head.startswith(_UNMARKED) or head[4:8] == b"ftyp"):
        return False
    profile = _look(image, lambda opened: opened.info.get("icc_profile"), None)
    return bool(profile) and not any(name in profile for name in _SRGB)


def open_upright(image: bytes | Image.Image, formats: tuple[str, ...] = FORMATS) -> Image.Image:
    """A picture, encoded or Pillow's, turned as its EXIF says, 16-bit grey scaled to 8: as RGBA where it may be
    transparent, else as RGB. Raises RowError "image": damaged, of no known format, or over 179 million pixels."""
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
    """The pixels of `decode_image`, uint8 [height, width, 3], faster: plain JPEG files by simplejpeg, to the bits of
    Pillow if `exact`; else chroma is enlarged by repetition, in 8 % less time. Raises RowError "image"."""
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
    """bool [height, width]: where an image has the one grey or colour that is transparent; None where none is. Pillow
    compares pixels of 8 bits with the key as it stands in the file, in 2, 4 or 16 bits."""
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


_SIDE = 64  # pixels, about, of the shorter side that is looked at
_BELOW_1 = 1 - 2**-53


def find_corner(pixels: np.ndarray, scaled: tuple[int, int], crop: tuple[int, int, int]) -> tuple[float, float]:
    """The crop that has most edges, for `--smart_crop`: two numbers of [0, 1) for x and y, as those that draw a crop,
    of an RGB image, uint8 [height, width, 3], that is resized to `scaled`, (width, height), and cropped to `crop`, (3,
    H, W). The energy of a pixel is |dI/dx| + |dI/dy|, I its brightness (e1 of Avidan and Shamir, "Seam Carving for
    Content-Aware Image Resizing", 2007), of the picture shrunk to about 64 pixels. Along each axis the crop lies where
    its window holds most of it; of equals nearest to the middle. In whole numbers: the same everywhere."""
    shrink = max(1, min(pixels.shape[:2]) // _SIDE)
    light = np.asarray(Image.fromarray(pixels).convert("L").reduce(shrink), np.int32)
    energy = np.zeros_like(light)
    energy[:, 1:] += np.abs(np.diff(light, axis=1))
    energy[1:] += np.abs(np.diff(light, axis=0))
    return _find_window(energy.sum(axis=0), crop[2] / scaled[0]), _find_window(energy.sum(axis=1), crop[1] / scaled[1])


def _find_window(profile: np.ndarray, share: float) -> float:
    """Where in [0, 1) the window of `share` of a profile begins, among all places that it can have."""
    length = min(max(1, round(len(profile) * share)), len(profile))
    sums = np.cumsum(np.concatenate([[0], profile]))
    windows = sums[length:] - sums[:-length]
    if len(windows) == 1:
        return 0.5
    best = np.flatnonzero(windows == windows.max())
    middle = (len(windows) - 1) / 2
    return min(float(best[np.argmin(np.abs(best - middle))] / (len(windows) - 1)), _BELOW_1)


@dataclass(frozen=True)
class DrawnCrop:
    """What a sample has drawn. corner: where its crop lies, two numbers of [0, 1) for x and y; None for the centre, or
    where `number` says it: which of the row's enumerated crops. mirrored: left for right."""

    corner: tuple[float, float] | None = None
    number: int = 0
    mirrored: bool = False


@dataclass(frozen=True)
class CropRule:
    """What of an image becomes the pixels of a sample. fraction: in (0, 1], the crop's share of the side by which the
    resized image covers it. random: the crop is drawn; else it is the centre's, or with `smart` where most edges are
    (`find_corner`). flip: half of the samples are mirrored. interpolation: one of `kernels.INTERPOLATIONS`. num_crops:
    of how many places a row's random crop is drawn; 0: any place. enlarge: images may be smaller than their crop."""

    fraction: float = 0.9
    random: bool = True
    flip: bool = False
    interpolation: str = "lanczos"
    num_crops: int = 0
    smart: bool = False
    enlarge: bool = False

    def __post_init__(self):
        if not 0 < self.fraction <= 1:
            raise ConfigError(f"crop_fraction is {self.fraction}; it must be over 0 and at most 1")
        from .kernels import INTERPOLATIONS  # compiled or loaded here, before processes are forked that resize

        if self.interpolation not in INTERPOLATIONS:
            raise ConfigError(f"interpolation is {self.interpolation}; it must be one of {', '.join(INTERPOLATIONS)}")
        if self.num_crops < 0:
            raise ConfigError(f"num_crops is {self.num_crops}; it must be 0 or more")
        if self.smart and self.random:
            raise ConfigError("a crop that is drawn cannot be a smart one; choose one of them")

    @property
    def kind(self) -> str:
        """`center`, `smart`, the number of enumerated crops, or `random` for any place."""
        if self.random:
            return str(self.num_crops or "random")
        return "smart" if self.smart else "center"

    @property
    def num_variants(self) -> int:
        """Of a row: enumerated crops, each also mirrored with `flip`; 0 where crops are not enumerated."""
        crops = 1 if not self.random else self.num_crops
        return crops * (2 if self.flip else 1)

    def draw(self, generator: Callable[[Stream], np.random.Generator]) -> DrawnCrop:
        """The crop of a sample; `generator` gives the sample's random numbers of a purpose."""
        corner, number = None, 0
        if self.random and self.num_crops:
            number = int(generator(Stream.CROP_CHOICE).random() * self.num_crops)
        elif self.random:
            corner = tuple(generator(Stream.CROP).random(2))
        mirrored = self.flip and generator(Stream.FLIP).random() < 0.5
        return DrawnCrop(corner, number, bool(mirrored))

    def variant(self, crop: DrawnCrop) -> int:
        """The number of an enumerated crop among the `num_variants` of a row."""
        return crop.number * 2 + crop.mirrored if self.flip else crop.number

    def list_variants(self) -> list[DrawnCrop]:
        """All of a row, by `variant`."""
        flips = (False, True) if self.flip else (False,)
        crops = range(self.num_variants // len(flips))
        return [DrawnCrop(None, number, mirrored) for number in crops for mirrored in flips]

    def find_corner(self, crop: DrawnCrop, row: int) -> tuple[float, float] | None:
        """Where a crop of row number `row` of its part lies; None for the centre."""
        if self.random and self.num_crops:
            return tuple(make_rng(0, Stream.CROP_PLACE, crop.number, row).random(2))
        return crop.corner

    def decode(self, image: bytes) -> np.ndarray:
        """What `cut` takes of an encoded image. Raises RowError."""
        return decode_pixels(image, exact=self.interpolation != "area")

    def cut(self, image: np.ndarray, crop: DrawnCrop, row: int, pixels: np.ndarray) -> tuple[int, int]:
        """Fill `pixels`, uint8 [3, H, W], with a crop of a decoded image, uint8 [height, width, 3], that of row number
        `row` of its part. (top, left) of the crop in the resized picture, not mirrored. Raises RowError."""
        if self.smart:
            scaled = scale_to_cover(*image.shape[:2], *pixels.shape[1:], self.fraction)  # type: ignore[call-arg]
            corner = find_corner(image, scaled, pixels.shape)
        else:
            corner = self.find_corner(crop, row)
        place = crop_pixels(image, self.fraction, corner, self.interpolation, pixels, self.enlarge)
        if crop.mirrored:
            pixels[:] = pixels[:, :, ::-1].copy()
        return place


def crop_pixels(
    image: np.ndarray,
    crop_fraction: float,
    random: tuple[float, float] | None,
    interpolation: str,
    crop: np.ndarray,
    enlarge: bool = False,
) -> tuple[int, int]:
    """Fill `crop`, uint8 [3, H, W], with a rectangle of an RGB image, uint8 [height, width, 3]; (top, left) of it in
    the resized image, where `place_crop` says. Only what the crop keeps is resized (`kernels`). Raises RowError
    "too_small" where a side is under the crop's, unless `enlarge`."""
    from .kernels import resize_crop  # and with it numba, which takes as long to load as all else that `--help` needs

    height, width, _ = image.shape
    _, crop_height, crop_width = crop.shape
    if (height < crop_height or width < crop_width) and not enlarge:
        problem = f"the image has {width} x {height} pixels, a side under {crop_width} x {crop_height}"
        raise RowError("too_small", problem)
    scaled, (top, left) = place_crop((height, width), (crop_height, crop_width), crop_fraction, random)
    resize_crop(image, scaled, left, top, interpolation, crop)
    return top, left


def place_crop(
    picture: tuple[int, int], crop: tuple[int, int], crop_fraction: float, random: tuple[float, float] | None
) -> tuple[tuple[int, int], tuple[int, int]]:
    """((width, height) of a picture resized by `scale_to_cover`, (top, left) of its crop), of both as (height, width).
    `random`: two numbers of [0, 1) for x and y; None: the centre."""
    scaled = scale_to_cover(*picture, *crop, crop_fraction)
    left, top = (
        int(where * (side - kept + 1))
        for where, side, kept in zip(random or (0.5, 0.5), scaled, crop[::-1], strict=True)
    )
    return scaled, (top, left)


def scale_to_cover(height: int, width: int, crop_height: int, crop_width: int, crop_fraction: float) -> tuple[int, int]:
    """(width, height) of an image once it is resized, never distorted by more than a pixel: the side that would be the
    first not to cover the crop is int(the crop's / crop_fraction), the other follows, rounded down."""
    if width * crop_height <= height * crop_width:
        scaled = int(crop_width / crop_fraction)
        return scaled, scaled * height // width
    scaled = int(crop_height / crop_fraction)
    return scaled * width // height, scaled

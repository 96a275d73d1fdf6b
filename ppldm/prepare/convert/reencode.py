"""What becomes of a picture that is kept: nothing, or a smaller or differently encoded file of the same picture."""

import io
from dataclasses import dataclass

import numpy as np
from PIL import Image

from ...data.images import decode_pixels, image_size, scale_to_cover, shows_otherwise
from ...utils.errors import ConfigError, RowError

FILTERS = {"lanczos": Image.Resampling.LANCZOS, "bicubic": Image.Resampling.BICUBIC}
# Names of `--format`: what Pillow calls it, and the first bytes of its files.
_FORMATS = {"jpg": ("JPEG", b"\xff\xd8\xff"), "png": ("PNG", b"\x89PNG"), "webp": ("WEBP", b"RIFF")}
_DEFAULT_QUALITY = 95


@dataclass(frozen=True)
class Treatment:
    """`size`: short sides above it become it, in pixels; 0: no limit. `quality`: 1 to 100 of JPEG and WebP, 0: not
    asked for. `format`: "jpg", "png", "webp", or "" for the picture's own. `min_size`: shorter sides are refused.
    `normalise`: pictures are encoded anew that show something else where EXIF rotation and transparency are ignored.
    `interpolation`: of FILTERS, by which they are shrunk."""

    size: int = 0
    quality: int = 0
    format: str = ""
    min_size: int = 0
    normalise: bool = False
    interpolation: str = "lanczos"

    def __post_init__(self):
        if self.format and self.format not in _FORMATS:
            raise ConfigError(f"--format {self.format} is not known; choose {', '.join(_FORMATS)}")
        if not 0 <= self.quality <= 100:
            raise ConfigError(f"--quality is {self.quality}; it must be 1 to 100, or 0 to leave pictures as they are")
        if self.size < 0 or self.min_size < 0:
            raise ConfigError(f"--size is {self.size}, --min-size {self.min_size}; they must be 0 or more")
        if self.interpolation not in FILTERS:
            raise ConfigError(f"--interpolation {self.interpolation} is not known; choose {', '.join(FILTERS)}")

    def settings(self) -> dict:
        """For the key of what is made by it: filters other than the usual one have a name there."""
        usual = {"interpolation"} if self.interpolation == "lanczos" else set()
        return {name: value for name, value in vars(self).items() if name not in usual}


def treat(image: bytes, pixels: np.ndarray, treatment: Treatment) -> tuple[bytes, int, int]:
    """(encoded picture, width, height), the bytes themselves where nothing is asked for that they are not already.

    pixels: uint8 [height, width, 3], or 1 channel where none may change, what `image` shows, turned by EXIF, on white.
    They are made smaller, never larger or padded, to the sides and by the filter of training. Raises RowError.
    """
    height, width, _ = pixels.shape
    if min(width, height) < treatment.min_size:
        raise RowError("too_small", f"{width} x {height} pixels, and --min-size is {treatment.min_size}")
    own = next((name for name, (_, magic) in _FORMATS.items() if image.startswith(magic)), "")
    name = treatment.format or own or "jpg"
    shrinks = 0 < treatment.size < min(width, height)
    changes = shrinks or treatment.quality or name != (own or name)
    if not changes and not (treatment.normalise and shows_otherwise(image)):
        return image, width, height
    picture = Image.fromarray(pixels)
    if shrinks:
        sides = scale_to_cover(height, width, treatment.size, treatment.size, 1.0)
        picture = picture.resize(sides, FILTERS[treatment.interpolation])
    options = {} if name == "png" else {"quality": treatment.quality or _DEFAULT_QUALITY}
    return _encode(picture, name, **options)


RESIZE_MODES = ("keep_ratio", "keep_ratio_largest", "center_crop", "border", "no")
_OF_OPENCV = {  # img2dataset's names of interpolations
    **{name: name.upper() for name in ("nearest", "linear", "cubic", "area", "lanczos4")},
    **{"bilinear": "LINEAR", "bicubic": "CUBIC", "lanczos": "LANCZOS4"},
}
_KEYED = ("image_size", "encode_quality", "min_image_size", "max_image_area", "max_aspect_ratio")


@dataclass(frozen=True)
class Resizer:
    """What `ppldm download` keeps of a picture: a file of `encode_format` that needs no resizing, to the byte; else
    what training decodes, resized and encoded anew. It is decoded once, whole; what is too large is known from its
    header. Names and meanings are those of img2dataset's Resizer, which drops EXIF rotation and turns 16-bit pictures
    white. By default pictures only become smaller, by training's own Lanczos and its sides; of all other settings the
    pixels are those of img2dataset.

    `image_size`: in pixels as shown, 0 meaning any. `resize_mode`: it becomes the short side (keep_ratio; center_crop
    cuts the long one to it too) or the long one (keep_ratio_largest; border fills up with white to a square).
    `resize_only_if_bigger`: no picture is enlarged, nor cut or filled up where it is not made smaller.
    `encode_quality`: 1 to 100; of PNG how much it is compressed, 0 to 9. The bounds are of the original:
    `min_image_size` of the short side, `max_image_area` of width x height, `max_aspect_ratio` of long / short side."""

    image_size: int = 512
    encode_quality: int = 95
    min_image_size: int = 0
    max_image_area: float = float("inf")
    max_aspect_ratio: float = float("inf")
    resize_mode: str = "keep_ratio"
    resize_only_if_bigger: bool = True
    upscale_interpolation: str = "lanczos"
    downscale_interpolation: str = "lanczos"
    encode_format: str = "jpg"
    skip_reencode: bool = True

    def __post_init__(self):
        if self.image_size < 0:
            raise ConfigError(f"--image-size is {self.image_size}; it must be at least 1, or 0 for no limit")
        known = {"resize_mode": RESIZE_MODES, "encode_format": _FORMATS}
        known |= dict.fromkeys(("upscale_interpolation", "downscale_interpolation"), _OF_OPENCV)
        for name, values in known.items():
            if (value := getattr(self, name)) not in values:
                raise ConfigError(f"--{name.replace('_', '-')} {value!r} is unknown; use {', '.join(values)}")
        least, most = (0, 9) if self.encode_format == "png" else (1, 100)
        if not least <= self.encode_quality <= most:
            raise ConfigError(
                f"--encode-quality is {self.encode_quality}; of {self.encode_format} it must be {least} to {most}"
            )

    def settings(self) -> dict:
        """For the key of what is made by it: what differs from the usual of the younger ones has a name there."""
        usual = vars(Resizer())
        return {name: value for name, value in vars(self).items() if name in _KEYED or value != usual.get(name, value)}

    def fit(self, image: bytes) -> tuple[bytes, int, int, int, int]:
        """(encoded, width, height, original width, original height). Raises RowError."""
        width, height = image_size(image)
        if width:  # else its header cannot be read, which decoding says
            if width * height > self.max_image_area:
                raise RowError("too_large", f"image area too large ({width} x {height})")
            if min(width, height) < self.min_image_size:
                raise RowError("too_small", f"image too small ({width} x {height})")
            if max(width, height) > self.max_aspect_ratio * min(width, height):
                raise RowError("aspect", f"aspect ratio too large ({width} x {height})")
        pixels = decode_pixels(image)
        height, width, _ = pixels.shape
        side = (max if self.resize_mode in ("keep_ratio_largest", "border") else min)(width, height)
        resizes = self.image_size and self.resize_mode != "no"
        resizes = resizes and (side > self.image_size or not self.resize_only_if_bigger)
        is_own = image.startswith(_FORMATS[self.encode_format][1]) and self.skip_reencode
        if not resizes and is_own and (self.encode_format == "jpg" or not shows_otherwise(image)):
            return image, width, height, width, height
        picture = Image.fromarray(self._resize(pixels, side) if resizes else pixels)
        how = "compress_level" if self.encode_format == "png" else "quality"
        return *_encode(picture, self.encode_format, **{how: self.encode_quality}), width, height

    def _resize(self, pixels: np.ndarray, side: int) -> np.ndarray:
        """uint8 [H, W, 3] by `resize_mode`, whose `side` of the picture becomes `image_size`."""
        from ...data.control import opencv

        size, sides = self.image_size, pixels.shape[:2]
        if side > size and self.downscale_interpolation == "lanczos":
            height, width = (max(1, size * one // side) for one in sides)
            pixels = np.asarray(Image.fromarray(pixels).resize((width, height), FILTERS["lanczos"]))
        elif side != size:
            name = self.downscale_interpolation if side > size else self.upscale_interpolation
            height, width = (max(1, round(one * (size / side))) for one in sides)
            cv2 = opencv()
            pixels = cv2.resize(pixels, (width, height), interpolation=getattr(cv2, f"INTER_{_OF_OPENCV[name]}"))
        height, width, _ = pixels.shape
        top, left = abs(height - size) // 2, abs(width - size) // 2
        if self.resize_mode == "center_crop":
            return pixels[top : top + size, left : left + size]
        if self.resize_mode == "border":
            white = np.full((size, size, 3), 255, np.uint8)
            white[top : top + height, left : left + width] = pixels
            return white
        return pixels


def _encode(picture: Image.Image, name: str, **options) -> tuple[bytes, int, int]:
    """(file of a format of `_FORMATS`, width, height)."""
    file = io.BytesIO()
    picture.save(file, _FORMATS[name][0], **options)
    return file.getvalue(), *picture.size

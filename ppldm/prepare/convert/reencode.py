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
    file = io.BytesIO()
    options = {} if name == "png" else {"quality": treatment.quality or _DEFAULT_QUALITY}
    picture.save(file, _FORMATS[name][0], **options)
    return file.getvalue(), *picture.size


@dataclass(frozen=True)
class Resizer:
    """What `ppldm download` keeps of a picture: a JPEG that is small enough, to the byte; else what training decodes,
    shrunk until the short side is `image_size`, never enlarged or padded, as JPEG (img2dataset's own resizer drops EXIF
    rotation and turns 16-bit pictures white). It is decoded once, whole; what is too large is known from its header.

    `image_size`: the largest short side in pixels as shown, 0 meaning no limit. The bounds are of the original:
    `min_image_size` of the short side, `max_image_area` of width x height, `max_aspect_ratio` of long / short side."""

    image_size: int = 512
    encode_quality: int = 95
    min_image_size: int = 0
    max_image_area: float = float("inf")
    max_aspect_ratio: float = float("inf")

    def __post_init__(self):
        if self.image_size < 0:
            raise ConfigError(f"--image-size is {self.image_size}; it must be at least 1, or 0 for no limit")
        if not 1 <= self.encode_quality <= 100:
            raise ConfigError(f"--encode-quality is {self.encode_quality}; it must be 1 to 100")

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
        if image.startswith(_FORMATS["jpg"][1]) and (not self.image_size or min(width, height) <= self.image_size):
            return image, width, height, width, height
        return *treat(image, pixels, Treatment(self.image_size, self.encode_quality, "jpg")), width, height

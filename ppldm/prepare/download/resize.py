"""A downloaded picture made fit to keep.

Laws. A JPEG that is small enough goes through untouched, to the byte. Other files are decoded as training decodes
pictures, shrunk by Lanczos until the short side is `image_size`, never enlarged or padded, and encoded as JPEG
(img2dataset's own resizer drops EXIF rotation and turns 16-bit pictures white). Every picture is decoded once, whole;
what is too large is known from its header, before it is decoded.
"""

from dataclasses import dataclass

from ...data.images import decode_pixels, image_size
from ...utils.errors import ConfigError, RowError
from ..convert.reencode import Treatment, treat

_JPEG_START = b"\xff\xd8\xff"


@dataclass(frozen=True)
class Resizer:
    """`image_size`: the largest short side in pixels as shown, 0 meaning no limit. The bounds are of the original:
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
        if image.startswith(_JPEG_START) and (not self.image_size or min(width, height) <= self.image_size):
            return image, width, height, width, height
        return *treat(image, pixels, Treatment(self.image_size, self.encode_quality, "jpg")), width, height

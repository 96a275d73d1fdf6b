"""A downloaded picture made fit to keep: img2dataset's resizer, with ours in its place.

Laws. A JPEG that is small enough goes through untouched, to the byte. Others, and PNG, WebP, GIF, BMP, TIFF and AVIF
files, are decoded as training decodes pictures (EXIF rotation applied, transparency on white, 16-bit scaled to 8, CMYK
to RGB, the first frame of an animation), shrunk by Lanczos until the short side is `image_size`, never enlarged, never
padded, and encoded as JPEG. Every picture is decoded once, whole: what is kept can be read. What is too large is known
from its header, before it is decoded.

img2dataset's own resizer drops the EXIF rotation of what it encodes again, and turns 16-bit pictures white.
"""

import io
from dataclasses import dataclass

from ...data.images.decode import decode_pixels, image_size
from ...utils.errors import ConfigError, RowError
from ..convert.reencode import Treatment, treat

_JPEG_START = b"\xff\xd8\xff"


@dataclass(frozen=True)
class Resizer:
    """Called by img2dataset's Downloader in place of its Resizer.

    `image_size` is the largest short side in pixels, 0 meaning no limit; sizes are of the picture as shown.
    `min_image_size` bounds the short side, `max_image_area` width x height, `max_aspect_ratio` long side / short side,
    each of the original.
    """

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

    def __call__(self, stream: io.BytesIO, _boxes_to_blur=None) -> tuple:
        """(encoded, width, height, original width, original height, None), or five None and the reason of failure."""
        try:
            return (*self.fit(stream.getvalue()), None)
        except RowError as error:
            return None, None, None, None, None, str(error)

    def fit(self, image: bytes) -> tuple[bytes, int, int, int, int]:
        """(encoded, width, height, original width, original height). Raises RowError."""
        self._check_size(*image_size(image))
        pixels = decode_pixels(image)
        height, width, _ = pixels.shape
        if image.startswith(_JPEG_START) and (not self.image_size or min(width, height) <= self.image_size):
            return image, width, height, width, height
        return *treat(image, pixels, Treatment(self.image_size, self.encode_quality, "jpg")), width, height

    def _check_size(self, width: int, height: int) -> None:
        """Raise RowError for a picture of this size; a header that cannot be read says 0 x 0 and is judged later."""
        if not width:
            return
        if width * height > self.max_image_area:
            raise RowError("too_large", f"image area too large ({width} x {height})")
        if min(width, height) < self.min_image_size:
            raise RowError("too_small", f"image too small ({width} x {height})")
        if max(width, height) > self.max_aspect_ratio * min(width, height):
            raise RowError("aspect", f"aspect ratio too large ({width} x {height})")

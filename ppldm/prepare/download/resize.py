"""A downloaded picture made fit to keep, and which one was being decoded when the process of its shard ended.

Laws. A JPEG that is small enough goes through untouched, to the byte. Other files are decoded as training decodes
pictures, shrunk by Lanczos until the short side is `image_size`, never enlarged or padded, and encoded as JPEG
(img2dataset's own resizer drops EXIF rotation and turns 16-bit pictures white). Every picture is decoded once, whole;
what is too large is known from its header, before it is decoded.

Decoding cannot be interrupted. So meanwhile a picture's URL is in a file beside the shard's journal. After
`_DECODE_SECONDS` Python's own watchdog ends the process and says so there; where it crashed or was killed, the one that
started it does (`blame`), and the next try goes on without the picture. After a kill of the whole download nobody says
anything, and the picture is tried again.

    ["URL"]       the picture that is being decoded
    anything      what ended the process, and thereby a verdict on the URL before it
"""

import faulthandler
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ...data.images import decode_pixels, image_size
from ...utils.errors import ConfigError, RowError
from ..convert.reencode import Treatment, treat

_JPEG_START = b"\xff\xd8\xff"
_DECODE_SECONDS = 120.0


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


@contextmanager
def watching(resizer: Resizer, path: Path) -> Iterator[Callable[..., tuple]]:
    """`resizer.fit` with a picture's URL, noted in the file `path` meanwhile; refuses what has ended a process."""
    blamed = read_blamed(path)
    with open(path, "w+b", buffering=0) as file:
        file.writelines(_line(url) + b"blamed\n" for url in sorted(blamed))
        end = file.tell()

        def fit(image: bytes, url: str) -> tuple:
            if url in blamed:
                raise RowError("deadline", "deadline: decoding it took too long, or ended the process")
            file.write(_line(url))
            faulthandler.dump_traceback_later(_DECODE_SECONDS, file=file, exit=True)
            try:
                return resizer.fit(image)
            finally:
                faulthandler.cancel_dump_traceback_later()
                file.truncate(end)
                file.seek(end)

        yield fit


def blame(path: Path) -> set[str]:
    """Hold what a process was decoding responsible for its end; as `read_blamed`."""
    if path.exists():
        with open(path, "ab") as file:
            file.write(b"blamed\n")
    return read_blamed(path)


def read_blamed(path: Path) -> set[str]:
    """The URLs that have ended a process of this shard."""
    blamed, url = set(), None
    for line in path.read_bytes().splitlines() if path.exists() else ():
        if line.startswith(b"["):
            url = json.loads(line)[0] if line.endswith(b"]") else None
        elif url is not None:
            blamed.add(url)
    return blamed


def _line(url: str) -> bytes:
    return json.dumps([url]).encode() + b"\n"

"""Control images: what a filter makes of a training picture, for a model that sees it beside the caption.

    canny             edges of John Canny's detector
    edges             strength of the gradient (Sobel)
    grey              brightness
    blur              the picture, out of focus
    tiles             means of squares, as in a mosaic
    super-resolution  the picture with fewer pixels, enlarged again
    inpainting        the picture with a hole, and the hole as a mask: four channels
    row               the row's second image, under the same crop (`docs/data.md`)

A filter is called with a crop, uint8 [3, H, W], and a generator of random numbers; it returns uint8 [num_channels, H,
W], 0 .. 255, and says `num_channels`. What has one channel is repeated to three, so that any picture may take its place
when the model draws. A class of one's own is the same: `package.module:Class`.
"""

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np

from ...utils.errors import ConfigError
from ...utils.machine.environment import HEADLESS_OPENCV

_SALIENCY_SIDE = 64  # pixels of the shorter side at which holes are shaped


@cache
def _cv2():
    """OpenCV, which computes in the calling thread: its own threads would not survive a fork."""
    try:
        import cv2
    except ImportError as error:
        raise ConfigError(
            f"control images need OpenCV, which cannot be imported here ({error}); pip install --force-reinstall "
            f"--no-deps {HEADLESS_OPENCV}"
        ) from error
    cv2.setNumThreads(0)
    return cv2


def _require(filter_, **rules: tuple[bool, str]) -> None:
    for name, (holds, words) in rules.items():
        if not holds:
            raise ConfigError(f"control image: {name} {getattr(filter_, name)} must be {words}")


def _last(picture: np.ndarray) -> np.ndarray:
    """[3, H, W] to [H, W, 3], as OpenCV takes it."""
    return np.ascontiguousarray(picture.transpose(1, 2, 0))


def _first(picture: np.ndarray) -> np.ndarray:
    """[H, W, 3], or [H, W] for three equal channels, to [3, H, W]."""
    return np.repeat(picture[None], 3, axis=0) if picture.ndim == 2 else picture.transpose(2, 0, 1)


def _scale(picture: np.ndarray, size: tuple[int, int], how: str) -> np.ndarray:
    """A picture [H, W, …] as one of `size`, (height, width)."""
    cv2 = _cv2()
    return cv2.resize(picture, size[::-1], interpolation=getattr(cv2, f"INTER_{how}"))


def _shrunk(picture: np.ndarray, side: int) -> np.ndarray:
    """[H, W, …] with a shorter side of `side` pixels; as it is where that is no less."""
    size = picture.shape[:2]
    if side >= min(size):
        return picture
    return _scale(picture, tuple(round(one * side / min(size)) for one in size), "AREA")


@dataclass(frozen=True)
class Canny:
    """Edges, white on black (Canny 1986). low, high: thresholds of the gradient, as `cv2.Canny` takes them. resize:
    pixels of the shorter side at which edges are looked for; 0: those of the picture."""

    low: float = 100
    high: float = 200
    resize: int = 224
    num_channels: ClassVar[int] = 3

    def __post_init__(self):
        _require(
            self,
            low=(self.low >= 0, "0 or more"),
            high=(self.high >= self.low, f"at least low, {self.low}"),
            resize=(self.resize >= 0 and self.resize == int(self.resize), "a whole number, 0 or more"),
        )

    def __call__(self, picture, generator):
        seen = _last(picture)
        seen = _shrunk(seen, int(self.resize)) if self.resize else seen
        return _first(_scale(_cv2().Canny(seen, self.low, self.high), picture.shape[1:], "NEAREST"))


@dataclass(frozen=True)
class Edges:
    """Length of the Sobel gradient of the brightness; `strength` times a quarter of it, at most 255."""

    strength: float = 1.0
    num_channels: ClassVar[int] = 3

    def __post_init__(self):
        _require(self, strength=(self.strength > 0, "above 0"))

    def __call__(self, picture, generator):
        return _first((_gradient(_last(picture)) * (self.strength / 4)).clip(0, 255).astype(np.uint8))


def _gradient(picture: np.ndarray) -> np.ndarray:
    """[H, W, 3] uint8 to the length of the Sobel gradient of its brightness, [H, W] float32."""
    cv2 = _cv2()
    light = cv2.cvtColor(picture, cv2.COLOR_RGB2GRAY)
    return np.hypot(*(cv2.Sobel(light, cv2.CV_32F, *axis) for axis in ((1, 0), (0, 1))))


@dataclass(frozen=True)
class Grey:
    """Brightness, as ITU-R BT.601 weighs the colours."""

    num_channels: ClassVar[int] = 3

    def __call__(self, picture, generator):
        cv2 = _cv2()
        return _first(cv2.cvtColor(_last(picture), cv2.COLOR_RGB2GRAY))


@dataclass(frozen=True)
class Blur:
    """Gaussian blur. sigma: in pixels."""

    sigma: float = 8.0
    num_channels: ClassVar[int] = 3

    def __post_init__(self):
        _require(self, sigma=(self.sigma > 0, "above 0"))

    def __call__(self, picture, generator):
        return _first(_cv2().GaussianBlur(_last(picture), (0, 0), self.sigma))


@dataclass(frozen=True)
class Tiles:
    """A mosaic of about squares, each of its mean colour. side: theirs, in pixels."""

    side: int = 16
    num_channels: ClassVar[int] = 3

    def __post_init__(self):
        _require(self, side=(self.side >= 1, "1 or more"))

    def __call__(self, picture, generator):
        size = picture.shape[1:]
        tiles = _scale(_last(picture), tuple(max(1, round(one / self.side)) for one in size), "AREA")
        return _first(_scale(tiles, size, "NEAREST"))


@dataclass(frozen=True)
class SuperResolution:
    """The picture at `scale` times its sides, enlarged again."""

    scale: float = 0.5
    num_channels: ClassVar[int] = 3

    def __post_init__(self):
        _require(self, scale=(0 < self.scale < 1, "above 0 and below 1"))

    def __call__(self, picture, generator):
        size = picture.shape[1:]
        small = _scale(_last(picture), tuple(max(1, round(one * self.scale)) for one in size), "AREA")
        return _first(_scale(small, size, "LINEAR"))


@dataclass(frozen=True)
class Inpainting:
    """Red, green and blue, black in the hole, and the hole, white on black.

    The hole is where there is most to see: where the gradient, blurred, of the picture seen from afar is over a share
    of its greatest value, drawn from threshold_low .. threshold_high. With probability p_outpaint it is all the rest:
    the picture is to be drawn around what there is to see.
    """

    threshold_low: float = 0.04
    threshold_high: float = 0.4
    p_outpaint: float = 0.4
    num_channels: ClassVar[int] = 4

    def __post_init__(self):
        _require(
            self,
            threshold_low=(0 <= self.threshold_low <= 1, "from 0 to 1"),
            threshold_high=(self.threshold_low <= self.threshold_high <= 1, "from threshold_low to 1"),
            p_outpaint=(0 <= self.p_outpaint <= 1, "from 0 to 1"),
        )

    def __call__(self, picture, generator):
        share, outside = generator.random(2)
        threshold = self.threshold_low + share * (self.threshold_high - self.threshold_low)
        energy = _cv2().GaussianBlur(_gradient(_shrunk(_last(picture), _SALIENCY_SIDE)), (0, 0), _SALIENCY_SIDE / 16)
        hole = _scale(energy, picture.shape[1:], "LINEAR") > threshold * energy.max()
        if outside < self.p_outpaint:
            hole = ~hole
        return with_hole(picture, hole)


def with_hole(picture: np.ndarray, hole: np.ndarray) -> np.ndarray:
    """uint8 [4, H, W] of a picture, uint8 [3, H, W], and of where it is to be drawn, bool [H, W]: the control image of
    `Inpainting`."""
    return np.concatenate([np.where(hole, np.uint8(0), picture), np.where(hole, np.uint8(255), np.uint8(0))[None]])


@dataclass(frozen=True)
class RowImage:
    """The row's second image. It is not made of the picture: the data set cuts it as it cuts that."""

    num_channels: ClassVar[int] = 3

    def __call__(self, picture, generator):
        raise ConfigError("control row is an image of its own beside the picture; name a filter that makes one of it")


FILTERS = {
    "canny": Canny,
    "edges": Edges,
    "grey": Grey,
    "blur": Blur,
    "tiles": Tiles,
    "super-resolution": SuperResolution,
    "inpainting": Inpainting,
    "row": RowImage,
}

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
W], 0 .. 255, and says `num_channels`. What has one channel is repeated to three (but for `canny,channels=1`), so that
any picture may take its place when the model draws. A class of one's own is the same: `package.module:Class`. A person
names either, and then its parameters: `canny,low=50,high=150`, `my_filters:Depth,side=224`.
"""

import importlib
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import ClassVar

import numpy as np
from PIL import Image

from ..config.option import Bounds
from ..utils.errors import ConfigError, RowError
from ..utils.machine.environment import HEADLESS_OPENCV
from ..utils.rng import Stream, make_rng
from ..utils.text import did_you_mean
from .formats.row import Row
from .images import CropRule, DrawnCrop, scale_to_cover
from .inputs import ControlFilter

_SALIENCY_SIDE = 64  # pixels of the shorter side at which holes are shaped
_HOLE_COLOUR = (230, 60, 200)
_centre = cache(partial(CropRule, fraction=1.0, random=False, enlarge=True))
_SHAPE_TOLERANCE = 0.02  # by which ratios of width to height may differ


@cache
def opencv():
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


def _last(picture: np.ndarray) -> np.ndarray:
    """[3, H, W] to [H, W, 3], as OpenCV takes it."""
    return np.ascontiguousarray(picture.transpose(1, 2, 0))


def _first(picture: np.ndarray) -> np.ndarray:
    """[H, W, 3], or [H, W] for three equal channels, to [3, H, W]."""
    return np.repeat(picture[None], 3, axis=0) if picture.ndim == 2 else picture.transpose(2, 0, 1)


def _scale(picture: np.ndarray, size: tuple[int, int], how: str) -> np.ndarray:
    """A picture [H, W, …] as one of `size`, (height, width)."""
    cv2 = opencv()
    return cv2.resize(picture, size[::-1], interpolation=getattr(cv2, f"INTER_{how}"))


def _shrunk(picture: np.ndarray, side: int) -> np.ndarray:
    """[H, W, …] with a shorter side of `side` pixels; as it is where that is no less."""
    size = picture.shape[:2]
    if side >= min(size):
        return picture
    return _scale(picture, tuple(round(one * side / min(size)) for one in size), "AREA")


class _Filter:
    """What filters share. bounds: of their parameters."""

    num_channels: ClassVar[int] = 3
    bounds: ClassVar[dict[str, Bounds]] = {}

    def __post_init__(self):
        for name, bounds in self.bounds.items():
            self._require(name, bounds.hold(getattr(self, name)), str(bounds))

    def _require(self, name: str, holds: bool, words: str) -> None:
        if not holds:
            raise ConfigError(f"control image: {name} {getattr(self, name)} must be {words}")


@dataclass(frozen=True)
class Canny(_Filter):
    """Edges (Canny 1986). low, high: thresholds of the gradient. resize: shorter side in pixels; 0: the picture's.
    channels: 1, as Stable Cascade's published control network sees them, or 3."""

    low: float = 100
    high: float = 200
    resize: int = 224
    channels: int = 3
    num_channels = property(lambda self: self.channels)  # type: ignore[assignment]
    bounds = {"low": Bounds(least=0)}

    def __post_init__(self):
        super().__post_init__()
        self._require("high", self.high >= self.low, f"at least low, {self.low}")
        self._require("channels", self.channels in (1, 3), "1 or 3")
        self._require("resize", self.resize >= 0 and self.resize == int(self.resize), "a whole number, 0 or more")

    def __call__(self, picture, generator):
        seen = _last(picture)
        seen = _shrunk(seen, int(self.resize)) if self.resize else seen
        return _first(_scale(opencv().Canny(seen, self.low, self.high), picture.shape[1:], "NEAREST"))[: self.channels]


@dataclass(frozen=True)
class Edges(_Filter):
    """Length of the Sobel gradient of the brightness; `strength` times a quarter of it, at most 255."""

    strength: float = 1.0
    bounds = {"strength": Bounds(above=0)}

    def __call__(self, picture, generator):
        return _first((_gradient(_last(picture)) * (self.strength / 4)).clip(0, 255).astype(np.uint8))


def _gradient(picture: np.ndarray) -> np.ndarray:
    """[H, W, 3] uint8 to the length of the Sobel gradient of its brightness, [H, W] float32."""
    cv2 = opencv()
    light = cv2.cvtColor(picture, cv2.COLOR_RGB2GRAY)
    return np.hypot(*(cv2.Sobel(light, cv2.CV_32F, *axis) for axis in ((1, 0), (0, 1))))


@dataclass(frozen=True)
class Grey(_Filter):
    """Brightness, as ITU-R BT.601 weighs the colours."""

    def __call__(self, picture, generator):
        cv2 = opencv()
        return _first(cv2.cvtColor(_last(picture), cv2.COLOR_RGB2GRAY))


@dataclass(frozen=True)
class Blur(_Filter):
    """Gaussian blur. sigma: in pixels."""

    sigma: float = 8.0
    bounds = {"sigma": Bounds(above=0)}

    def __call__(self, picture, generator):
        return _first(opencv().GaussianBlur(_last(picture), (0, 0), self.sigma))


@dataclass(frozen=True)
class Tiles(_Filter):
    """A mosaic of about squares, each of its mean colour. side: theirs, in pixels."""

    side: int = 16
    bounds = {"side": Bounds(least=1)}

    def __call__(self, picture, generator):
        size = picture.shape[1:]
        tiles = _scale(_last(picture), tuple(max(1, round(one / self.side)) for one in size), "AREA")
        return _first(_scale(tiles, size, "NEAREST"))


@dataclass(frozen=True)
class SuperResolution(_Filter):
    """The picture at `scale` times its sides, enlarged again."""

    scale: float = 0.5
    bounds = {"scale": Bounds(above=0, below=1)}

    def __call__(self, picture, generator):
        size = picture.shape[1:]
        small = _scale(_last(picture), tuple(max(1, round(one * self.scale)) for one in size), "AREA")
        return _first(_scale(small, size, "LINEAR"))


@dataclass(frozen=True)
class Inpainting(_Filter):
    """Red, green and blue, black in the hole, and the hole, white on black. The hole is where there is most to see:
    where the gradient, blurred, of the picture seen from afar is over a share of its greatest value, drawn from
    threshold_low .. threshold_high; or with probability p_outpaint all the rest."""

    threshold_low: float = 0.04
    threshold_high: float = 0.4
    p_outpaint: float = 0.4
    num_channels = 4
    bounds = {"threshold_low": Bounds(0, 1), "p_outpaint": Bounds(0, 1)}

    def __post_init__(self):
        super().__post_init__()
        self._require("threshold_high", self.threshold_low <= self.threshold_high <= 1, "from threshold_low to 1")

    def __call__(self, picture, generator):
        share, outside = generator.random(2)
        threshold = self.threshold_low + share * (self.threshold_high - self.threshold_low)
        energy = opencv().GaussianBlur(_gradient(_shrunk(_last(picture), _SALIENCY_SIDE)), (0, 0), _SALIENCY_SIDE / 16)
        hole = _scale(energy, picture.shape[1:], "LINEAR") > threshold * energy.max()
        if outside < self.p_outpaint:
            hole = ~hole
        return with_hole(picture, hole)


def with_hole(picture: np.ndarray, hole: np.ndarray) -> np.ndarray:
    """`Inpainting`'s image, uint8 [4, H, W], of a picture, uint8 [3, H, W], and of where to draw, bool [H, W]."""
    return np.concatenate([np.where(hole, np.uint8(0), picture), np.where(hole, np.uint8(255), np.uint8(0))[None]])


@dataclass(frozen=True)
class RowImage(_Filter):
    """The row's second image. It is not made of the picture: the data set cuts it as it cuts that."""

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


def make_filter(spec: str) -> ControlFilter:
    """The filter that `spec` names. Raises ConfigError."""
    name, *given = (word.strip() for word in spec.split(","))
    if any("=" not in word for word in given):
        raise ConfigError(f"--control {spec}: parameters are written NAME=VALUE after the filter, with commas between")
    parameters = {key.strip(): _value(text.strip()) for key, text in (word.split("=", 1) for word in given)}
    made_by = _find_class(name) if ":" in name else FILTERS.get(name)
    if made_by is None:
        raise ConfigError(f"--control: no filter {name!r}; {did_you_mean(name, FILTERS)}, or package.module:Class")
    if ":" not in name and (bad := next((key for key in parameters if key not in made_by.__match_args__), None)):
        known = ", ".join(made_by.__match_args__) or "it has none"
        raise ConfigError(f"--control {name}: no parameter {bad!r}; known: {known}")
    words = [key for key, value in parameters.items() if isinstance(value, str)]
    if ":" not in name and words:
        raise ConfigError(f"--control {name}: {words[0]} {parameters[words[0]]!r} must be a number")
    try:
        made = made_by(**parameters)
    except ConfigError:
        raise
    except Exception as error:  # of a class that we do not know
        raise ConfigError(f"--control {spec}: {type(error).__name__}: {error}; correct its parameters") from error
    channels = getattr(made, "num_channels", None)
    if not callable(made) or not isinstance(channels, int) or channels < 1:
        raise ConfigError(f"--control {name} needs num_channels, at least 1, and __call__(picture, generator)")
    return made


def apply_filter(made: ControlFilter, picture: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """The control image, uint8 [num_channels, H, W], of a picture, uint8 [3, H, W]. Raises ConfigError."""
    name = type(made).__name__
    try:
        image = made(picture, generator)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"the control filter {name} failed: {type(error).__name__}: {error}; correct it") from error
    due = (made.num_channels, *picture.shape[1:])
    if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.shape != due:
        shown = f"{image.dtype} {list(image.shape)}" if isinstance(image, np.ndarray) else type(image).__name__
        raise ConfigError(f"the control filter {name} gave {shown}; uint8 {list(due)} is due")
    return image


def _find_class(path: str):
    module, _, name = path.partition(":")
    # As `python -m` does it: a command's own folder is not the user's.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"--control {path}: {error}; give package.module:Class of a file in this folder, or of an installed package"
        ) from error


def _value(text: str) -> int | float | str:
    """The number that a text spells, else the text."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


@dataclass(frozen=True)
class Cut:
    """Where pixels come from. size: (height, width) of the picture; corner: (top, left) in the resized picture."""

    size: tuple[int, int]
    corner: tuple[int, int]
    mirrored: bool


def check_shape(second: tuple[int, int], first: tuple[int, int]) -> None:
    """Raises RowError "control" where a second image is of another shape than the first. Both (height, width)."""
    if abs(second[1] * first[0] / (second[0] * first[1]) - 1) > _SHAPE_TOLERANCE:
        sides = f"{second[1]} x {second[0]} pixels, another shape than {first[1]} x {first[0]}"
        raise RowError("control", f"the second image has {sides}")


def make_control(
    made_by: ControlFilter, row: Row, pixels: np.ndarray, cut: Cut, crops: CropRule, generator: np.random.Generator
) -> np.ndarray:
    """The control image, uint8 [num_channels, H, W], of the crop `pixels`, uint8 [3, H, W]. Raises RowError "control"
    for a row whose second image is not there or of another shape, and "image" where it is damaged."""
    from .kernels import resize_crop

    if not isinstance(made_by, RowImage):
        return apply_filter(made_by, pixels, generator)
    if not row.control:
        raise RowError("control", "the row has no second image for --control row; say layout=control of its list")
    image, (height, width) = crops.decode(row.control), cut.size
    check_shape(image.shape[:2], cut.size)
    scaled = scale_to_cover(height, width, *pixels.shape[1:], crops.fraction)  # type: ignore[call-arg]
    found, (top, left) = np.empty_like(pixels), cut.corner
    resize_crop(image, scaled, left, top, crops.interpolation, found)
    return found[:, :, ::-1] if cut.mirrored else found


@dataclass(frozen=True)
class ControlPreview:
    """Of what a filter makes of the centre of pictures, `resolution` pixels a side."""

    made_by: ControlFilter
    resolution: int
    seed: int

    def draw(self, row: Row, number: int) -> Image.Image:
        """Both, side by side, of row `number` of all. Raises RowError, ConfigError."""
        image, pixels = _centre().decode(row.image), np.empty((3, self.resolution, self.resolution), np.uint8)
        cut = Cut(image.shape[:2], _centre().cut(image, DrawnCrop(), 0, pixels), mirrored=False)
        draws = make_rng(self.seed, Stream.CONTROL, row=number)
        control = make_control(self.made_by, row, pixels, cut, _centre(), draws)
        return Image.fromarray(np.concatenate([pixels.transpose(1, 2, 0), to_picture(control)], axis=1))


def to_picture(control: np.ndarray) -> np.ndarray:
    """uint8 [channels, H, W] as a picture, [H, W, 3]: the fourth as a colour over the others, a single one in grey."""
    shown = control[np.minimum(np.arange(3), len(control) - 1)].transpose(1, 2, 0)
    if len(control) != 4:
        return shown
    return np.where(control[3][..., None] > 127, np.uint8(_HOLE_COLOUR), shown)

"""What the data layer can make of a row: a model's `inputs` are some of these by name, and it knows nothing else of it.

    Pixels                  uint8 [3, H, W]                    the crop
    Moments(C, f)           float32 [2, C, H / f, W / f]       or what a frozen autoencoder makes of it, computed ahead
    Uncached                int64 [4]                          of rows that have pixels where others have moments
    Control(filter)         uint8 [channels, H, W]             the control image of the crop, or the row's second image
    Sizes(drop)             int64 [6]                          of the row's picture, its crop and the sample
    Tokens(length)          int64 [length]                     of the caption, or of "" where it was dropped
    TextEmbeddings(L, D)    float32 [L, D]                     or what a frozen text encoder makes of it, computed ahead
    Uniform(stream)         float32 []                         in [0, 1)
    Integer(stream, below)  int64 []                           0 .. below - 1, equally often
    Level(stream, below, …) int64 []                           the same by another law (`levels`)
    KeptPatches(side, …)    int64 [K]                          the patches that are not left out, ascending
    Normals(stream, C, f)   float32 [C, H / f, W / f]          standard normal; f None: [C, 1, 1], one a channel
    Sum(first, scale, second)                                  first + scale * second; first may name another input
    Pyramid(normals, stream)                                   normals and coarser ones, of unit variance

H and W are those of the samples. A batch has pixels or moments; where some of its rows have moments, pixels are only of
those that have none, M of them, and `Uncached` says which. Without cached latents there are pixels alone, and without
cached embeddings no `TextEmbeddings`. A control image is made of pixels, with cached latents too. A draw is a function
of (seed, stream, epoch, row).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from ..utils.errors import ConfigError
from ..utils.rng import Stream, pyramid
from .levels import Level

# (stream, (epoch, row)) -> the generator of that purpose
Generators = Callable[[Stream, tuple[int, int]], np.random.Generator]


@dataclass(frozen=True)
class Pixels:
    """The crop of the row's picture."""

    dtype: ClassVar[type] = np.uint8

    def shape(self, height: int, width: int) -> tuple[int, ...]:
        """Of one sample."""
        return (3, height, width)


@dataclass(frozen=True)
class Moments:
    """Mean and standard deviation of the autoencoder's posterior of the crop, of `channels` channels, one latent for
    `factor` pixels a side; of rows without, 0."""

    channels: int
    factor: int
    dtype: ClassVar[type] = np.float32

    def shape(self, height: int, width: int) -> tuple[int, ...]:
        """Of one sample."""
        return (2, self.channels, height // self.factor, width // self.factor)


@dataclass(frozen=True)
class Uncached:
    """A row of the batch that has no moments: its place in the batch; its part, its number in that and its variant, by
    which what is made of its pixels can be kept (`data.cached.run.CachedMoments.keep`)."""

    dtype: ClassVar[type] = np.int64

    def shape(self, height: int, width: int) -> tuple[int, ...]:
        """Of one sample."""
        return (4,)


class ControlFilter(Protocol):
    """What a control image is made by; a class of one's own needs no more."""

    num_channels: int

    def __call__(self, picture: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """uint8 [3, H, W] to uint8 [num_channels, H, W]."""


@dataclass(frozen=True)
class Control:
    """What `filter` makes of the crop; of `control.filters.RowImage`, the row's second image, cut as the first is."""

    filter: ControlFilter
    dtype: ClassVar[type] = np.uint8

    def shape(self, height: int, width: int) -> tuple[int, ...]:
        """Of one sample."""
        return (self.filter.num_channels, height, width)


@dataclass(frozen=True)
class Sizes:
    """Pixels: height and width of the row's picture as its index has them, top and left of the crop in the resized
    picture before any mirroring, height and width of the sample. Six zeros where the picture's size is not known, and
    for the share `drop` of all samples."""

    drop: float = 0.0
    dtype: ClassVar[type] = np.int64

    def shape(self, height: int, width: int) -> tuple[int, ...]:
        """Of one sample."""
        return (6,)

    def forget(self, sizes: np.ndarray, keys: list, generators: Generators) -> np.ndarray:
        """`sizes` [B, 6] of samples of `keys` (epoch, row), with those dropped."""
        if self.drop:
            drawn = [generators(Stream.SIZE_DROP, key).random() for key in keys]
            sizes[np.array(drawn) < self.drop] = 0
        return sizes


@dataclass(frozen=True)
class Tokens:
    """The ids of one of the row's captions, cut or padded to `length`."""

    length: int
    dtype: ClassVar[type] = np.int64

    def shape(self, height: int, width: int) -> tuple[int, ...]:
        """Of one sample."""
        return (self.length,)


@dataclass(frozen=True)
class TextEmbeddings:
    """Hidden states of `width` for each of `length` tokens of the caption that `Tokens` are of."""

    length: int
    width: int
    dtype: ClassVar[type] = np.float32

    def shape(self, height: int, width: int) -> tuple[int, ...]:
        """Of one sample."""
        return (self.length, self.width)


@dataclass(frozen=True)
class Uniform:
    """One number."""

    stream: Stream
    dtype: ClassVar[type] = np.float32

    def shape(self, height: int, width: int) -> tuple[int, ...]:
        """Of one sample."""
        return ()

    def draw(self, keys: list, size: tuple[int, int], generators: Generators, made: dict) -> np.ndarray:
        """For each of `keys` (epoch, row)."""
        return np.array([generators(self.stream, key).random(dtype=np.float32) for key in keys], dtype=np.float32)


@dataclass(frozen=True)
class Integer:
    """One of `below` whole numbers: floor(below * u), u uniform."""

    stream: Stream
    below: int
    dtype: ClassVar[type] = np.int64

    def shape(self, height: int, width: int) -> tuple[int, ...]:
        """Of one sample."""
        return ()

    def draw(self, keys: list, size: tuple[int, int], generators: Generators, made: dict) -> np.ndarray:
        """For each of `keys` (epoch, row)."""
        return np.array([int(generators(self.stream, key).random() * self.below) for key in keys], dtype=np.int64)


@dataclass(frozen=True)
class KeptPatches:
    """The numbers, ascending, of the patches of `side` pixels a side, row by row, that are kept where the share
    `masked` of them, rounded down, is left out; any as likely as any other."""

    side: int
    masked: float
    dtype: ClassVar[type] = np.int64

    def _count(self, height: int, width: int) -> int:
        return (height // self.side) * (width // self.side)

    def shape(self, height: int, width: int) -> tuple[int, ...]:
        """Of one sample."""
        count = self._count(height, width)
        return (count - int(count * self.masked),)

    def draw(self, keys: list, size: tuple[int, int], generators: Generators, made: dict) -> np.ndarray:
        """For each of `keys` (epoch, row)."""
        (kept,), count = self.shape(*size), self._count(*size)
        orders = [generators(Stream.PATCH_MASK, key).random(count).argsort(kind="stable") for key in keys]
        return np.sort(np.array(orders, dtype=np.int64).reshape(-1, count)[:, :kept])


@dataclass(frozen=True)
class Normals:
    """Standard normal numbers on the grid of which one is `factor` pixels a side; None: one for each channel."""

    stream: Stream
    channels: int
    factor: int | None = 1
    dtype: ClassVar[type] = np.float32

    def shape(self, height: int, width: int) -> tuple[int, ...]:
        """Of one sample. Raises ConfigError where a side is not a multiple of the factor."""
        if self.factor is None:
            return (self.channels, 1, 1)
        if height % self.factor or width % self.factor:
            raise ConfigError(f"pictures of {width} x {height} pixels: the sides must be multiples of {self.factor}")
        return (self.channels, height // self.factor, width // self.factor)

    def draw(self, keys: list, size: tuple[int, int], generators: Generators, made: dict) -> np.ndarray:
        """For each of `keys` (epoch, row)."""
        from .normals import fill_normals

        normals = np.empty((len(keys), *self.shape(*size)), dtype=np.float32)
        for key, place in zip(keys, normals, strict=True):
            fill_normals(generators(self.stream, key), place)
        return normals


@dataclass(frozen=True)
class Sum:
    """`first` and `scale` times `second`, which spreads over it. `first`: the name of an input before this one, or a
    draw of its own."""

    first: "str | Normals"
    scale: float
    second: Normals
    dtype: ClassVar[type] = np.float32

    def shape(self, height: int, width: int) -> tuple[int, ...]:
        """Of one sample."""
        return (self.second if isinstance(self.first, str) else self.first).shape(height, width)

    def draw(self, keys: list, size: tuple[int, int], generators: Generators, made: dict) -> np.ndarray:
        """For each of `keys` (epoch, row); `made`: the inputs before this one."""
        named = isinstance(self.first, str)
        first = made[self.first] if named else self.first.draw(keys, size, generators, made)
        return first + np.float32(self.scale) * self.second.draw(keys, size, generators, made)


@dataclass(frozen=True)
class Pyramid:
    """`utils.rng.pyramid` of `first` and normals of `stream`."""

    first: Normals
    stream: Stream
    dtype: ClassVar[type] = np.float32

    def shape(self, height: int, width: int) -> tuple[int, ...]:
        """Of one sample."""
        return self.first.shape(height, width)

    def draw(self, keys: list, size: tuple[int, int], generators: Generators, made: dict) -> np.ndarray:
        """For each of `keys` (epoch, row)."""
        noise = self.first.draw(keys, size, generators, made)
        return np.stack([pyramid(one, generators(self.stream, key)) for key, one in zip(keys, noise, strict=True)])


Input = (
    Pixels
    | Moments
    | Uncached
    | Control
    | Sizes
    | Tokens
    | TextEmbeddings
    | Uniform
    | Integer
    | Level
    | KeptPatches
    | Normals
    | Sum
    | Pyramid
)


def count_bytes(inputs: dict[str, Input], size: tuple[int, int]) -> int:
    """The bytes of a sample's arrays."""
    return sum(math.prod(one.shape(*size)) * np.dtype(one.dtype).itemsize for one in inputs.values())

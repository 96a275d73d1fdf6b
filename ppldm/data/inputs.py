"""What the data layer can make of a row: a model's `inputs` are some of these by name, and it knows nothing else of it.

    Pixels                  uint8 [3, H, W]                    the crop
    Moments(C, f)           float32 [2, C, H / f, W / f]       or what a frozen autoencoder makes of it, computed ahead
    Uncached                int64 [4]                          of rows that have pixels where others have moments
    Control(filter)         uint8 [channels, H, W]             the control image of the crop, or the row's second image
    Sizes(drop, …)          int64 [6]                          of the row's picture, its crop and the sample
    Tokens(length)          int64 [length]                     of the caption, cut or padded, or of "" where dropped
    TextEmbeddings(L, D)    float32 [L, D]                     or what a frozen text encoder makes of it, computed ahead
    Uniform(stream)         float32 []                         in [0, 1)
    Level(stream, below, …) int64 []                           0 .. below - 1, equally often or by another law
    KeptPatches(side, …)    int64 [K]                          the patches that are not left out, ascending
    Normals(stream, C, f)   float32 [C, H / f, W / f]          standard normal; f None: [C, 1, 1], one a channel
    Sum(first, scale, second)                                  first + scale * second; first may name another input
    Pyramid(normals, stream)                                   normals and coarser ones (`utils.rng.pyramid`)

H and W are those of the samples. A batch has pixels or moments; where some of its rows have moments, pixels are only of
those that have none, and `Uncached` says which. Without cached latents there are pixels alone, and without cached
embeddings no `TextEmbeddings`. A draw is a function of (seed, stream, epoch, row).

Noise levels may be spread evenly over each global batch: sample i of the B of an update takes u = (i * stride mod B +
shift) / B, with one `shift` in [0, 1) for the update and a stride that has no divisor in common with B. Each of the B
equal parts of [0, 1) then has one sample (Kingma et al. 2021, arXiv:2107.00630, appendix I.1), and each rank's or
micro-batch's samples, which are neighbours, are spread nearly as evenly. i is the sample's place in the update, so that
ranks, micro-batches, loader processes and resuming change nothing.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from ..utils.errors import ConfigError
from ..utils.rng import Stream, pyramid

# (stream, (epoch, row)) -> the generator of that purpose
Generators = Callable[[Stream, tuple[int, int]], np.random.Generator]


class Input:
    """An array of a batch. `fixed`: the shape of one sample, where it is always the same."""

    dtype: ClassVar[type] = np.float32
    fixed: ClassVar[tuple[int, ...]] = ()

    def shape(self, height: int, width: int) -> tuple[int, ...]:
        """Of one sample. Raises ConfigError for sides that cannot be."""
        return self.fixed

    def draw(
        self, keys: list, size: tuple[int, int], generators: Generators, made: dict, strata: "Strata | None" = None
    ) -> np.ndarray:
        """For each of `keys` (epoch, row). made: the inputs before this one. strata: of their update, if any."""
        raise NotImplementedError


@dataclass(frozen=True)
class Pixels(Input):
    dtype = np.uint8

    def shape(self, height, width):
        return (3, height, width)


@dataclass(frozen=True)
class Moments(Input):
    """Mean and standard deviation of the autoencoder's posterior of the crop, `factor` pixels a side; without: 0."""

    channels: int
    factor: int

    def shape(self, height, width):
        return (2, self.channels, height // self.factor, width // self.factor)


@dataclass(frozen=True)
class Uncached(Input):
    """Of a row without moments: its place in the batch, its part, number in that and variant (`CachedMoments.keep`)."""

    dtype = np.int64
    fixed = (4,)


class ControlFilter(Protocol):
    """What a control image is made by; a class of one's own needs no more."""

    num_channels: int

    def __call__(self, picture: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """uint8 [3, H, W] to uint8 [num_channels, H, W]."""


@dataclass(frozen=True)
class Control(Input):
    """What `filter` makes of the crop; of `control.RowImage`, the row's second image, cut as the first is."""

    filter: ControlFilter
    dtype = np.uint8

    def shape(self, height, width):
        return (self.filter.num_channels, height, width)


@dataclass(frozen=True)
class Sizes(Input):
    """Pixels: height and width of the row's picture as its index has them, top and left of the crop in the resized
    picture before mirroring, or `as_seen` after it, height and width of the sample. Six zeros if unknown, and for a
    share `drop` of all."""

    drop: float = 0.0
    as_seen: bool = False
    dtype = np.int64
    fixed = (6,)

    def forget(self, sizes: np.ndarray, keys: list, generators: Generators) -> np.ndarray:
        """`sizes` [B, 6] of samples of `keys` (epoch, row), with those dropped."""
        if self.drop:
            drawn = [generators(Stream.SIZE_DROP, key).random() for key in keys]
            sizes[np.array(drawn) < self.drop] = 0
        return sizes


@dataclass(frozen=True)
class Tokens(Input):
    length: int
    dtype = np.int64
    fixed = property(lambda self: (self.length,))


@dataclass(frozen=True)
class TextEmbeddings(Input):
    length: int
    width: int
    fixed = property(lambda self: (self.length, self.width))


@dataclass(frozen=True)
class Uniform(Input):
    stream: Stream

    def draw(self, keys, size, generators, made, strata=None):
        return np.array([generators(self.stream, key).random(dtype=np.float32) for key in keys], dtype=np.float32)


@dataclass(frozen=True)
class Strata:
    """Where a micro-batch's samples stand: from place `first` on among the `size` of update `step`, counted from 0."""

    step: int
    first: int
    size: int

    def uniform(self, count: int, shift: float) -> np.ndarray:
        """[count] float64 in [0, 1)."""
        from ..methods.stratified import spread

        return spread(self.first, count, self.size, shift)


@dataclass(frozen=True)
class Level(Input):
    """One of `below` noise levels: floor(below * u), or floor(below * law(u)) by a law of `methods.levels`. u is
    uniform in [0, 1): of the sample alone, or `stratified`, where it is one of a training's."""

    stream: Stream
    below: int
    law: Callable[[np.ndarray], np.ndarray] | None = None
    stratified: bool = False
    dtype = np.int64

    def draw(self, keys, size, generators, made, strata=None):
        if self.stratified and strata:
            shift = generators(Stream.LEVEL_SHIFT, (0, strata.step)).random()
            uniform = strata.uniform(len(keys), shift)
        else:
            uniform = np.array([generators(self.stream, key).random() for key in keys])
        if self.law:
            uniform = self.law(uniform)
        return np.minimum(uniform * self.below, self.below - 1).astype(np.int64)


@dataclass(frozen=True)
class KeptPatches(Input):
    """The numbers, ascending, of the patches of `side` pixels a side, row by row, that are kept where the share
    `masked` of them, rounded down, is left out; any as likely as any other."""

    side: int
    masked: float
    stream: Stream = Stream.PATCH_MASK
    dtype = np.int64

    def shape(self, height, width):
        count = (height // self.side) * (width // self.side)
        return (count - int(count * self.masked),)

    def draw(self, keys, size, generators, made, strata=None):
        (kept,), count = self.shape(*size), (size[0] // self.side) * (size[1] // self.side)
        orders = [generators(self.stream, key).random(count).argsort(kind="stable") for key in keys]
        return np.sort(np.array(orders, dtype=np.int64).reshape(-1, count)[:, :kept])


@dataclass(frozen=True)
class Normals(Input):
    """Standard normal numbers on the grid of which one is `factor` pixels a side; None: one for each channel."""

    stream: Stream
    channels: int
    factor: int | None = 1

    def shape(self, height, width):
        if self.factor is None:
            return (self.channels, 1, 1)
        if height % self.factor or width % self.factor:
            raise ConfigError(f"pictures of {width} x {height} pixels: the sides must be multiples of {self.factor}")
        return (self.channels, height // self.factor, width // self.factor)

    def draw(self, keys, size, generators, made, strata=None):
        from .kernels import fill_normals

        normals = np.empty((len(keys), *self.shape(*size)), dtype=np.float32)
        for key, place in zip(keys, normals, strict=True):
            fill_normals(generators(self.stream, key), place)
        return normals


@dataclass(frozen=True)
class Sum(Input):
    """`first` and `scale` times `second`, which spreads over it. `first`: an earlier input's name, or a draw."""

    first: "str | Normals"
    scale: float
    second: Normals

    def shape(self, height, width):
        return (self.second if isinstance(self.first, str) else self.first).shape(height, width)

    def draw(self, keys, size, generators, made, strata=None):
        named = isinstance(self.first, str)
        first = made[self.first] if named else self.first.draw(keys, size, generators, made)
        return first + np.float32(self.scale) * self.second.draw(keys, size, generators, made)


@dataclass(frozen=True)
class Pyramid(Input):
    first: Normals
    stream: Stream

    def shape(self, height, width):
        return self.first.shape(height, width)

    def draw(self, keys, size, generators, made, strata=None):
        noise = self.first.draw(keys, size, generators, made)
        return np.stack([pyramid(one, generators(self.stream, key)) for key, one in zip(keys, noise, strict=True)])


def count_bytes(inputs: dict[str, Input], size: tuple[int, int]) -> int:
    """The bytes of a sample's arrays."""
    return sum(math.prod(one.shape(*size)) * np.dtype(one.dtype).itemsize for one in inputs.values())

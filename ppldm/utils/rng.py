"""Random numbers as a function of what they are for: no global state, so none to save.

The generator is numpy's Philox4x64-10, counter based. Its key is (seed, stream); its counter starts at
(0, 0, row, epoch), low word first, so that each (seed, stream, epoch, row) has 2**128 blocks of its own. A stream is a
purpose: adding a new one never changes what another draws.
"""

from enum import IntEnum

import numpy as np

MAX_SEED = 2**64 - 1
_PYRAMID_LEVELS, _LARGEST_COARSE = 10, 16


class Stream(IntEnum):
    """What the numbers are for. The values are part of the format of a run: append, never renumber."""

    ORDER = 0
    CROP = 1
    FLIP = 2
    CAPTION_DROP = 3
    TIMESTEP = 4
    NOISE = 5
    POSTERIOR = 6
    MIX = 7
    INIT = 8
    SAMPLE = 9
    NOISE_OFFSET = 10
    CAPTION_CHOICE = 11
    INPUT_PERTURBATION = 12
    DROPOUT = 13
    CROP_CHOICE = 14
    CAPTION_TAGS = 15
    CAPTION_WILDCARD = 16
    CAPTION_TAG_DROP = 17
    SIZE_DROP = 18
    CROP_PLACE = 19
    GROUP = 20
    EVALUATION = 21
    SHAPES_WORLD = 24
    LEVEL_SHIFT = 25
    CONTROL = 28
    EFFNET_DROP = 43
    PYRAMID = 44
    CLIP_IMAGE = 45
    EFFNET_RESIZE = 46
    PATCH_MASK = 47
    SAMPLE_DECODER = 58
    PROMPT_WILDCARD = 60
    ROUTE = 61
    GUIDANCE = 70
    SHAPE = 71


class _NoSeed(np.random.bit_generator.ISeedSequence):
    """Without a seed Philox asks the operating system for one, which takes longer than all that follows."""

    def generate_state(self, n_words, dtype=np.uint32):
        return np.zeros(n_words, dtype)


_NO_SEED = _NoSeed()


def make_rng(seed: int, stream: Stream, epoch: int = 0, row: int = 0) -> np.random.Generator:
    """The generator of (seed, stream, epoch, row), each an integer in [0, 2**64)."""
    philox = np.random.Philox(_NO_SEED)
    philox.state = _first_state(seed, stream, epoch, row)
    return np.random.Generator(philox)


class Generators:
    """`make_rng` of one seed for loops that draw little from many keys, in a fifth of its time. A stream's generator is
    one object, valid until the stream is asked for again. One thread."""

    def __init__(self, seed: int):
        self._seed, self._of_streams = seed, {}

    def __call__(self, stream: Stream, key: tuple[int, int]) -> np.random.Generator:
        """The generator of (epoch, row), at its beginning."""
        if (generator := self._of_streams.get(stream)) is None:
            generator = self._of_streams[stream] = make_rng(self._seed, stream)
        generator.bit_generator.state = _first_state(self._seed, stream, *key)
        return generator


def _first_state(seed: int, stream: Stream, epoch: int, row: int) -> dict:
    # Lists and not arrays, which numpy takes several times as long to read.
    return {
        "bit_generator": "Philox",
        "state": {"counter": [0, 0, row, epoch], "key": [seed, int(stream)]},
        "buffer": [0, 0, 0, 0],
        "buffer_pos": 4,  # used up
        "has_uint32": 0,
        "uinteger": 0,
    }


def pyramid(normals: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """`normals` [C, h, w] float32 and coarser ones of `generator`, of unit variance together, as the published trainer
    of Stable Cascade's stage B makes its noise: grids of half the sides, a quarter and so on, each enlarged by
    repetition and 0.75 times the one before, of those only that are from 1 to 16 a side."""
    height, width = normals.shape[1:]
    sides = [(0.75**level, height >> level, width >> level) for level in range(1, _PYRAMID_LEVELS)]
    grids = [(weight, h, w) for weight, h, w in sides if h and w and min(h, w) <= _LARGEST_COARSE]
    noise = normals.copy()
    for weight, h, w in grids:
        coarse = generator.standard_normal((len(normals), h, w), dtype=np.float32)
        rows, columns = np.arange(height) * h // height, np.arange(width) * w // width
        noise += np.float32(weight) * coarse[:, rows[:, None], columns]
    return noise / np.float32(sum([weight**2 for weight, *_ in grids], 1.0) ** 0.5)

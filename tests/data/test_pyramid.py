"""Noise of stage B: a function of (seed, epoch, row), of unit variance, as the published trainer adds it up."""

from functools import partial

import numpy as np
import pytest

from ppldm.data.inputs import Normals, Pyramid
from ppldm.utils.rng import Generators, Stream, make_rng

FIRST = Normals(Stream.NOISE, 4, 4)
PYRAMID = Pyramid(FIRST, Stream.PYRAMID)
draw = partial(PYRAMID.draw, generators=Generators(5), made={})


@pytest.mark.needs("parity")
@pytest.mark.parametrize("side", [4, 24, 64, 252, 256, 1024])
def test_it_is_the_published_sum_of_the_same_normals(side):
    import torch

    key = (1, 7)
    noise = torch.as_tensor(FIRST.draw([key], (side, side), Generators(5), {}).astype(np.float64))
    rng, weights = make_rng(5, Stream.PYRAMID, *key), [1.0]
    for level in range(1, 10):
        own = noise.shape[-1] // 2**level
        if 1 <= own <= 16:
            coarse = torch.as_tensor(rng.standard_normal((1, 4, own, own), dtype=np.float32).astype(np.float64))
            noise = noise + torch.nn.functional.interpolate(coarse, size=noise.shape[-2:], mode="nearest") * 0.75**level
            weights.append(0.75**level)
        if own <= 1:
            break
    noise /= sum(one**2 for one in weights) ** 0.5
    np.testing.assert_allclose(draw([key], (side, side)), noise.numpy(), atol=1e-6)


@pytest.mark.parametrize("size", [(32, 32), (96, 32), (64, 160)])
def test_each_sample_is_its_own(size):
    keys = [(0, 1), (0, 2), (1, 1)]
    together = draw(keys, size)
    assert together.shape == (3, *PYRAMID.shape(*size)) and together.dtype == np.float32
    for number, key in enumerate(keys):
        assert (draw([key], size)[0] == together[number]).all()
    assert len({one.tobytes() for one in together}) == 3


def test_its_variance_is_one():
    noise = draw([(0, row) for row in range(400)], (64, 64))
    assert abs(noise.mean()) < 0.02 and abs(noise.var() - 1) < 0.03

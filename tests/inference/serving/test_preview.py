"""Previews: exact where the decoder is linear in the colours, whatever the size of the latents; close to a real one."""

import numpy as np
import pytest

from ppldm.inference.serving.paint import Preview


@pytest.fixture
def rng():
    """The same numbers in every test, whichever were played before it."""
    return np.random.default_rng(3)


def linear(factor, matrix, offset):
    """A decoder that paints each place of the latents with one colour."""

    def decode(latents):
        colours = np.einsum("bchw,ck->bhwk", latents, matrix) + offset
        return np.rint(colours).clip(0, 255).astype(np.uint8).repeat(factor, axis=1).repeat(factor, axis=2)

    return decode


@pytest.mark.parametrize("channels", [3, 4, 16])
@pytest.mark.parametrize("factor", [4, 8])
@pytest.mark.parametrize("scale", [1.0, 14.6, 0.1])
def test_it_is_what_a_linear_decoder_makes(rng, channels, factor, scale):
    decode = linear(factor, rng.normal(0, 6 / np.sqrt(channels), (channels, 3)), np.array([100, 128, 150]))
    latents = rng.standard_normal((2, channels, 5, 7)).astype(np.float32)
    latents /= latents.std(axis=(1, 2, 3), keepdims=True)
    shown = Preview(decode, channels)(latents * scale)
    assert shown.shape == (10, 28, 3) and shown.dtype == np.uint8
    truth = np.concatenate(list(decode(latents)[:, :: factor // 2, :: factor // 2]), axis=1)
    assert np.abs(shown.astype(int) - truth).max() <= 1


@pytest.mark.parametrize(
    "latents", [np.zeros((1, 4, 2, 2)), np.full((1, 4, 2, 2), np.nan), np.full((1, 4, 2, 2), 1e30)]
)
def test_latents_that_are_none_are_shown_as_something(latents):
    assert Preview(linear(8, np.ones((4, 3)), 100), 4)(latents).shape == (4, 4, 3)


def blurred(latents):
    """A decoder whose colours are those of a place and its neighbours, each a quarter darker or lighter by its side."""
    padded = np.pad(latents, ((0, 0), (0, 0), (1, 1), (1, 1)), mode="edge")
    height, width = latents.shape[2:]
    near = sum(padded[:, :3, top : top + height, left : left + width] for top in range(3) for left in range(3)) / 9
    colours = np.moveaxis(60 * near + 128, 1, -1).repeat(4, axis=1).repeat(4, axis=2)
    colours[:, 2::4] += 20
    colours[:, 3::4] += 20
    return np.rint(colours).clip(0, 255).astype(np.uint8)


def test_it_sees_the_neighbours_and_the_quarters_of_a_place(rng):
    latents = rng.standard_normal((2, 4, 6, 6)).astype(np.float32)
    latents /= latents.std(axis=(1, 2, 3), keepdims=True)
    shown = Preview(blurred, 4)(latents)
    truth = np.concatenate(list(blurred(latents)[:, ::2, ::2]), axis=1)
    assert np.abs(shown.astype(int) - truth).max() <= 2  # both round


def test_latents_of_an_odd_factor_have_one_colour_each():
    assert Preview(linear(3, np.ones((4, 3)), 100), 4)(np.zeros((1, 4, 2, 2), np.float32)).shape == (2, 2, 3)

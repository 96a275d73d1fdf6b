"""A noise that is constant over each channel besides: pictures as a whole become brighter or darker; 0.1 is common.

    noise + o n, one normal number n a channel

crosslabs.org/blog/diffusion-with-offset-noise Published: no figure."""

from ...data.inputs import Sum
from ...utils.rng import Stream


def add(inputs: dict, strength: float, normals) -> dict:
    return inputs | {"noise": Sum(inputs["noise"], strength, normals(Stream.NOISE_OFFSET, factor=None))}

"""The noise that a picture starts from."""

from ppldm.diffusion.guided import noises


def initial_noise(seed: int, prompt: str, index: int, shape: tuple[int, int, int]):
    """The noise [C, h, w] float32 that picture `index` of `prompt` starts from: the first of `noises`."""
    return next(noises(seed, prompt, index, shape))

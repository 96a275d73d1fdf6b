"""The picture itself, for few, large steps.

    x_0

Ho et al. 2020 (arXiv:2006.11239, section 3.2). Published: no figure of it alone."""


def target(latents, noise, scales):
    return latents


def picture(predicted, noisy, scales):
    return predicted

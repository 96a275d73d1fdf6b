"""The noise, as the published model and Stable Diffusion 1 predict it.

    noise

Ho et al. 2020 (DDPM, arXiv:2006.11239). Published: the published model's objective, without a figure."""


def target(latents, noise, scales):
    return noise


def picture(predicted, noisy, scales):
    return (noisy - scales[1] * predicted) / scales[0]

"""The velocity, as Stable Diffusion 2 predicts it.

    a noise - s x_0

Salimans and Ho 2022 (arXiv:2202.00512, appendix D).
Published: steadier with few sampling steps, distilled with it FID 3.0 on CIFAR-10 in 4 steps (abstract)."""


def target(latents, noise, scales):
    return scales[0] * noise - scales[1] * latents


def picture(predicted, noisy, scales):
    return scales[0] * noisy - scales[1] * predicted

"""The direction of straight lines, as Stable Diffusion 3 predicts it; few steps.

    noise - x_0, of x_t = (1 - sigma) x_0 + sigma noise, with sigma = (t + 1) / 1000

Liu et al. 2022 (rectified flow, arXiv:2209.03003); Esser et al. 2024 (arXiv:2403.03206).
Published: better than the usual diffusion objectives in a large study, with levels like `logit_normal` (abstract,
without a figure)."""


def target(latents, noise, scales):
    return noise - latents


def picture(predicted, noisy, scales):
    return noisy - scales[1] * predicted

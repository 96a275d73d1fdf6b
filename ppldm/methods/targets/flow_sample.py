"""The picture, judged by the direction that follows from it: for patches of more numbers than the network is wide.

    (x_t - x_0) / sigma, of the x_0 that the network gives and of the true one, sigma at least 0.05

x-prediction with the v-loss: Li and He 2025 (arXiv:2511.13720). x_t is as of `flow`.
Published: no figure is quoted here."""

_LEAST_SIGMA = 0.05  # that a direction is divided by, as published


def target(latents, noise, scales):
    return (noise - latents) * (scales[1] / _divisor(scales[1]))


def prediction(output, noisy, sigma):
    return (noisy - output) / _divisor(sigma)


def picture(predicted, noisy, scales):
    return noisy - predicted * _divisor(scales[1])


def _divisor(sigma):
    """Of a number or a tensor."""
    return sigma.clip(_LEAST_SIGMA) if hasattr(sigma, "clip") else max(sigma, _LEAST_SIGMA)

"""What a model knows of held-out rows, in one currency for every target, schedule and weight of the loss.

The network sees x_t = a x_0 + s noise of held-out rows at fixed log-SNR (`LOG_SNR`), each row from the same noise
whatever the training was; what it predicts is turned into x_0 (Kingma et al. 2021, arXiv:2107.00630, section 3.1: at
one log-SNR all targets tell the same). The error of x_0 by log-SNR is the curve; the loss is the mean over the curve of
(1 + SNR) times the error, which is the error of the velocity (Salimans and Ho 2022, arXiv:2202.00512, appendix D) and
is of about the same size at every level.
"""

import numpy as np
import paddle

from ppldm.utils.processes.ranks import World

LOG_SNR = np.linspace(-5.0, 5.0, 6)
ROWS = 128


def weighted_mean(curve: np.ndarray) -> float:
    """The loss of errors of x_0 at `LOG_SNR`."""
    return float(np.mean((1.0 + np.exp(LOG_SNR)) * curve))


def scales_at(log_snr: float, is_flow: bool) -> tuple[float, float]:
    """(a, s) of x_t = a x_0 + s noise: their squares sum to 1, or of flow they do."""
    if is_flow:
        sigma = 1.0 / (1.0 + np.exp(log_snr / 2.0))
        return 1.0 - sigma, sigma
    return (1.0 / (1.0 + np.exp(-log_snr))) ** 0.5, (1.0 / (1.0 + np.exp(log_snr))) ** 0.5


def time_at(process, log_snr: float) -> float:
    """What the network is told of this level: between two timesteps, where it lies there."""
    if process.is_flow:
        return scales_at(log_snr, True)[1] * process.num_levels
    levels = process.schedule.log_snr()
    finite = np.isfinite(levels)
    return float(np.interp(-log_snr, -levels[finite], np.flatnonzero(finite)))


@paddle.no_grad()
def curve_of(model, batches: list[dict]) -> np.ndarray:
    """The mean squared error of x_0 at each of `LOG_SNR`, float64, over the rows of `batches` (`held_out_batches`)."""
    errors = np.zeros(len(LOG_SNR))
    process, rows = model.process, sum(len(batch["latents"]) for batch in batches)
    for batch in batches:
        latents, noise = batch["latents"], batch["noise"]
        condition = model.condition(batch["input_ids"])
        for number, log_snr in enumerate(LOG_SNR.tolist()):
            scales = scales_at(log_snr, process.is_flow)
            noisy = scales[0] * latents + scales[1] * noise
            time = paddle.full([1], time_at(process, log_snr), "float32")
            output = process.prediction(model.denoise(noisy, time, **condition), noisy, scales[1])
            found = process.picture(output, noisy, scales)
            errors[number] += float((found - latents).square().mean()) * len(latents) / rows
    return errors


def held_out_batches(model, held_out) -> list[dict]:
    """Latents (the posterior's means, scaled), tokens and noise of the rows of a `training.validation.HeldOut`."""
    found = []
    for number, batch in held_out.batches(World.detect()):
        given = {name: batch[name] for name in ("pixel_values", "moments", "uncached") if name in batch}
        latents = model.latents(paddle.zeros([1]), **given)
        noise = np.random.default_rng([7, number]).standard_normal(latents.shape, dtype=np.float32)
        found.append({"latents": latents, "input_ids": batch["input_ids"], "noise": paddle.to_tensor(noise)})
    return found

"""Learned weights: the error of each level counts alike.

    1 / (running mean of the error in the level's bucket): 300 buckets of log-SNR from -10 to 10, decay 0.99

Each mean begins at 1 and changes at an update that has such samples, by those of all ranks, however it is cut into
micro-batches. Published: Stable Cascade's trainer has it, without a figure."""

from dataclasses import dataclass

import numpy as np
import paddle
from paddle import nn

from ...diffusion.process import Process, log_snr


class LevelErrors(nn.Layer):
    """Running means of the squared error, one for each bucket of noise levels; saved as a weight is."""

    def __init__(self, process: Process):
        super().__init__()
        self.weighting, self.num_levels = process.weighting, process.num_levels
        self._buckets = self.weighting.buckets(*process.powers())
        self.register_buffer("bucket_of_level", paddle.to_tensor(self._buckets), persistable=False)
        self.register_buffer("errors", paddle.ones([self.weighting.num_buckets]))

    def weights(self, timesteps):
        """1 / (the mean error at such levels), [B] float32."""
        return (1.0 / self.errors[self.bucket_of_level[timesteps]]).clip(*self.weighting.weight_range)

    def sums(self, losses: list):
        """[2 buckets] float32 of this rank's samples: the sum of their errors by bucket, and how many they are."""
        sums = np.zeros((2, self.weighting.num_buckets))
        for loss in losses:
            timesteps = np.rint(loss.noise_level.numpy().astype(np.float64) * self.num_levels).astype(np.int64)
            buckets = self._buckets[timesteps]
            np.add.at(sums[0], buckets, loss.per_sample.numpy().astype(np.float64))
            np.add.at(sums[1], buckets, 1.0)
        return paddle.to_tensor(sums.ravel(), dtype="float32")

    @paddle.no_grad()
    def update(self, sums) -> None:
        """Take the sums of all ranks' samples into the means of the buckets that have any."""
        errors, counts = sums.reshape([2, -1])
        decay = self.weighting.decay
        learned = decay * self.errors + (1.0 - decay) * errors / counts.clip(1.0)
        self.errors.set_value(paddle.where(counts > 0, learned, self.errors))


@dataclass(frozen=True)
class Adaptive:
    learned = LevelErrors
    decay: float = 0.99
    num_buckets: int = 300
    log_snr_range: tuple[float, float] = (-10.0, 10.0)
    weight_range: tuple[float, float] = (1e-7, 1e7)

    def buckets(self, signal: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """The bucket of each level, int64; the first and the last have all that is beyond the range."""
        return np.searchsorted(np.linspace(*self.log_snr_range, self.num_buckets - 1), log_snr(signal, noise))


METHOD = Adaptive

"""What a model has learned of its errors by noise level, from which `diffusion.weighting.Adaptive` weights its loss."""

import numpy as np
import paddle
from paddle import nn

from ..diffusion.process import Process
from .model import Loss


class LevelErrors(nn.Layer):
    """Running means of the squared error, one for each bucket of noise levels; saved as a weight is.

    They change once an update, by sums over the samples of all ranks, so that all have the same, and none of an
    update's weights depends on how it is cut into micro-batches.
    """

    def __init__(self, process: Process):
        super().__init__()
        self.weighting, self.num_levels = process.weighting, process.num_levels
        self._buckets = self.weighting.buckets(*process.powers())
        self.register_buffer("bucket_of_level", paddle.to_tensor(self._buckets), persistable=False)
        self.register_buffer("errors", paddle.ones([self.weighting.num_buckets]))

    def weights(self, timesteps):
        """1 / (the mean error at such levels), [B] float32."""
        return (1.0 / self.errors[self.bucket_of_level[timesteps]]).clip(*self.weighting.weight_range)

    def sums(self, losses: list[Loss]):
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

"""Contrastive flow matching: a prediction is to be far from the target of another picture.

    loss - weight * E |prediction - target of another row and another noise|^2

Stoica et al. 2025 (arXiv:2506.05350), who take one other sample of the batch; published: training up to 9
times faster, FID lower by up to 8.9 on ImageNet. Here the expectation over all rows and noises is taken as a whole: it
differs from |prediction - mean target|^2 by a constant, and of the mean target only the mean latents, by channel, are
not known. So the term has no noise of its own, and does not depend on how a batch is cut. The mean is a running one
over updates, of all ranks, and a part of a checkpoint.
"""

from dataclasses import dataclass

from .base import Method

_KEPT = 0.99  # of the running mean, at an update


@dataclass(frozen=True)
class ContrastiveFlow(Method):
    """weight: of the term, as published."""

    weight: float = 0.05

    def problem(self, config):
        # At 1 nothing is learned any more, and above it predictions grow without end.
        return None if 0 < self.weight < 1 else f"weight {self.weight:g} must be above 0 and below 1"

    def attach(self, model, seed):
        import paddle

        model.register_buffer("contrastive_mean", paddle.zeros([model.vae.config.latent_channels]))
        model.register_buffer("contrastive_updates", paddle.zeros([1]))
        return {}

    def term(self, model, step):
        import paddle

        mean = model.contrastive_mean.reshape([1, -1, 1, 1]).expand_as(step.latents)
        other = step.seen(model.process.target(mean, paddle.zeros_like(mean), step.scales))
        return -self.weight * (step.predicted - other).square().mean()

    def num_sums(self, model):
        return model.vae.config.latent_channels + 1

    def sums(self, model, step):
        import paddle

        by_channel = step.latents.sum([0, 2, 3])
        return paddle.concat([by_channel, paddle.full([1], step.latents.size / len(by_channel))]).astype("float32")

    def keep(self, model, sums):
        count = model.contrastive_updates
        kept = (count / (count + 1)).clip(max=_KEPT)  # an even mean at first
        model.contrastive_mean.set_value(kept * model.contrastive_mean + (1 - kept) * sums[:-1] / sums[-1])
        count.set_value(count + 1)


METHOD = ContrastiveFlow

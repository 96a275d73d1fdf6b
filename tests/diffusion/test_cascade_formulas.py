"""Stable Cascade's process against its published formulas, written here in PyTorch from log-SNR on, in float64."""

import needs
import numpy as np
import paddle
import pytest

from ppldm.diffusion.process import NoiseSchedule, Process
from ppldm.methods.averages.ema_interval import IntervalDecay
from ppldm.methods.weights.adaptive import Adaptive
from ppldm.methods.weights.p2 import P2
from ppldm.networks.build import build_network
from ppldm.networks.configs import read_new_config
from ppldm.networks.denoising import DenoisingModel
from ppldm.networks.ema import ExponentialMovingAverage

needs.need("parity")

import torch  # noqa: E402

COSINE = NoiseSchedule(beta_schedule="cosine")
TIMESTEPS = np.array([0, 1, 5, 9, 250, 500, 777, 990, 998, 999])
T = (torch.as_tensor(TIMESTEPS, dtype=torch.float64) + 1) / 1000  # of the published t in 0.001 .. 1
S = 0.008
FIRST = torch.cos(torch.tensor(S / (1 + S) * torch.pi * 0.5, dtype=torch.float64)) ** 2


def published_log_snr(t):
    variance = torch.cos((S + t) / (1 + S) * torch.pi * 0.5).clamp(0, 1) ** 2 / FIRST
    variance = variance.clamp(0.0001, 0.9999)
    return (variance / (1 - variance)).log()


def published_ratio(log_snr):
    return ((log_snr.sigmoid().clamp(0, 1) * FIRST) ** 0.5).acos() / (torch.pi * 0.5) * (1 + S) - S


def published_scales(log_snr):
    a = log_snr.sigmoid() ** 0.5
    return a, (1 - a**2) ** 0.5


class PublishedAdaptive:
    def __init__(self):
        self.ranges, self.losses = torch.linspace(-10, 10, 299), torch.ones(300, dtype=torch.float64)

    def bucket(self, log_snr):
        return torch.searchsorted(self.ranges, log_snr.float())

    def weights(self, log_snr):
        return (1 / self.losses[self.bucket(log_snr)]).clamp(1e-7, 1e7)

    def update(self, log_snr, loss):
        one = self.bucket(log_snr)
        self.losses[one] = self.losses[one] * 0.99 + loss * 0.01


class Identity(DenoisingModel):
    """Predicts what it sees."""

    networks = {}

    def forward(self, latents, timesteps, noise):
        return self.denoising_loss(lambda noisy, level: noisy * 0.5, latents, timesteps, noise)


def test_what_the_network_is_told():
    found = COSINE.ratios()
    np.testing.assert_allclose(found[TIMESTEPS], published_ratio(published_log_snr(T)).numpy(), atol=1e-6)
    # The schedule keeps some noise and some signal: its ends are not told apart from those.
    np.testing.assert_allclose(found[20:980], np.arange(21, 981) / 1000, atol=1e-6)


@pytest.mark.parametrize("schedule", [NoiseSchedule(), NoiseSchedule(beta_schedule="cosine", timestep_shift=2.0)])
def test_any_schedule_tells_the_ratio_of_its_log_snr(schedule):
    expected = published_ratio(torch.as_tensor(schedule.log_snr()))
    np.testing.assert_allclose(schedule.ratios(), expected.numpy(), atol=1e-5)


@pytest.mark.parametrize("weighting", [None, P2(), Adaptive()])
def test_noising_target_and_loss(weighting):
    rng = np.random.default_rng(0)
    latents, noise = rng.standard_normal((2, len(T), 16, 3, 3)).astype(np.float32)
    model, adaptive = Identity(Process(COSINE, "epsilon", weighting)), PublishedAdaptive()
    inputs = [paddle.to_tensor(one) for one in (latents, TIMESTEPS, noise)]
    log_snr = published_log_snr(T)
    a, b = (one.reshape(-1, 1, 1, 1) for one in published_scales(log_snr))
    noisy = torch.as_tensor(latents) * a + torch.as_tensor(noise) * b
    errors = ((0.5 * noisy - torch.as_tensor(noise)) ** 2).mean(dim=[1, 2, 3])
    for _ in range(3):
        weights = (1 + log_snr.exp()) ** -1 if weighting == P2() else torch.ones(len(T))
        weights = adaptive.weights(log_snr) if weighting == Adaptive() else weights
        loss = model(*inputs)
        np.testing.assert_allclose(loss.value.item(), (errors * weights).mean().item(), rtol=1e-6)
        np.testing.assert_allclose(loss.per_sample.numpy(), errors.numpy(), rtol=1e-6)
        if weighting == Adaptive():
            for number in range(len(T)):  # one at a time: of several in a bucket the published one takes the last
                sample = (one[number : number + 1] if one.ndim else one for one in loss[:3])
                sums = model.level_errors.sums([type(loss)(*sample)])
                model.keep_statistics(sums)
                adaptive.update(log_snr[number : number + 1], errors[number : number + 1])
            np.testing.assert_allclose(model.level_errors.errors.numpy(), adaptive.losses.numpy(), rtol=1e-6)


@pytest.mark.parametrize("kind, name", [("cascade_prior", "cascade_c"), ("cascade_decoder", "cascade_b")])
def test_the_average_is_a_copy_and_then_a_mean_of_parameters_and_buffers(tiny, kind, name):
    """Every `iters` iterations, with a factor of 0 up to `start_iters`; the networks have nothing but parameters."""
    start, every, beta = 4, 2, 0.9
    network = build_network(kind, read_new_config(kind, tiny.config(name), ""), 0)
    weights = {key: torch.as_tensor(value.numpy()) for key, value in network.state_dict().items()}
    assert weights.keys() == dict(network.named_parameters()).keys() and not [*network.named_buffers()]
    published = {key: value.clone() for key, value in weights.items()}
    ours = ExponentialMovingAverage(dict(network.named_parameters()), IntervalDecay(start, every, beta))
    generator = torch.Generator().manual_seed(0)
    for i in range(1, 10):
        weights = {key: value + 0.1 * torch.randn(value.shape, generator=generator) for key, value in weights.items()}
        if i % every == 0:
            factor = beta if i > start else 0
            published = {key: one * factor + weights[key].clone() * (1 - factor) for key, one in published.items()}
        for key, parameter in network.named_parameters():
            parameter.set_value(weights[key].numpy())
        ours.update({})
        for key, one in published.items():
            np.testing.assert_allclose(ours.shadow[key].numpy(), one.numpy(), atol=1e-6, err_msg=f"{i} {key}")
    assert max((one - weights[key]).abs().max().item() for key, one in published.items()) > 0.1

"""The autoencoder's objective and measures against their formulas."""

import numpy as np
import paddle
import pytest

from ppldm.families.autoencoder import AutoencoderConfig
from ppldm.networks.autoencoder import AutoencoderObjective, latent_statistics, psnr
from ppldm.networks.model import to_unit_range
from ppldm.weights.fill import load_vae


@pytest.fixture
def batch():
    rng = np.random.default_rng(0)
    pixels = paddle.to_tensor(rng.integers(0, 256, (3, 3, 32, 32), dtype=np.uint8))
    return pixels, paddle.to_tensor(rng.standard_normal((3, 4, 4, 4), dtype=np.float32))


@pytest.mark.parametrize("kind, powers", [("l1", [1]), ("mse", [2]), ("l1_mse", [1, 2])])
@pytest.mark.parametrize("kl_weight", [0.0, 0.05])
def test_objective(tiny, batch, kind, powers, kl_weight):
    vae = load_vae(tiny.vae)
    pixels, noise = batch
    config = AutoencoderConfig(reconstruction_loss=kind, kl_weight=kl_weight)
    loss = float(AutoencoderObjective(vae, config)(pixels, noise).value)
    posterior = vae.encode(to_unit_range(pixels)).latent_dist
    decoded = vae.decode(posterior.mean + posterior.std * noise).sample.numpy()
    error = sum(np.mean(np.abs(decoded - to_unit_range(pixels).numpy()) ** power) for power in powers)
    mean, var = posterior.mean.numpy().astype(np.float64), posterior.var.numpy().astype(np.float64)
    kl = 0.5 * np.sum(mean**2 + var - 1 - np.log(var))
    assert loss == pytest.approx(error + kl_weight * kl / pixels.size, rel=1e-4)


def test_psnr():
    pixels = paddle.to_tensor(np.full((1, 3, 2, 2), 255, dtype=np.uint8))
    # An error of 1 in a range of 2 is 20 log10(2 / 1) dB.
    assert psnr(pixels, paddle.zeros([1, 3, 2, 2])) == pytest.approx(20 * np.log10(2))


def test_scaled_latents_have_unit_deviation(tiny, batch):
    vae = load_vae(tiny.vae)
    statistics = latent_statistics([AutoencoderObjective(vae, AutoencoderConfig()).latents(*batch)])
    posterior = vae.encode(to_unit_range(batch[0])).latent_dist
    latents = (posterior.mean + posterior.std * batch[1]).numpy()
    assert np.std(latents / statistics["latent_std"]) == pytest.approx(1, rel=1e-5)
    np.testing.assert_allclose(statistics["latent_channel_means"], latents.mean(axis=(0, 2, 3)), atol=1e-4)
    assert statistics["pictures"] == 3

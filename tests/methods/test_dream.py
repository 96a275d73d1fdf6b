"""DREAM: what a network sees and predicts is made of a noise that keeps a part of its own error."""

from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from needs import need
from tiny_model import make_model

from ppldm.diffusion.process import add_noise
from ppldm.families.ldm import LdmConfig
from ppldm.methods.base import attach_methods, read_methods
from ppldm.utils.errors import ConfigError

KINDS = ["epsilon", "v_prediction", "sample", "flow", "flow_sample"]


def changed(tiny, kind, detail, seed=0):
    """(model, what its loss is told, the noise that DREAM makes, how often the network was asked) where the network
    says of every picture that it is `said`."""
    model = make_model(tiny, prediction_type=kind)
    attach_methods(model, read_methods([f"dream:detail={detail}"], LdmConfig()), seed=3)
    model.train()
    rng, asked = np.random.default_rng(seed), []
    latents, noise, said = (paddle.to_tensor(rng.standard_normal((4, 4, 4, 4), np.float32)) for _ in range(3))
    timesteps = paddle.to_tensor([0, 300, 700, 999])
    scales = model.process.scales(model.levels[timesteps].reshape([-1, 1, 1, 1]))

    def predict(noisy, level):
        asked.append(noisy)
        if kind == "flow_sample":
            return said
        return model.process.target(said, (noisy - scales[0] * said) / scales[1], scales)

    loss = model.denoising_loss(predict, latents, timesteps, noise)
    return latents, noise, said, scales, asked, loss


@pytest.mark.parametrize("detail", [0, 1, 2.5])
@pytest.mark.parametrize("kind", KINDS)
def test_a_share_of_the_error_is_kept_whatever_is_predicted(tiny, kind, detail):
    latents, noise, said, (signal, share), asked, _ = changed(tiny, kind, detail)
    first, second = (one.numpy() for one in asked)
    assert np.allclose(first, add_noise(latents, noise, (signal, share)).numpy(), atol=1e-6)
    error = signal * (said - latents) / share  # of the noise that the network's picture leaves
    expected = add_noise(latents, noise + share**detail * error, (signal, share)).numpy()
    assert np.abs(second - expected).max() < 2e-4 * max(1, float(error.abs().max()))


def test_it_is_only_for_training_and_is_refused_by_name(tiny):
    with pytest.raises(ConfigError, match="detail -1 must be 0 or more"):
        read_methods(["dream:detail=-1"], LdmConfig())
    with pytest.raises(ConfigError, match="--input_perturbation makes x_t of a noise of its own"):
        read_methods(["dream"], LdmConfig(input_perturbation=0.1))
    model = make_model(tiny)
    attach_methods(model, read_methods(["dream"], LdmConfig()), seed=3)
    model.eval()
    asked, some = [], paddle.ones([2, 4, 4, 4])
    model.denoising_loss(lambda noisy, _: asked.append(noisy) or noisy, some, paddle.to_tensor([1, 2]), some)
    assert len(asked) == 1


def test_it_is_what_diffusers_computes(tiny):
    need("parity")
    import torch
    from diffusers.training_utils import compute_dream_and_update_latents

    latents, noise, _, (signal, share), asked, loss = changed(tiny, "epsilon", 2)
    first, second = (torch.tensor(one.numpy()) for one in asked)
    levels = torch.tensor((signal**2).flatten().numpy())
    scheduler = SimpleNamespace(alphas_cumprod=levels, config=SimpleNamespace(prediction_type="epsilon"))
    told = torch.tensor(noise.numpy())
    predicted = (first - torch.tensor((signal * changed(tiny, "epsilon", 2)[2]).numpy())) / torch.tensor(share.numpy())
    noisy, target = compute_dream_and_update_latents(
        lambda *_: SimpleNamespace(sample=predicted), scheduler, torch.arange(4), told, first, told, None, 2.0
    )
    assert torch.allclose(noisy, second, atol=1e-3)
    again = (second - torch.tensor((signal * changed(tiny, "epsilon", 2)[2]).numpy())) / torch.tensor(share.numpy())
    assert float(loss.value) == pytest.approx(float(((again - target) ** 2).mean()), rel=1e-3)

"""The perceptual losses: of the picture that a prediction means, at levels of little noise, through any autoencoder."""

import numpy as np
import paddle
import pytest
from small_lpips import write_lpips
from tiny_model import make_model, write_dinov2

from ppldm.diffusion.process import add_noise
from ppldm.families.ldm import LdmConfig
from ppldm.methods.base import attach_methods, read_methods
from ppldm.networks.model import Step
from ppldm.utils.errors import ConfigError
from ppldm.weights.losses import load_dinov2, load_lpips

KINDS = ["epsilon", "v_prediction", "sample", "flow"]


@pytest.fixture
def seen(tiny):
    """The options that name what sees pictures."""
    return {"lpips": write_lpips(tiny.folder), "dinov2": write_dinov2(tiny.folder)}


def step_of(model, guess, timesteps=(5, 300, 600, 999), seed=0):
    """A step whose prediction says that the picture is `guess(latents)`."""
    rng = np.random.default_rng(seed)
    latents, noise = (paddle.to_tensor(rng.standard_normal((4, 4, 8, 8), np.float32)) for _ in range(2))
    timesteps = paddle.to_tensor(timesteps)
    scales = model.process.scales(model.levels[timesteps].reshape([-1, 1, 1, 1]))
    noisy, meant = add_noise(latents, noise, scales), guess(latents)
    predicted = model.process.target(meant, (noisy - scales[0] * meant) / scales[1], scales)
    target = model.process.target(latents, noise, scales)
    return Step(latents, noise, scales, predicted, target, lambda whole: whole, timesteps, {})


def attached(tiny, word, **settings):
    model = make_model(tiny, **settings)
    attach_methods(model, read_methods([word], LdmConfig()), seed=3)
    model.train()
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_distance_of_the_decoded_pictures(tiny, seen, kind):
    words = f"perceptual:until=0.5,lpips_weight=2,dino_weight=3,lpips={seen['lpips']},dinov2={seen['dinov2']}"
    model = attached(tiny, words, prediction_type=kind)
    step = step_of(model, lambda latents: latents * 0.5)
    pictures = [
        model.vae.decode(model.latent_map.to_autoencoder(latents)).sample
        for latents in (step.latents * 0.5, step.latents)
    ]
    features = [load_dinov2(seen["dinov2"]).patches((one + 1) / 2) for one in pictures]
    apart = 1 - paddle.nn.functional.cosine_similarity(*features, axis=1).mean([1, 2])
    both = 2 * load_lpips(seen["lpips"])(*pictures) + 3 * apart
    expected = float(both[:2].sum()) / 4  # of four samples two are of the half of little noise
    assert float(model.methods[0].term(model, step)) == pytest.approx(expected, rel=2e-3)
    assert float(model.methods[0].term(model, step_of(model, lambda latents: latents))) == pytest.approx(0, abs=1e-3)


def test_gradients_reach_the_prediction_and_nothing_that_is_frozen(tiny, seen):
    model = attached(tiny, f"perceptual:lpips={seen['lpips']},dinov2={seen['dinov2']}", prediction_type="sample")
    step = step_of(model, lambda latents: latents * 0.5, timesteps=(0, 1, 2, 999))
    step.predicted.stop_gradient = False
    model.methods[0].term(model, step).backward()
    assert (step.predicted.grad[:3].abs().sum([1, 2, 3]) > 0).all() and not step.predicted.grad[3].any()
    frozen = [*model.vae.parameters(), *model.taps["perceptual_lpips"].parameters()]
    assert all(one.grad is None for one in frozen)


@pytest.mark.parametrize(
    "options, said",
    [
        ("", "needs lpips=FILE or dinov2=FILE"),
        ("lpips=gone", "lpips gone is not there"),
        ("lpips={lpips},until=0", "until 0 must be above 0"),
        ("lpips={lpips},dino_weight=0", "must be above 0"),
    ],
)
def test_what_cannot_be_is_refused(seen, options, said):
    with pytest.raises(ConfigError, match=said):
        read_methods([f"perceptual:{options.format(**seen)}"], LdmConfig())

"""The model: its first loss, what it trains, and that it draws nothing."""

import numpy as np
import paddle
import pytest
from tiny_model import make_batch, make_model

from ppldm.data.inputs import Level, Normals, Sum
from ppldm.utils.rng import Stream


def test_first_loss_is_the_mean_square_of_the_target(tiny):
    batch = make_batch(256)
    loss = float(make_model(tiny)(**batch).value)
    assert loss == pytest.approx(float((batch["noise"] ** 2).mean()), rel=1e-6)
    assert loss == pytest.approx(1.0, abs=0.05)


def test_latents_are_a_scaled_posterior_sample(tiny):
    model, batch = make_model(tiny), make_batch(3)
    scale = model.vae.config.scaling_factor
    assert scale not in (0, 1)
    pixels = batch["pixel_values"].astype("float32") / 127.5 - 1
    posterior = model.vae.encode(pixels).latent_dist
    expected = (posterior.mean + posterior.std * batch["posterior_noise"]) * scale
    latents = model.latents(batch["posterior_noise"], batch["pixel_values"])
    np.testing.assert_allclose(latents, expected, rtol=1e-5, atol=1e-6)
    decoded = model.decode(latents)
    raw = model.vae.decode(latents / scale).sample
    np.testing.assert_allclose(decoded, raw.clip(-1, 1), atol=1e-5)


@pytest.mark.parametrize("freeze", [False, True])
def test_gradients_reach_what_is_trained_and_nothing_else(tiny, freeze):
    model = make_model(tiny, freeze_text_encoder=freeze)
    # The zeroed last layers let no gradient through at the first step; any weights do for this test.
    for parameter in model.unet.parameters():
        parameter.set_value(parameter + 0.01)
    model(**make_batch(2)).value.backward()
    trained = model.trained_parameters()
    assert {name.partition(".")[0] for name in trained} == ({"unet"} if freeze else {"text_encoder", "unet"})
    assert not any("to_logits" in name for name in trained)
    for name, parameter in model.named_parameters():
        if name in trained:
            assert parameter.grad is not None, name
        else:
            assert parameter.grad is None, name


def test_state_dict_keeps_the_published_prefixes(tiny):
    state = make_model(tiny).state_dict()
    assert {name.partition(".")[0] for name in state} == {"vae", "text_encoder", "unet"}
    assert "text_encoder.to_logits.weight" in state


def test_frozen_parts_stay_in_evaluation_mode(tiny):
    model = make_model(tiny, freeze_text_encoder=True)
    model.train()
    assert model.unet.training and not model.vae.training and not model.text_encoder.training


def test_forward_draws_nothing(tiny):
    model, batch = make_model(tiny), make_batch(4)
    model.train()
    paddle.seed(1)
    first = float(model(**batch).value)
    paddle.seed(2)
    assert float(model(**batch).value) == first
    np.random.seed(7)
    before = paddle.get_rng_state()[0].current_seed(), np.random.get_state()[1].tolist()
    model(**batch)
    assert (paddle.get_rng_state()[0].current_seed(), np.random.get_state()[1].tolist()) == before


def test_min_snr_weights_each_sample(tiny):
    """Against the plain loss of each sample by itself."""
    batch = make_batch(5)
    for prediction_type in ("epsilon", "v_prediction"):
        plain = make_model(tiny, prediction_type=prediction_type)
        weighted = make_model(tiny, prediction_type=prediction_type, snr_gamma=5.0)
        errors = [float(plain(**{name: value[i : i + 1] for name, value in batch.items()}).value) for i in range(5)]
        abar = plain.levels.numpy()[batch["timesteps"].numpy()].astype(np.float64)
        snr = abar / (1 - abar)
        weights = np.minimum(snr, 5) / (snr if prediction_type == "epsilon" else snr + 1)
        assert float(weighted(**batch).value) == pytest.approx(np.mean(weights * errors), rel=1e-5)


def test_perturbed_input_is_what_the_unet_sees(tiny):
    model, batch = make_model(tiny, input_perturbation=0.1), make_batch(4)
    assert list(model.inputs)[-1] == "input_noise" and "input_noise" not in make_model(tiny).inputs
    for parameter in model.unet.parameters():
        parameter.set_value(parameter + 0.01)
    seen = []
    model.unet.register_forward_pre_hook(lambda layer, inputs: seen.append(inputs[0]))
    other = paddle.to_tensor(np.random.default_rng(1).standard_normal((4, 4, 4, 4), dtype=np.float32))
    same, perturbed = (float(model(**batch, input_noise=noise).value) for noise in (batch["noise"], other))
    assert same == float(model(**batch).value) != perturbed
    root = (1 - model.levels[batch["timesteps"]]).sqrt().reshape([-1, 1, 1, 1])
    np.testing.assert_allclose(seen[1] - seen[0], root * (other - batch["noise"]), atol=1e-5)


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction"])
def test_the_target_knows_nothing_of_the_perturbation(tiny, prediction_type):
    """A fresh UNet gives 0, so the loss is the mean square of the target: that of `noise` and not of `input_noise`."""
    model, batch = make_model(tiny, input_perturbation=0.1, prediction_type=prediction_type), make_batch(4)
    other = paddle.to_tensor(np.random.default_rng(1).standard_normal((4, 4, 4, 4), dtype=np.float32))
    abar = model.levels[batch["timesteps"]].reshape([-1, 1, 1, 1])
    latents = model.latents(batch["posterior_noise"], batch["pixel_values"])
    velocity = abar.sqrt() * batch["noise"] - (1 - abar).sqrt() * latents
    target = batch["noise"] if prediction_type == "epsilon" else velocity
    loss = float(model(**batch, input_noise=other).value)
    assert loss == pytest.approx(float((target**2).mean()), rel=1e-6) == float(model(**batch).value)


def test_velocity_of_pure_noise_is_the_latents(tiny):
    """At zero SNR the input is the noise itself and the target minus the latents: all is finite."""
    model, batch = (
        make_model(tiny, rescale_betas_zero_snr=True, prediction_type="v_prediction", snr_gamma=5.0),
        make_batch(3),
    )
    batch["timesteps"] = paddle.to_tensor([999, 999, 999])
    latents = model.latents(batch["posterior_noise"], batch["pixel_values"])
    assert float(model(**batch).value) == 0.0  # weight min(SNR, gamma) / (SNR + 1)
    model.loss_weights = None
    assert float(model(**batch).value) == pytest.approx(float((latents**2).mean()), rel=1e-5)
    with pytest.raises(ValueError, match="v_prediction"):
        make_model(tiny, rescale_betas_zero_snr=True)


def test_what_a_batch_must_hold(tiny):
    """Shapes by height and width, and the law of each draw."""
    settings = {"noise_offset": 0.5, "input_perturbation": 0.1}
    plain, model = make_model(tiny), make_model(tiny, **settings)
    shapes = {"pixel_values": (3, 32, 64), "input_ids": (12,), "timesteps": ()}
    noises = ("posterior_noise", "noise", "input_noise")
    shapes |= dict.fromkeys(noises, (4, 4, 8)) | {"moments": (2, 4, 4, 8), "uncached": (4,)}
    assert {name: one.shape(32, 64) for name, one in model.inputs.items()} == shapes
    assert plain.inputs.keys() == model.inputs.keys() - {"input_noise"}
    assert plain.inputs["timesteps"] == Level(Stream.TIMESTEP, 1000)
    assert plain.inputs["noise"] == Normals(Stream.NOISE, 4, 8) == model.inputs["noise"].first
    assert model.inputs["noise"] == Sum(plain.inputs["noise"], 0.5, Normals(Stream.NOISE_OFFSET, 4, None))
    assert model.inputs["input_noise"] == Sum("noise", 0.1, Normals(Stream.INPUT_PERTURBATION, 4, 8))


@pytest.mark.parametrize("snr_gamma", [None, 5.0])
def test_the_loss_tells_each_sample_s_error_and_level(tiny, snr_gamma):
    """Errors are before any weight; levels the share of timesteps below."""
    model, batch = make_model(tiny, snr_gamma=snr_gamma), make_batch(4)
    batch["timesteps"] = paddle.to_tensor([0, 250, 499, 999])
    loss = model.loss(batch | {"row_ids": None})
    expected = (batch["noise"] ** 2).mean([1, 2, 3])  # a fresh UNet gives 0
    np.testing.assert_allclose(loss.per_sample, expected, rtol=1e-6)
    np.testing.assert_allclose(loss.noise_level, [0, 0.25, 0.499, 0.999], rtol=1e-6)
    assert loss.per_sample.stop_gradient and not loss.value.stop_gradient

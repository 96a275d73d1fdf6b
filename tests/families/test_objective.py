"""Settings of the objective: what they make of a process, what is refused, and that each of them learns."""

import numpy as np
import paddle
import pytest
from tiny_model import make_batch, make_model

from ppldm.data.inputs import Level
from ppldm.families.ldm import LdmConfig
from ppldm.methods.levels.biased import Biased
from ppldm.methods.levels.logit_normal import LogitNormal
from ppldm.methods.weights.adaptive import Adaptive
from ppldm.methods.weights.min_snr import MinSNR
from ppldm.methods.weights.p2 import P2
from ppldm.networks.model import Loss
from ppldm.utils.errors import ConfigError
from ppldm.utils.rng import Stream

KINDS = ("epsilon", "v_prediction", "sample", "flow", "flow_sample")


@pytest.mark.parametrize(
    "settings, weighting",
    [
        ({}, None),
        ({"loss_weighting": "none"}, None),
        ({"snr_gamma": 3.0}, MinSNR(3.0)),
        ({"loss_weighting": "min_snr"}, MinSNR(5.0)),
        ({"loss_weighting": "min_snr", "snr_gamma": 3.0}, MinSNR(3.0)),
        ({"loss_weighting": "p2", "p2_gamma": 0.5, "p2_k": 2.0}, P2(0.5, 2.0)),
        ({"loss_weighting": "adaptive"}, Adaptive()),
    ],
)
def test_weights_of_settings(settings, weighting):
    assert LdmConfig(**settings).weighting() == weighting


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({}, Level(Stream.TIMESTEP, 1000)),
        ({"timestep_sampling": "logit_normal", "logit_mean": 0.5}, Level(Stream.TIMESTEP, 1000, LogitNormal(0.5, 1.0))),
        (
            {"timestep_sampling": "biased", "timestep_bias_from": 0.5},
            Level(Stream.TIMESTEP, 1000, Biased(0.5, 1.0, 2.0)),
        ),
        ({"stratified_timesteps": True}, Level(Stream.TIMESTEP, 1000, None, True)),
    ],
)
def test_levels_of_settings(settings, expected):
    assert LdmConfig(**settings).level_input(1000) == expected


def test_a_schedule_is_chosen_or_that_of_the_model_to_start_from():
    plain = {"prediction_type": "epsilon", "rescale_betas_zero_snr": False}
    assert LdmConfig().chosen_schedule(256) == plain
    assert LdmConfig(beta_schedule="linear", timestep_shift=2.0).chosen_schedule(256) == plain | {
        "beta_schedule": "linear", "timestep_shift": 2.0
    }  # fmt: skip
    assert LdmConfig(shift_base_resolution=64).chosen_schedule(256)["timestep_shift"] == 4.0


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"prediction_type": "flow", "beta_schedule": "linear"}, "--beta_schedule is not for --prediction_type flow"),
        ({"prediction_type": "flow", "rescale_betas_zero_snr": True}, "--rescale_betas_zero_snr is not for"),
        ({"timestep_sampling": "biased", "timestep_bias_to": 0.75}, "--timestep_bias_from 0.75 must be below"),
        ({"timestep_shift": 2.0, "shift_base_resolution": 64}, "--timestep_shift and --shift_base_resolution say"),
        ({"beta_schedule": "cosine", "rescale_betas_zero_snr": True, "prediction_type": "sample"}, "always keeps some"),
        ({"rescale_betas_zero_snr": True}, "add --prediction_type v_prediction"),
    ],
)
def test_what_cannot_go_together_is_said(settings, message):
    with pytest.raises(ConfigError, match=message):
        LdmConfig(**settings).check()


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_s_loss_is_that_of_the_formulas(tiny, kind):
    """A fresh UNet gives 0: the loss is the weighted mean square of the target, by hand."""
    model, batch = make_model(tiny, prediction_type=kind, snr_gamma=2.0, timestep_shift=1.5), make_batch(5)
    latents, noise = model.latents(batch["posterior_noise"], batch["pixel_values"]).numpy(), batch["noise"].numpy()
    timesteps = batch["timesteps"].numpy()
    is_flow = kind.startswith("flow")
    if is_flow:
        s = (timesteps + 1) / 1000
        s = 1.5 * s / (1 + 0.5 * s)
        a = 1 - s
    else:
        abar = np.cumprod(1 - np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2)[timesteps]
        a = np.sqrt(abar / (abar + 1.5**2 * (1 - abar)))
        s = np.sqrt(1 - a**2)
    snr, a_, s_ = (a / s) ** 2, *(one.reshape([-1, 1, 1, 1]) for one in (a, s))
    target = {"epsilon": noise, "v_prediction": a_ * noise - s_ * latents, "sample": latents, "flow": noise - latents}
    target["flow_sample"] = latents / np.maximum(s_, 0.05)
    by = {"epsilon": snr, "v_prediction": snr + 1, "sample": 1}.get(kind, 1 / s**2)
    expected = (np.minimum(snr, 2) / by * (target[kind] ** 2).mean((1, 2, 3))).mean()
    seen = []
    model.unet.register_forward_pre_hook(lambda layer, inputs: seen.append(inputs[:2]))
    assert float(model(**batch).value) == pytest.approx(expected, rel=1e-4)
    np.testing.assert_allclose(seen[0][0], a_ * latents + s_ * noise, atol=1e-5)
    np.testing.assert_allclose(seen[0][1].astype("float32"), 1000 * s if is_flow else timesteps, rtol=1e-5)


def test_adaptive_weights_follow_the_errors_of_all_ranks(tiny):
    model = make_model(tiny, loss_weighting="adaptive")
    model.train()
    batch, plain = make_batch(4), make_model(tiny)
    batch["timesteps"] = paddle.to_tensor([3, 500, 500, 999])
    errors = plain(**batch).per_sample.numpy()
    first = model(**batch)
    assert float(first.value) == pytest.approx(errors.mean(), rel=1e-6), "all means begin at 1"
    halves = [Loss(None, first.per_sample[part], first.noise_level[part]) for part in (slice(0, 1), slice(1, 4))]
    sums = model.statistics([first]).numpy()
    np.testing.assert_allclose(model.statistics(halves).numpy(), sums, rtol=1e-6)
    model.keep_statistics(paddle.to_tensor(sums + sums))  # of two ranks that saw the same
    means = [0.99 + 0.01 * error for error in (errors[0], errors[1:3].mean(), errors[1:3].mean(), errors[3])]
    assert float(model(**batch).value) == pytest.approx((errors / means).mean(), rel=1e-6)
    assert int((model.level_errors.errors != 1).sum()) == 3
    model.eval()
    assert float(model(**batch).value) == pytest.approx(errors.mean(), rel=1e-6), "a validation loss has no weights"
    assert [name for name in model.state_dict() if not name.startswith(("vae.", "text_encoder.", "unet."))] == [
        "level_errors.errors"
    ]
    assert plain.statistics([first]) is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_learns(tiny, kind):
    """The error of fixed samples falls to a small part."""
    model, batch = make_model(tiny, prediction_type=kind, loss_weighting="adaptive"), make_batch(4)
    model.train()
    optimizer = paddle.optimizer.AdamW(4e-3, parameters=list(model.trained_parameters().values()))
    errors = []
    for _ in range(40):
        loss = model(**batch)
        loss.value.backward()
        optimizer.step()
        optimizer.clear_grad()
        model.keep_statistics(model.statistics([loss]))
        errors.append(float(loss.per_sample.mean()))
    assert np.mean(errors[-5:]) < 0.1 * errors[0]

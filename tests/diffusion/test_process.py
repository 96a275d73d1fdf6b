"""The forward process against its published values and against ppdiffusers' own schedulers."""

import numpy as np
import paddle
import pytest
from ppdiffusers import DDPMScheduler

from ppldm.diffusion.process import NoiseSchedule, Process, add_noise
from ppldm.methods.weights.adaptive import Adaptive
from ppldm.methods.weights.min_snr import MinSNR
from ppldm.methods.weights.p2 import P2


def test_published_schedule():
    alphas_cumprod = NoiseSchedule().alphas_cumprod()
    assert alphas_cumprod.shape == (1000,)
    np.testing.assert_allclose(alphas_cumprod[[0, 499, 999]], [0.99915, 0.277670, 0.0046601], rtol=2e-5)
    assert (np.diff(alphas_cumprod) < 0).all()


@pytest.mark.parametrize("beta_schedule", ["scaled_linear", "linear"])
def test_zero_terminal_snr(beta_schedule):
    plain = NoiseSchedule(beta_schedule=beta_schedule).alphas_cumprod()
    rescaled = NoiseSchedule(beta_schedule=beta_schedule, rescale_betas_zero_snr=True).alphas_cumprod()
    assert rescaled[-1] == 0 and rescaled[0] == plain[0]
    assert (np.diff(rescaled) < 0).all()
    # Linear in sqrt(abar): differences keep their proportions.
    ratios = np.diff(np.sqrt(rescaled.astype(np.float64))) / np.diff(np.sqrt(plain.astype(np.float64)))
    np.testing.assert_allclose(ratios, ratios[0], rtol=1e-2)


@pytest.mark.parametrize("zero_snr", [False, True])
@pytest.mark.parametrize("gamma", [1.0, 5.0, 20.0])
def test_weights_over_all_timesteps(gamma, zero_snr):
    """Tables against the formulas in SNR, and against ppdiffusers where it defines SNR."""
    from ppdiffusers.training_utils import compute_snr

    schedule = NoiseSchedule(rescale_betas_zero_snr=zero_snr)
    abar = schedule.alphas_cumprod().astype(np.float64)
    snr = abar / (1 - abar)

    def weights(weighting, kind):
        return Process(schedule, kind, weighting).loss_weights()

    velocity = weights(MinSNR(gamma), "v_prediction")
    np.testing.assert_allclose(velocity, np.minimum(snr, gamma) / (snr + 1), rtol=1e-6)
    np.testing.assert_allclose(weights(MinSNR(gamma), "sample"), np.minimum(snr, gamma), rtol=1e-6)
    np.testing.assert_allclose(weights(P2(1.5, gamma), "v_prediction"), (gamma + snr) ** -1.5, rtol=1e-6)
    assert np.isfinite(velocity).all() and (velocity[-1] == 0) == zero_snr
    if zero_snr:
        return
    np.testing.assert_allclose(weights(MinSNR(gamma), "epsilon"), np.minimum(snr, gamma) / snr, rtol=1e-6)
    theirs = compute_snr(DDPMScheduler(**schedule.scheduler_config()), paddle.arange(1000)).numpy()
    np.testing.assert_allclose(weights(MinSNR(gamma), "epsilon"), np.minimum(theirs, gamma) / theirs, rtol=2e-4)


@pytest.mark.parametrize("kind", ["epsilon", "v_prediction", "sample", "flow"])
def test_min_snr_is_one_weight_of_the_picture_s_error(kind):
    """A change of the prediction changes x_0, solved from x_t, by another factor for each kind."""
    process = Process(NoiseSchedule(), kind, MinSNR(5.0))
    signal, noise = process.powers()
    a, s = np.sqrt(signal), np.sqrt(noise)
    x_0, eps, change = 0.3, -1.1, 1e-3
    x_t = a * x_0 + s * eps
    solved = {
        "epsilon": lambda predicted: (x_t - s * predicted) / a,
        "v_prediction": lambda predicted: a * x_t - s * predicted,
        "sample": lambda predicted: predicted,
        "flow": lambda predicted: x_t - s * predicted,
    }[kind]
    target = process.target(x_0, eps, (a, s)) + np.zeros_like(a)
    with np.errstate(divide="ignore", invalid="ignore"):
        error = (solved(target + change) - solved(target)) ** 2
        weight = process.loss_weights() * change**2 / error
    known = signal > 0
    np.testing.assert_allclose(solved(target)[known], x_0, atol=1e-6)
    np.testing.assert_allclose(weight[known], np.minimum(signal / noise, 5.0)[known], rtol=1e-4)


@pytest.mark.parametrize("beta_schedule", ["scaled_linear", "linear"])
@pytest.mark.parametrize("timestep", [0, 1, 500, 999])
@pytest.mark.parametrize("zero_snr", [False, True])
def test_agrees_with_ppdiffusers(beta_schedule, timestep, zero_snr):
    schedule = NoiseSchedule(beta_schedule=beta_schedule, rescale_betas_zero_snr=zero_snr)
    scheduler = DDPMScheduler(**schedule.scheduler_config())
    rng = np.random.default_rng(timestep)
    latents, noise = (paddle.to_tensor(rng.standard_normal((2, 4, 3, 3), dtype=np.float32)) for _ in range(2))
    timesteps = paddle.to_tensor([timestep, timestep])
    process = Process(schedule, "v_prediction")
    scales = process.scales(float(process.levels()[timestep]))
    # ppdiffusers rescales in float32.
    atol = 2e-5 if zero_snr else 2e-6
    np.testing.assert_allclose(
        add_noise(latents, noise, scales), scheduler.add_noise(latents, noise, timesteps), atol=atol
    )
    np.testing.assert_allclose(
        process.target(latents, noise, scales),
        scheduler.get_velocity(latents, noise, timesteps),
        atol=atol,
    )
    if not zero_snr:
        assert Process(schedule).target(latents, noise, scales) is noise
    assert Process(schedule, "sample").target(latents, noise, scales) is latents


def test_unknown_settings_are_refused():
    with pytest.raises(ValueError, match="prediction_type"):
        Process(prediction_type="score")
    with pytest.raises(ValueError, match="beta_schedule"):
        NoiseSchedule(beta_schedule="sigmoid").alphas_cumprod()


def table(num_levels=1000, first=0.00085, last=0.012, linear=False, zero_snr=False):
    """The published discrete schedule as it was first written here: float32 of float64 products."""
    betas = np.linspace(first, last, num_levels) if linear else np.linspace(first**0.5, last**0.5, num_levels) ** 2
    signal = np.cumprod(1.0 - betas)
    if zero_snr:
        roots = np.sqrt(signal)
        signal = ((roots - roots[-1]) * roots[0] / (roots[0] - roots[-1])) ** 2
    return signal.astype(np.float32)


@pytest.mark.parametrize(
    "zero_snr, prediction_type", [(False, "epsilon"), (False, "v_prediction"), (True, "v_prediction")]
)
@pytest.mark.parametrize("gamma", [None, 0.5, 1.0, 5.0, 20.0])
@pytest.mark.parametrize("num_levels", [3, 1000, 1001])
def test_published_processes_to_the_bit(zero_snr, prediction_type, gamma, num_levels):
    """Tables and weights are values of a process, and those that runs so far were trained with."""
    settings = {"num_train_timesteps": num_levels, "rescale_betas_zero_snr": zero_snr}
    weighting = gamma and MinSNR(gamma)
    process = Process.of({**settings, "prediction_type": prediction_type, "steps_offset": 1}, weighting)
    signal = table(num_levels, zero_snr=zero_snr)
    assert process.num_levels == num_levels and (process.schedule.alphas_cumprod() == signal).all()
    assert process.settings().items() >= {**settings, "prediction_type": prediction_type}.items()
    assert Process.of(process.settings(), weighting) == process
    if gamma is None:
        assert process.loss_weights() is None
        return
    signal = signal.astype(np.float64)
    if prediction_type == "epsilon":
        weights = np.minimum(1.0, gamma * (1.0 - signal) / signal)
    else:
        weights = np.minimum(signal, gamma * (1.0 - signal))
    assert process.loss_weights().dtype == np.float32 and (process.loss_weights() == weights.astype(np.float32)).all()


def test_log_snr_says_all_of_a_schedule():
    for zero_snr in (False, True):
        schedule = NoiseSchedule(rescale_betas_zero_snr=zero_snr)
        logs = schedule.log_snr()
        assert (np.diff(logs) < 0).all() and (logs[-1] == -np.inf) == zero_snr
        with np.errstate(over="ignore"):
            assert ((1 / (1 + np.exp(-logs))).astype(np.float32) == schedule.alphas_cumprod()).all()


def test_a_process_that_cannot_be_learned_is_refused():
    with pytest.raises(ValueError, match="zero SNR needs v_prediction"):
        Process(NoiseSchedule(rescale_betas_zero_snr=True))
    with pytest.raises(ValueError, match="prediction_type 'x'"):
        Process(prediction_type="x")


def test_cosine_schedules():
    """Nichol and Dhariwal's, as diffusers caps it, and with Stable Cascade's clamp."""
    t = np.arange(1, 1001) / 1000
    cosine = np.cos((t + 0.008) / 1.008 * np.pi / 2) ** 2 / np.cos(0.008 / 1.008 * np.pi / 2) ** 2
    capped = NoiseSchedule(beta_schedule="squaredcos_cap_v2").alphas_cumprod()
    theirs = DDPMScheduler(beta_schedule="squaredcos_cap_v2").alphas_cumprod.numpy()
    np.testing.assert_allclose(capped, theirs, rtol=1e-3)
    np.testing.assert_allclose(capped[:-1], cosine[:-1], rtol=1e-5)
    clamped = NoiseSchedule(beta_schedule="cosine").alphas_cumprod()
    np.testing.assert_allclose(clamped, cosine.clip(1e-4, 0.9999), rtol=1e-5)


@pytest.mark.parametrize("shift", [0.5, 2.0, 4.0])
@pytest.mark.parametrize(
    "kind, schedule", [("epsilon", "scaled_linear"), ("v_prediction", "cosine"), ("flow", "linear")]
)
def test_a_shift_divides_the_signal_to_noise_ratio_by_its_square(shift, kind, schedule):
    """And schedulers of ppdiffusers get the same levels."""
    plain, shifted = (Process(NoiseSchedule(beta_schedule=schedule, timestep_shift=m), kind) for m in (1.0, shift))
    ratios = [signal[:-1] / noise[:-1] for signal, noise in (plain.powers(), shifted.powers())]
    np.testing.assert_allclose(ratios[1], ratios[0] / shift**2, rtol=3e-3)
    assert Process.of(shifted.settings()) == shifted
    if kind != "flow":
        theirs = DDPMScheduler(**shifted.schedule.scheduler_config()).alphas_cumprod.numpy()
        np.testing.assert_allclose(theirs, shifted.levels(), rtol=1e-3)


def test_flow_is_a_straight_line_from_the_picture_to_noise():
    process = Process(NoiseSchedule(num_train_timesteps=100), "flow")
    levels = process.levels()
    np.testing.assert_allclose(levels, np.arange(1, 101) / 100, rtol=1e-6)
    x_0, noise = 0.7, -0.2
    for timestep in (0, 49, 99):
        scales = process.scales(levels[timestep])
        x_t = add_noise(x_0, noise, scales)
        assert x_t == pytest.approx((1 - levels[timestep]) * x_0 + levels[timestep] * noise)
        assert x_t - levels[timestep] * process.target(x_0, noise, scales) == pytest.approx(x_0)
        assert process.times(timestep, levels[timestep]) == pytest.approx(timestep + 1)
    assert Process().times(7, 0.5) == 7


def test_buckets_of_the_adaptive_weight():
    """299 bounds from -10 to 10: what lies beyond shares a bucket at each end."""
    signal = 1 / (1 + np.exp(-np.array([-30.0, -10.1, -9.99, 0.0, 9.99, 10.1, 30.0])))
    buckets = Adaptive().buckets(signal, 1 - signal)
    assert buckets.tolist() == [0, 0, 1, buckets[3], 298, 299, 299] and 148 <= buckets[3] <= 150
    assert Adaptive().buckets(np.array([0.0]), np.array([1.0])) == [0]
    assert Process(weighting=Adaptive()).loss_weights() is None

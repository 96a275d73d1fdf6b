"""Each metric beside its published formula, written out the long way."""

import json

import numpy as np
import pytest
from scipy.ndimage import gaussian_filter
from scipy.spatial.distance import cdist
from scipy.stats import wasserstein_distance

from ppldm.evaluation.metrics import distributions as sliced
from ppldm.evaluation.metrics import neighbours
from ppldm.evaluation.metrics.base import METRICS
from ppldm.utils.errors import DataError
from ppldm.utils.rng import Stream, make_rng


def value(name, *inputs, seed=0):
    return METRICS[name].compute(*inputs, seed=seed).value


def features(seed, count, dim=6, shift=0.0):
    return (np.random.default_rng(seed).normal(size=(count, dim)) + shift).astype(np.float32)


def pictures(seed, count, size=(24, 20)):
    return list(np.random.default_rng(seed).integers(0, 256, size=(count, *size, 3), dtype=np.uint8))


class PixelDistances:
    """In the place of LPIPS."""

    def distances(self, generated, real):
        return np.array([np.abs(one.astype(float) - other).mean() for one, other in zip(generated, real, strict=True)])


def compute(metric, inputs, seed):
    networks = [PixelDistances()] if metric.inputs == "pairs" and metric.features else []
    return metric.compute(*inputs, *networks, seed=seed)


def inputs_of(metric, count=30):
    if metric.inputs in ("pictures", "pairs"):
        return pictures(1, 6), pictures(2, 6)
    return (features(1, count),) if metric.inputs == "single" else (features(1, count), features(2, count, shift=0.5))


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(neighbours, "_ENTRIES", 200)


def cubic_mmd(left, right):
    within = []
    for rows in (left, right):
        pairs = [(rows[i] @ rows[j] / 6 + 1) ** 3 for i in range(len(rows)) for j in range(len(rows)) if i != j]
        within.append(np.mean(pairs))
    return sum(within) - 2 * np.mean([(x @ y / 6 + 1) ** 3 for x in left for y in right])


def test_kid_of_all():
    left, right = (features(seed, 30).astype(np.float64) for seed in (1, 2))
    assert value("kid", left, right) == pytest.approx(cubic_mmd(left, right), rel=1e-9)


def test_kid_of_subsets_is_drawn_as_torch_fidelity_draws():
    left, right = features(1, 12).astype(np.float64), features(2, 16).astype(np.float64)
    legacy, values = np.random.RandomState(2020), []
    for _ in range(100):
        chosen = left[legacy.choice(12, 12, replace=False)], right[legacy.choice(16, 12, replace=False)]
        values.append(cubic_mmd(*chosen))
    found = METRICS["kid"].compute(left, right, seed=0)
    assert found.value == pytest.approx(np.mean(values), rel=1e-9)
    assert found.details == {"std": pytest.approx(np.std(values)), "subset_size": 12}


def test_cmmd(small_blocks):
    left, right = features(1, 30).astype(np.float64), features(2, 25, shift=0.5).astype(np.float64)
    x, y = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (left, right))
    kernel = [np.exp(-(cdist(a, b) ** 2) / 200).mean() for a, b in ((x, x), (y, y), (x, y))]
    assert value("cmmd", left, right) == pytest.approx(1000 * (kernel[0] + kernel[1] - 2 * kernel[2]), rel=1e-6)
    assert value("cmmd", left, left * 3) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("seed, count, other", [(1, 30, 40), (2, 40, 30), (3, 7, 8)])
def test_manifolds(seed, count, other, small_blocks):
    generated, real = features(seed, count, 3, 0.7), features(seed + 9, other, 3)
    across = cdist(generated.astype(np.float64), real.astype(np.float64))

    def radii(rows, k):
        return np.sort(cdist(rows.astype(np.float64), rows.astype(np.float64)), axis=1)[:, k]

    assert value("precision", generated, real) == np.mean((across <= radii(real, 3)).any(axis=1))
    assert value("recall", generated, real) == np.mean((radii(generated, 3) >= across.T).any(axis=1))
    assert value("density", generated, real) == pytest.approx(np.mean((across < radii(real, 5)).sum(axis=1)) / 5)
    assert value("coverage", generated, real) == pytest.approx(np.mean((across < radii(real, 5)).any(axis=0)))


@pytest.mark.parametrize("name", ["precision", "recall", "density", "coverage"])
def test_terms_of_manifolds_are_the_jackknife(name):
    """Leaving each picture out, and computing again."""
    compute, k = getattr(neighbours, f"count_{name}"), METRICS[name].settings["k"]
    for seed in range(3):
        sets = features(seed, 24, 2, 0.8), features(seed + 50, 20, 2)
        value, *terms = compute(*sets, k)
        assert METRICS[name].compute(*sets, seed=0).value == value
        for own, which in zip(terms, (0, 1), strict=True):
            pseudo = []
            for left_out in range(len(own)):
                fewer = [np.delete(rows, left_out, 0) if place == which else rows for place, rows in enumerate(sets)]
                pseudo.append(len(own) * value - (len(own) - 1) * compute(*fewer, k)[0])
            # Terms are known up to a constant for each set.
            assert own - own[0] == pytest.approx(np.array(pseudo) - pseudo[0])


@pytest.mark.parametrize("other", [20, 33])
def test_sliced_wasserstein(other):
    left, right = features(1, 20), features(2, other, shift=0.3)
    directions = make_rng(5, Stream.EVALUATION, 1).standard_normal((sliced.DIRECTIONS, 6))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    expected = np.mean([wasserstein_distance(left @ one, right @ one) for one in directions])
    assert value("sliced_wasserstein", left, right, seed=5) == pytest.approx(expected, rel=1e-5)
    assert value("sliced_wasserstein", left, left[::-1]) == pytest.approx(0, abs=1e-6)


def test_terms_of_sliced_wasserstein_are_its_derivative():
    """Of a set in which one point weighs a little more: of which there is one more among many of each."""
    sets = [np.random.default_rng(seed).normal(size=count) + shift for seed, count, shift in ((1, 6, 0), (2, 5, 0.4))]
    value, terms, _ = sliced._wasserstein(*sets)
    for which, own in enumerate(sets):
        for number, point in enumerate(own):
            many = [np.repeat(one, 10_000) for one in sets]
            many[which] = np.append(many[which], point)
            slope = (sliced._wasserstein(*many)[0] - value) * len(many[which])
            assert slope == pytest.approx(terms[which][number] - terms[which].mean(), abs=1e-3)


def test_terms_of_pyramids_count_the_normalising(monkeypatch):
    """A picture weighs a little more in its set: pictures of one colour, of which every patch is the same."""

    def patches(colours, weights):
        rows = np.repeat(np.repeat(np.asarray(colours, float), 49, 0).reshape(len(colours), -1), weights, 0)
        shaped = rows.reshape(len(rows), 49, 3)
        return ((shaped - shaped.mean((0, 1))) / shaped.std((0, 1))).reshape(len(rows), -1)

    monkeypatch.setattr(sliced, "DIRECTIONS", 32)
    rng = np.random.default_rng(3)
    colours = [rng.gamma(2, size=(5, 3)), rng.normal(size=(4, 3))]
    sets = [patches(one, [200] * len(one)) for one in colours]
    value, terms, slopes = sliced.sliced_distances(*sets, 0, sliced.CHANNELS)
    own = terms[0] - sliced._by_normalising(sets[0], slopes[0])
    for number in range(5):
        more = patches(colours[0], [200 + 4 * (number == place) for place in range(5)])
        change = (sliced.sliced_distances(more, sets[1], 0)[0].mean() - value.mean()) * len(more) / 4
        assert change == pytest.approx(own[200 * number] - own.mean(), rel=0.03, abs=0.01)


def test_psnr_and_ssim():
    left, right = pictures(1, 3), [np.clip(one.astype(int) + 9, 0, 255).astype(np.uint8) for one in pictures(1, 3)]
    errors = [np.mean((a.astype(float) - b) ** 2) for a, b in zip(left, right, strict=True)]
    assert value("psnr", left, right) == pytest.approx(np.mean(10 * np.log10(255**2 / np.array(errors))))

    def one_ssim(a, b):
        a, b = a.astype(float), b.astype(float)

        def mean(x):
            return gaussian_filter(x, 1.5, truncate=5 / 1.5, axes=(0, 1))[5:-5, 5:-5]

        cross = mean(a * b) - mean(a) * mean(b)
        spread = mean(a * a) - mean(a) ** 2 + mean(b * b) - mean(b) ** 2
        first, second = 2.55**2, 7.65**2
        return np.mean((2 * mean(a) * mean(b) + first) * (2 * cross + second)
                       / ((mean(a) ** 2 + mean(b) ** 2 + first) * (spread + second)))  # fmt: skip

    expected = np.mean([one_ssim(a, b) for a, b in zip(left, pictures(4, 3), strict=True)])
    assert value("ssim", left, pictures(4, 3)) == pytest.approx(expected, rel=1e-9)
    assert value("ssim", left, left) == pytest.approx(1) and value("psnr", left, left) == 100


def test_clip_score_in_both_conventions():
    left, right = features(1, 9), features(2, 9)
    cosines = np.array([a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in zip(left, right, strict=True)])
    found = METRICS["clip_score"].compute(left, right, seed=0, logit_scale=50)
    assert found.value == pytest.approx(100 * np.mean(np.maximum(cosines, 0)), rel=1e-5)
    assert found.details["logit_scale_cosine"] == pytest.approx(50 * np.mean(cosines), rel=1e-5)


def test_diversity_and_nearest_training(small_blocks):
    generated, training = features(1, 12), features(2, 30)
    apart = cdist(generated, generated)
    assert value("diversity", generated) == pytest.approx(apart.sum() / (12 * 11), rel=1e-6)
    generated[3] = training[17]
    found = METRICS["nearest_training"].compute(generated, training, seed=0)
    own = np.linspace(0, 29, 12).round().astype(int)
    expected = [np.sort(cdist(training[[row]], training)[0])[1] for row in own]
    assert found.value == pytest.approx(cdist(generated, training).min(axis=1).mean() / np.mean(expected), rel=1e-6)
    assert found.details["closest"][0] == [3, 17, 0.0]


def test_pyramids_bands_add_up_to_the_picture():
    picture = np.random.default_rng(0).normal(size=(64, 65, 3)).astype(np.float32)
    rest = picture
    for level in range(3):
        band = sliced.laplacian(picture, level)
        smaller = sliced._blur(rest)[::2, ::2] if level < 2 else 0
        if level < 2:
            raised = np.zeros_like(rest)
            raised[::2, ::2] = smaller
            assert np.allclose(band + 4 * sliced._blur(raised), rest, atol=1e-5)
            rest = smaller
    assert np.array_equal(band, rest) and band.shape == (16, 17, 3)


def test_sizes_that_swd_cannot_compare():
    with pytest.raises(DataError, match="20 x 24 and 24 x 24"):
        value("swd", pictures(1, 2), pictures(2, 2, (24, 24)))
    with pytest.raises(DataError, match="number 1 is of another"):
        value("swd", [*pictures(1, 1), *pictures(1, 1, (24, 24))], pictures(2, 2))
    with pytest.raises(DataError, match="16 pixels and more"):
        value("swd", pictures(1, 2, (12, 40)), pictures(2, 2, (12, 40)))


@pytest.mark.parametrize("name", METRICS)
def test_results_are_json_repeat_themselves_and_lie_in_their_interval(name):
    metric = METRICS[name]
    found = compute(metric, inputs_of(metric), seed=3)
    assert json.loads(json.dumps(found.details)) == found.details
    assert json.loads(json.dumps(metric.settings)) == metric.settings
    assert found == compute(metric, inputs_of(metric), seed=3)
    assert found.low < found.value < found.high


@pytest.mark.parametrize("name", METRICS)
def test_the_fewest_pictures_are_enough(name):
    metric = METRICS[name]
    found = compute(metric, (rows[: metric.least] for rows in inputs_of(metric)), seed=0)
    assert np.isfinite([found.low, found.value, found.high]).all()

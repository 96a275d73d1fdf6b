"""The study in pairs: its statistics, its one currency for all targets, and what it runs next."""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ppldm.diffusion.process import NoiseSchedule, Process
from ppldm.methods import names

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
currency, paired, study = map(importlib.import_module, ("currency", "paired", "study"))
KINDS = ("epsilon", "v_prediction", "sample", "flow")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("schedule", [NoiseSchedule(), NoiseSchedule(beta_schedule="cosine", timestep_shift=2.0)])
def test_a_perfect_prediction_is_the_picture_whatever_the_target(kind, schedule):
    process, rng = Process(schedule, kind), np.random.default_rng(0)
    latents, noise = rng.standard_normal((2, 3, 4, 4, 4))
    for log_snr in currency.LOG_SNR.tolist():
        a, s = currency.scales_at(log_snr, process.is_flow)
        assert np.log(a**2 / s**2) == pytest.approx(log_snr)
        assert (a + s if process.is_flow else a**2 + s**2) == pytest.approx(1)
        target = process.target(latents, noise, (a, s))
        found = process.picture(target, a * latents + s * noise, (a, s))
        np.testing.assert_allclose(found, latents, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_the_network_is_told_the_time_of_the_level(kind):
    process = Process(NoiseSchedule(), kind)
    for timestep in (100, 500, 900):
        level = process.levels()[timestep].astype(np.float64)
        a, s = process.scales(level)
        told = process.times(timestep, level)
        assert currency.time_at(process, float(np.log(a**2 / s**2))) == pytest.approx(told, rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_the_curve_is_the_error_of_the_picture(kind):
    """Of a network that predicts the target and adds an error that makes the picture wrong by 0.1 everywhere."""
    process, rng = Process(NoiseSchedule(), kind), np.random.default_rng(1)
    latents, noise = (paddle.to_tensor(rng.standard_normal((2, 4, 4, 4), np.float32)) for _ in range(2))

    class Model:
        def __init__(self):
            self.process, self.asked = process, iter(currency.LOG_SNR.tolist())

        def condition(self, input_ids):
            return {}

        def denoise(self, noisy, time):
            a, s = currency.scales_at(next(self.asked), process.is_flow)
            off = {"epsilon": -a / s, "v_prediction": -1 / s, "sample": 1, "flow": -1 / s}[kind]
            return process.target(latents, noise, (a, s)) + 0.1 * off

    batch = {"latents": latents, "noise": noise, "input_ids": None}
    np.testing.assert_allclose(currency.curve_of(Model(), [batch]), 0.01, rtol=0.02)


def test_where_nothing_is_tuned_yet_nothing_is_told(tmp_path):
    made = study.Study(tmp_path, {"plain": {}, "other": {}})
    assert made.summary()["rows"] == [] and made.differences("other") == []


def test_the_files_are_those_of_the_world_that_is_named(tmp_path):
    words = study.words_of({"learning_rate": 1.0}, study.Run("plain", 1, 1), tmp_path / "run", tmp_path / "world")
    assert words[words.index("--file_list") + 1] == str(tmp_path / "world/data/demo.filelist.list")
    words = study.words_of(
        {"learning_rate": 1.0, "vae_name_or_path": "pixels"}, study.Run("plain", 1, 1), tmp_path, tmp_path
    )
    assert words[words.index("--vae_name_or_path") + 1] == "pixels"


def test_what_tells_the_picture_itself_is_taken_at_its_word():
    process, sigma = Process(prediction_type="flow_sample"), np.float64(0.5)
    found = process.picture(process.prediction(3.0, 1.0, sigma), 1.0, (0.5, sigma))
    assert found == pytest.approx(3.0) and process.is_flow


def test_the_loss_is_the_error_of_the_velocity():
    snr = np.exp(currency.LOG_SNR)
    assert currency.weighted_mean(1 / (1 + snr)) == pytest.approx(1)


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=9), st.floats(-1, 1))
def test_what_all_seeds_share_does_not_widen_an_interval(values, shift):
    shifted = paired.interval([one + shift for one in values])
    assert np.subtract(shifted, paired.interval(values)) == pytest.approx([shift] * 3, abs=1e-9)


def test_intervals_are_corrected_for_looks_and_variants():
    values = [0.1, 0.2, 0.15, 0.12]
    alone, among = paired.judge(values, 1), paired.judge(values, 10)
    mean, low, high = paired.interval(values, 0.05 / len(paired.LOOKS))
    assert (alone["value"], alone["low"], alone["high"]) == (mean, low, high)
    assert among["low"] < low < high < among["high"]
    assert (
        alone["told_apart"] and paired.needs_more([1, -1, 1, 2], 1) and not paired.needs_more([1.0, 1.01, 0.99, 1.0], 1)
    )


def test_a_look_takes_no_more_seeds_than_it_says():
    assert paired.judge([1, 2, 3, 4, 100], 1) == paired.judge([1, 2, 3, 4], 1)


def test_samples_until_a_loss_lie_between_two_points():
    curve = [(10, 1.0), (20, 0.5), (30, 0.25)]
    assert paired.samples_until(curve, 0.5) == 20
    assert paired.samples_until(curve, 0.5**1.5) == pytest.approx(25)
    assert paired.samples_until(curve, 0.1) is None and paired.samples_until(curve, 2.0) == 10


def test_a_ratio_of_samples_turns_over_with_its_recipes():
    plain, faster = [(10, 1.0), (20, 0.5), (40, 0.25)], [(10, 0.5), (20, 0.25)]
    assert paired.samples_ratio(faster, plain) == 0.5
    assert paired.samples_ratio(plain, faster) == 2.0
    assert paired.samples_ratio(plain, plain) == 1.0
    slower = [(10, 1.0), (40, 0.5)]
    assert paired.samples_ratio(slower, plain) == 2.0


def test_a_recipe_beside_itself_is_seldom_told_apart():
    finals = np.exp(np.random.default_rng(0).normal(0, 0.1, 16))
    assert paired.false_alarms(finals, 200) <= 200 * 0.05 * 1.5


def test_pairing_takes_away_what_seeds_share():
    seeds = np.array([0.3, 0.5, 0.9])
    found = paired.unpaired_and_paired(seeds, seeds + [0.1, 0.11, 0.09])
    assert found["difference"] == pytest.approx(0.1) and found["paired"] < 0.03 < found["unpaired"]
    assert found["correlation"] > 0.99


@pytest.fixture
def small(tmp_path):
    made = study.Study(tmp_path, {"plain": {"learning_rate": 1}, "other": {"learning_rate": 1}})

    def write(variant, rate, seed, loss):
        path = study.Run(variant, rate, seed).path(tmp_path)
        path.parent.mkdir(exist_ok=True)
        result = {"flags": {"learning_rate": 1}, "losses": [[10, 1.0], [20, loss]], "curve": [loss], "scores": {}}
        path.write_text(json.dumps({**result, "cpu_seconds": 60.0}))

    return made, write


def test_rates_come_first_on_seeds_of_their_own(small):
    made, write = small
    assert {run.seed for run in made.wanted()} == set(study.TUNING_SEEDS) and len(made.wanted()) == 4 * len(study.RATES)
    for variant in made.variants:
        for rate in study.RATES:
            for seed in study.TUNING_SEEDS:
                write(variant, rate, seed, loss=abs(rate - 2) + 0.1)
    assert made.rate_of("other") == 2 and made.pairs("other") == []
    wanted = made.wanted()
    assert {run.rate for run in wanted} == {2} and not {run.seed for run in wanted} & set(study.TUNING_SEEDS)
    assert len([run for run in wanted if run.variant == "other"]) == paired.LOOKS[0]


def test_a_rate_that_is_given_is_not_tuned(small):
    made, write = small
    made.rate = 2.0
    assert {(run.rate, run.seed) for run in made.wanted() if run.variant == "other"} == {(2.0, s) for s in (1, 2, 3, 4)}
    write("plain", 2.0, 1, loss=0.5)
    write("other", 2.0, 1, loss=0.4)
    assert made.differences("other") == [pytest.approx(np.log(0.8))]


def test_seeds_are_added_until_a_variant_is_told_apart(small):
    made, write = small
    for variant, loss in (("plain", 0.5), ("other", 0.4)):
        for rate in study.RATES:
            for seed in study.TUNING_SEEDS:
                write(variant, rate, seed, loss)
        for seed in (1, 2, 3, 4):
            write(variant, study.RATES[0], seed, loss * (1 + 0.001 * seed * (variant == "other")))
    assert not [run for run in made.wanted() if run.variant == "other"]
    (row,) = [one for one in made.summary()["rows"] if one["variant"] == "other"]
    assert json.loads(json.dumps(made.summary())) == made.summary()
    assert row["difference"]["told_apart"] and row["difference"]["value"] == pytest.approx(np.log(0.8), abs=0.01)
    write("other", study.RATES[0], 4, 0.8)
    made.found.clear()
    wanted = [run.seed for run in made.wanted() if run.variant == "other"]
    assert wanted == [5, 6]


def test_runs_of_other_flags_are_refused(small):
    made, write = small
    write("plain", 1.0, 1, 0.5)
    made.variants["plain"] = {"learning_rate": 2}
    with pytest.raises(SystemExit, match="is of other flags; take another --out"):
        made.result(study.Run("plain", 1.0, 1))


@pytest.mark.parametrize("folder", [study.VARIANTS, study.VARIANTS / "captions"], ids=["all", "captions"])
def test_variants_are_recipes(tmp_path, folder):
    from ppldm.training.commands.train import read_recipe

    for name, flags in study.read_variants(None, folder).items():
        words = study.words_of(flags, study.Run(name, 2.0, 5), tmp_path, tmp_path)
        recipe = read_recipe(words[1:], True, None)
        assert recipe.training.seed == 5 and recipe.training.learning_rate == pytest.approx(2 * flags["learning_rate"])
    files = study.variant_files()
    assert max(len(path.read_text().splitlines()) for path in files.values()) <= 12
    both = [*study.VARIANTS.glob("*.yaml"), *study.METHODS.rglob("*.yaml")]
    assert len(files) == len(both), "two variants have one name"
    rows = json.loads((study.RESULTS / "study.json").read_text())["results"]["rows"]
    assert {row["variant"] for row in rows} <= files.keys()


def test_a_method_that_a_setting_names_has_its_ablation_beside_it():
    """But for the target of the plain recipe. An offset's flag has its name, and a strength."""
    settings = {"targets": "prediction_type", "weights": "loss_weighting", "levels": "timestep_sampling"}
    for folder in (*settings, "offsets"):
        for name in set(names(folder)) - {"v_prediction"}:
            flags = yaml.safe_load((study.METHODS / folder / f"{name}.yaml").read_text())["flags"]
            assert flags[settings.get(folder, name)] in (name, 0.1)


def test_pictures_are_graded_by_short_prompts_and_where_the_worlds_are_long_by_these_too(tmp_path, monkeypatch):
    from ppldm.demo.shapes_world.write import World

    asked = []

    def draw(model, tokenizer, prompts, *_, **__):
        asked.append(prompts)
        return [np.full((32, 32, 3), 240, np.uint8)] * len(prompts)

    monkeypatch.setattr("ppldm.diffusion.guided.draw", draw)
    model = SimpleNamespace(inputs={"posterior_noise": SimpleNamespace(shape=lambda *_: (4, 8, 8))}, tokenizer=None)
    (tmp_path / "data").mkdir()
    found = {}
    for captions in ("short", "long"):
        world = World(32, captions=captions)
        for split, held_out in (("seen", False), ("heldout", True)):
            lines = "".join(f"{prompt}\tseen\n" for prompt in world.prompts(held_out, 3))
            (tmp_path / f"data/prompts-{split}.txt").write_text(lines)
        found[captions] = study.graded(model, tmp_path, 0)
    short, again, long = asked
    assert short == again and len(short) == len(long) == 6 and min(map(len, long)) > max(map(len, short))
    names = {f"{split}.{score}" for split in ("seen", "held_out") for score in study.SCORES}
    assert {*found["short"]} == names and {*found["long"]} == names | {f"long.{name}" for name in names}
    assert {*found["long"].values()} == {0.0}

"""Averages made after a run are those that a run of the same batches has tracked."""

import json
import shutil
from pathlib import Path

import numpy as np
import paddle
import pytest
from command_line import parse_arguments
from tiny_model import load_pipeline

from ppldm.cli.main import run as command
from ppldm.families.ldm import LdmConfig
from ppldm.methods.averages.ema_posthoc import PowerDecay, exponent_of
from ppldm.networks.ema import ExponentialMovingAverage
from ppldm.training.averages.make import add_up, choose, combine, survey
from ppldm.training.averages.snapshots import SNAPSHOTS, Snapshot, SnapshotWriter, list_snapshots
from ppldm.training.prepare import prepare
from ppldm.training.train import run_loop
from ppldm.utils.errors import CheckpointError, ConfigError
from ppldm.utils.files import read_json

STEPS = 16


def train(tiny, folder, *stds, **changes):
    settings = {"max_steps": STEPS, "save_steps": STEPS // 2, "ema_posthoc_every": 1, **changes}
    run_loop(prepare(*parse_arguments([*tiny.flags(folder, **settings), "--ema_posthoc", *stds], True)))
    return folder


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    return train(tiny, tmp_path_factory.mktemp("made") / "run", "0.05", "0.1")


def arrays_of(folder):
    return {name: value.numpy() for name, value in load_pipeline(folder).state_dict().items()}


def distance(one, other, names):
    return np.sqrt(sum(np.square(one[name] - other[name], dtype=np.float64).sum() for name in names))


@pytest.mark.slow
def test_it_is_the_average_that_was_tracked(tiny, trained, tmp_path, capsys):
    """Against that of a second run, which tracks 0.07 and 0.15; the trained weights alone have moved."""
    direct = train(tiny, tmp_path / "direct", "0.07", "0.15", ema_posthoc_dtype="float32", save_total_limit=1)
    last, zero = arrays_of(trained / "pipeline"), {}
    for one in list_snapshots(direct)[-2:]:
        out = tmp_path / f"{one.std}"
        command(["ema", str(trained), "--std", str(one.std), "--out", str(out), "--json"])
        report = json.loads(capsys.readouterr().out)
        made, wanted = arrays_of(out), one.read()
        zero = {name: np.zeros_like(value) for name, value in wanted.items()}
        rounded = 2**-12 * 1.5 * distance(wanted, zero, wanted)  # in float16
        assert report["step"] == STEPS and report["error"] < 0.05
        assert distance(made, wanted, wanted) < report["error"] * distance(last, wanted, wanted) + rounded
        assert all((made[name] == last[name]).all() for name in made.keys() - wanted.keys())
        facts = read_json(out / "ppldm.json")
        assert facts["ema"] and facts["ema_std"] == one.std and facts["global_step"] == STEPS
        assert facts["samples_seen"] == 4 * STEPS and facts["example_prompt"].startswith("picture")
    assert len(list_snapshots(direct)) == 2 * STEPS  # save_total_limit takes none of them


@pytest.mark.slow
def test_a_run_that_goes_on_makes_the_same_snapshots(tiny, trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    shutil.rmtree(tmp_path / f"run/checkpoint-{STEPS}")
    for path in (tmp_path / "run" / SNAPSHOTS).glob(f"*-{STEPS}.*"):
        path.rename(path.with_name(path.name.replace(f"-{STEPS}", "-99")))  # of updates that will never be made
    train(tiny, tmp_path / "run", "0.05", "0.1")
    one, other = ({path.name: path.read_bytes() for path in Path(folder, SNAPSHOTS).iterdir()}
                  for folder in (trained, tmp_path / "run"))  # fmt: skip
    assert one == other and len(one) == 2 * STEPS
    with pytest.raises(CheckpointError, match="ema_posthoc .*0.05, 0.1.*, this run has .*0.05, 0.2"):
        train(tiny, tmp_path / "run", "0.05", "0.2")
    with pytest.raises(CheckpointError, match="holds no average of --ema_posthoc 0.2, which is tracked from the first"):
        train(tiny, tmp_path / "run", "0.05", "0.2", accept_changes="ema_posthoc")


@pytest.mark.slow
def test_what_a_run_can_make_is_listed(trained, capsys):
    command(["ema", str(trained)])
    table = capsys.readouterr().out
    assert "averages of 0.05 and 0.1, snapshots after 16 updates" in table and "after update 16, --std from" in table
    command(["ema", str(trained), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["tracked"] == [0.05, 0.1] and report["steps"] == list(range(1, STEPS + 1))


@pytest.mark.parametrize(("dtype", "rounding"), [("float16", 3 * 2**-12), ("float32", 1e-6)])
@pytest.mark.parametrize(("std", "step"), [(0.07, 100), (0.03, 80), (0.15, 60), (0.2, 100)])
def test_sums_of_files_are_the_closed_form(tmp_path, dtype, rounding, std, step):
    """Weights that jump about 2; the error of an average is that of its profile, and what the type rounds away."""
    values = 2 + np.random.default_rng(0).normal(size=(100, 4000)).astype(np.float32)
    weight = paddle.to_tensor(values[0])
    averages = {one: ExponentialMovingAverage({"w": weight}, PowerDecay(one)) for one in (0.05, 0.1)}
    writer = SnapshotWriter(tmp_path, averages, 4, dtype)
    for number, value in enumerate(values, 1):
        weight.set_value(value)
        for one in averages.values():
            one.update({})
        if writer.are_due(number, 100):
            writer.write(number)
    found = list_snapshots(tmp_path)
    coefficients, report = choose(found, std, step)
    power = exponent_of(std) + 1
    wanted = np.diff(np.minimum(np.arange(101) / step, 1) ** power) @ values
    off = np.sqrt(np.mean((add_up(found, coefficients)["w"] - wanted) ** 2))
    assert off < 1.1 * report["error"] * np.std(wanted) + rounding * 2 and report["error"] < 0.1


def snapshots(steps, skipped=0, stds=(0.05, 0.1)):
    return [Snapshot(Path(), std, step, step - skipped) for step in steps for std in stds]


@pytest.mark.parametrize("step", [200, 620, 1000])
def test_skipped_updates_do_not_count(step):
    found = snapshots(range(20, 1001, 20), skipped=10)
    coefficients, report = choose(found, 0.07, step)
    assert report["num_updates"] == step - 10 and report["step"] == step
    assert (coefficients == combine([(one.std, one.num_updates) for one in found], [(0.07, step - 10)])[0][:, 0]).all()


def test_what_cannot_be_made_well_is_refused():
    found = snapshots(range(100, 1001, 100))
    with pytest.raises(ConfigError, match="--std 0.01 at update 1000 would be .* off .*; choose --std from 0.03 to"):
        choose(found, 0.01, 1000)
    with pytest.raises(ConfigError, match="--std 0.05 at update 940 would be .* off .*--step 900, which has snapshots"):
        choose(found, 0.05, 940)
    for step in (0, 1001):
        with pytest.raises(ConfigError, match=f"--step {step}: there are snapshots up to update 1000"):
            choose(found, 0.07, step)


@pytest.mark.parametrize("count", [1, 12, 13, 100])
def test_a_table_has_the_last_step_and_fits_a_screen(count):
    report = survey(snapshots(range(10, 10 * count + 1, 10)))
    assert 10 * count in report["errors"] and len(report["errors"]) <= 12


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--std", "0.3"], "--std 0.3 must be above 0"), (["--step", "5"], "add --std"), ([], "holds no snapshots"),
     (["--std", "0.07"], "holds no snapshots; train with --ema_posthoc")],
)  # fmt: skip
def test_one_line_for_what_is_wrong(tmp_path, words, message):
    with pytest.raises((ConfigError, CheckpointError), match=message):
        command(["ema", str(tmp_path), *words])


@pytest.mark.parametrize("stds", [[0.05], [0.1, 0.1], [0.05, 0.05, 0.1], [0.05, 0.1, 0.2], []])
def test_two_are_tracked(stds):
    with pytest.raises(ConfigError, match="--ema_posthoc takes two different standard deviations"):
        LdmConfig(ema_posthoc=stds).check()

"""`ppldm evaluate --watch`: each checkpoint once, none half-written, until the run has ended."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import parse_arguments

from ppldm.diffusion.drawing import Drawing
from ppldm.evaluation import job as every_checkpoint
from ppldm.evaluation.job import Job
from ppldm.evaluation.measure import Networks, choose_metrics
from ppldm.inference.pictures.plan import SCALE, Plan
from ppldm.training.prepare import prepare
from ppldm.training.run_folder import has_finished, read_start
from ppldm.training.train import run_loop
from ppldm.utils.errors import ConfigError, ModelError
from ppldm.weights.folders import list_checkpoints

ROOT = Path(__file__).resolve().parents[2]


def make_job(tiny, **changes):
    wanted, left_out = choose_metrics(["frechet"], {})
    drawn = Plan([], 0, {SCALE: [1.0]}, Drawing(1, 1.0, "ddim"), seed=1, height=None, width=None, exact=False)
    return Job(tiny.file_list, 8, wanted, left_out, lambda cache: Networks({}, None, None, True, cache), None, 4, "",
               replace(drawn, **changes), 4, {}, False)  # fmt: skip


def train(tiny, folder, **changes):
    flags = tiny.flags(folder, **{"max_steps": 3, "save_steps": 1, "report_to": "visualdl", **changes})
    run_loop(prepare(*parse_arguments(flags, loop=True)))


@pytest.fixture
def polite(monkeypatch):
    monkeypatch.setattr(os, "nice", lambda _: None)  # for good, and of all that follows in this process


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("watched") / "run"
    train(tiny, folder)
    return folder


@pytest.fixture
def copy(run, tmp_path):
    return shutil.copytree(run, tmp_path / "run")


def lines(run):
    return [json.loads(line) for line in (run / "evaluation.jsonl").read_text().splitlines()]


def test_each_checkpoint_once_and_results_beside_the_runs_metrics(copy, tiny, polite, monkeypatch):
    before = (copy / "metrics.jsonl").read_bytes()
    found = every_checkpoint.watch_run(make_job(tiny), copy, copy / "evaluation", 2, None)
    assert [str(path.relative_to(copy)) for path in found] == ["evaluation/checkpoint-2/g1.json"]
    found = every_checkpoint.watch_run(
        make_job(tiny), copy, copy / "evaluation", 1, 0.01
    )  # the run has ended, and so does this
    assert sorted(path.parent.name for path in found) == ["checkpoint-1", "checkpoint-3"]
    assert [line["global_step"] for line in lines(copy)] == [1, 2, 3]
    for line in lines(copy):
        assert line["frechet_low"] <= line["frechet"] <= line["frechet_high"] and line["guidance_scale"] == 1.0
        assert (
            line["frechet"]
            == json.loads((copy / f"evaluation/checkpoint-{line['global_step']}/g1.json").read_text())["metrics"][
                "frechet"
            ]["value"]
        )
    assert (copy / "logs" / "evaluation" / "vdlrecords.ppldm.log").stat().st_size > 100
    assert (copy / "metrics.jsonl").read_bytes() == before
    monkeypatch.setattr(Job, "of_model", None)
    assert every_checkpoint.watch_run(make_job(tiny), copy, copy / "evaluation", 1, None) == {}
    with pytest.raises(ConfigError, match="holds another evaluation of a run .seed was 1 and is 2."):
        every_checkpoint.watch_run(make_job(tiny, seed=2), copy, copy / "evaluation", 1, None)


def test_a_checkpoint_of_a_run_that_began_anew_is_evaluated_anew(copy, tiny, polite):
    every_checkpoint.watch_run(make_job(tiny), copy, copy / "evaluation", 3, None)
    before = lines(copy)
    train(tiny, copy, seed=6, max_steps=3, save_steps=3, overwrite_output_dir=True)
    assert not (copy / "evaluation.jsonl").exists() and not (copy / "evaluation").exists()
    every_checkpoint.watch_run(make_job(tiny), copy, copy / "evaluation", 3, None)
    assert lines(copy)[0]["frechet"] != before[0]["frechet"]
    manifest = copy / "evaluation" / "checkpoint-3" / "g1.json"
    found = json.loads(manifest.read_text())
    found["of"]["weights"]["manifest"] += 1  # as of a checkpoint that another one took the place of
    manifest.write_text(json.dumps(found))
    assert len(every_checkpoint.watch_run(make_job(tiny), copy, copy / "evaluation", 3, None)) == 1


def test_the_averaged_weights_where_a_checkpoint_has_them(tiny, run, tmp_path, polite):
    train(tiny, tmp_path / "run", max_steps=1, use_ema=True)
    for folder, average in ((run, False), (tmp_path / "run", True)):
        out = tmp_path / f"out-{average}"
        found = every_checkpoint.watch_run(make_job(tiny), folder, out, 1, None)
        assert {result.of["weights"]["averaged"] for result in found.values()} == {average}


def test_a_checkpoint_that_is_removed_meanwhile_is_passed_over_and_a_damaged_one_is_an_error(
    copy, tiny, polite, monkeypatch, capfd
):
    of_model = Job.of_model

    def removing(self, model, *arguments):
        if model.name == "checkpoint-2":
            shutil.rmtree(model)
        return of_model(self, model, *arguments)

    monkeypatch.setattr(Job, "of_model", removing)
    found = every_checkpoint.watch_run(make_job(tiny), copy, copy / "evaluation", 1, 0.01)
    assert sorted(path.parent.name for path in found) == ["checkpoint-1", "checkpoint-3"]
    assert "checkpoint-2 is passed over: it was removed meanwhile" in capfd.readouterr().err
    shutil.rmtree(copy / "evaluation")
    state = copy / "checkpoint-1" / "model_state.pdparams"
    state.write_bytes(state.read_bytes()[:-1])
    with pytest.raises(ModelError, match="has changed or is cut short"):
        every_checkpoint.watch_run(make_job(tiny), copy, copy / "evaluation", 1, None)


def test_only_a_run_that_has_come_to_its_end_has_ended(tiny, run, tmp_path):
    assert read_start(run).finished and has_finished(run)
    shutil.copytree(run, tmp_path / "run")
    prepare(*parse_arguments(tiny.flags(tmp_path / "run", max_steps=5, save_steps=1), loop=True))  # goes on
    assert not has_finished(tmp_path / "run")


@pytest.mark.slow
def test_a_watcher_beside_a_run_that_keeps_one_checkpoint(tiny, tmp_path, polite):
    """The run is a process of its own; rotation takes most checkpoints away, at any moment."""
    flags = tiny.flags(tmp_path / "run", max_steps=24, save_steps=2, save_total_limit=1)
    command = [sys.executable, "examples/train_txt2img_laion400m_no_trainer.py", *flags]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        while not (tmp_path / "run" / "run.json").is_file():
            assert process.poll() is None
        every_checkpoint.watch_run(make_job(tiny), tmp_path / "run", tmp_path / "run" / "evaluation", 1, 0.05)
    assert process.returncode == 0
    steps = [line["global_step"] for line in lines(tmp_path / "run")]
    assert steps == sorted(set(steps)) and steps[-1] == 24
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["checkpoint-24"]

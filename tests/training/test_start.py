"""--overwrite_output_dir starts anew once: not for a job that is put back into the queue."""

import itertools
import json
import os
import signal
from types import SimpleNamespace

import pytest
from command_line import parse_arguments

from ppldm.training.commands.train import read_recipe
from ppldm.training.metrics import read_metrics
from ppldm.training.prepare import prepare
from ppldm.training.report import Reporter
from ppldm.training.run_folder import (
    Job,
    Start,
    begins_anew,
    checksum_of,
    find_job,
    next_start,
    note_stopped,
    read_start,
    refusals_undone,
    write_start,
)
from ppldm.training.train import run_loop, train_recipe
from ppldm.utils.errors import CheckpointError, ConfigError, Interrupted, OutputError, Preempted

SCHEDULERS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "AWS_BATCH_JOB_ID", "SGE_O_HOST", "PPLDM_JOB_ID")


@pytest.mark.parametrize(
    "environment, job",
    [
        ({}, None),
        ({"SLURM_JOB_ID": "7"}, Job("Slurm job 7")),
        ({"SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": "c", "SLURM_RESTART_COUNT": "0"}, Job("Slurm job 7.c")),
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}, Job("Slurm job 7", True)),
        ({"SLURM_JOB_ID": ""}, None),
        ({"PBS_JOBID": "12[3].server"}, Job("PBS job 12[3].server")),
        ({"LSB_JOBID": "5", "LSB_JOBINDEX": "2", "LSB_RESTART": "Y"}, Job("LSF job 5.2", True)),
        ({"LSB_JOBID": "5", "LSB_RESTART": "N"}, Job("LSF job 5")),
        ({"AWS_BATCH_JOB_ID": "a-b"}, Job("AWS Batch job a-b")),
        ({"JOB_ID": "3"}, None),  # anybody's variable
        ({"JOB_ID": "3", "SGE_O_HOST": "h", "RESTARTED": "1"}, Job("Grid Engine job 3.h", True)),
        ({"SLURM_JOB_ID": "7", "PPLDM_JOB_ID": "mine"}, Job("job mine")),
    ],
)
def test_jobs_by_their_environment(environment, job):
    assert find_job(environment) == job


JOB, OTHER, PUT_BACK = Job("Slurm job 7"), Job("Slurm job 8"), Job("Slurm job 8", was_put_back=True)


@pytest.mark.parametrize(
    "last, job, anew",
    [
        (None, None, True),
        (None, JOB, True),
        (None, PUT_BACK, False),  # whatever lies there, no requeue removes it
        (Start(None, "c"), None, True),  # an explicit second command, as ever
        (Start(None, "c", overwritten=True), None, True),
        (Start(JOB.name, "c", overwritten=True), JOB, False),
        (Start(JOB.name, "another", overwritten=True), JOB, False),
        (Start(JOB.name, "c", overwritten=False), JOB, True),  # asked for now for the first time
        (Start(JOB.name, "c", overwritten=True), OTHER, True),
        (Start(JOB.name, "c", overwritten=True), PUT_BACK, False),
        (Start(JOB.name, "c", overwritten=True), None, True),
        (Start(JOB.name, "c", stopped=True), OTHER, False),  # a job that submits its successor
        (Start(JOB.name, "another", stopped=True), OTHER, True),
        (Start(None, "c", stopped=True), None, False),  # a loop of the shell around status 75
        (Start(None, "another", stopped=True), None, True),
        (Start(JOB.name, "c", overwritten=True, clearing=True), JOB, True),
        (Start(JOB.name, "c", overwritten=True, clearing=True), PUT_BACK, True),
    ],
)
def test_when_it_starts_anew(last, job, anew):
    found, reason = begins_anew(last, job, "c")
    assert found is anew and bool(reason) is not anew


@pytest.mark.parametrize("job", [None, JOB])
@pytest.mark.parametrize("overwrites, anew, stopped", itertools.product([True, False], repeat=3))
def test_what_a_start_takes_over(job, overwrites, anew, stopped):
    last = Start(job.name if job else None, "c", overwritten=True, stopped=stopped)
    found = next_start(last, job, "c", overwrites, anew)
    assert found == Start(last.job, "c", overwrites or job is not None, stopped=stopped and not anew)
    assert next_start(last, OTHER, "d", False, False) == Start(OTHER.name, "d")
    assert next_start(None, None, "d", overwrites, anew) == Start(None, "d", overwrites)


def test_the_record_survives_what_it_must(tmp_path):
    assert read_start(tmp_path) is None
    note_stopped(tmp_path, True)  # nothing to note it in
    start = Start("Slurm job 7", "c", overwritten=True)
    write_start(tmp_path, start)
    assert read_start(tmp_path) == start
    note_stopped(tmp_path, True)
    assert read_start(tmp_path) == Start("Slurm job 7", "c", overwritten=True, stopped=True)
    note_stopped(tmp_path, False)
    assert read_start(tmp_path) == Start("Slurm job 7", "c", overwritten=True, finished=True)
    for content in ("", "[]", "{}", '{"job": null}'):
        (tmp_path / "start.json").write_text(content)
        assert read_start(tmp_path) is None
    assert checksum_of({"a": 1, "ppldm": "1"}) == checksum_of({"ppldm": "2", "a": 1}) != checksum_of({"a": 2})


def train(flags):
    run = prepare(*parse_arguments(flags, loop=True))
    run_loop(run)
    return run


@pytest.fixture
def stopping(monkeypatch):
    """A function: the next training is sent a signal after its first update, and stops after the second."""
    for name in SCHEDULERS:
        monkeypatch.delenv(name, raising=False)
    after_update, number = Reporter.after_update, []

    def send_after_one(self, step, *arguments):
        after_update(self, step, *arguments)
        if step == 1 and number:
            os.kill(os.getpid(), number.pop())

    monkeypatch.setattr(Reporter, "after_update", send_after_one)
    return number.append


def steps(folder):
    return [record["global_step"] for record in read_metrics(folder / "metrics.jsonl")]


def test_a_requeued_job_goes_on(tiny, tmp_path, stopping, monkeypatch, caplog):
    """The same command with --overwrite_output_dir: time limit, kill, a new job, a new job of a stopped run."""
    old = tiny.flags(tmp_path / "run", max_steps=3, learning_rate=1e-4)
    train(old)
    flags = [*tiny.flags(tmp_path / "run", max_steps=4, save_steps=1), "--overwrite_output_dir"]
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    stopping(signal.SIGUSR1)
    with pytest.raises(Preempted, match="stopped after update 2 of 4; the same command again goes on there"):
        train(flags)
    assert steps(tmp_path / "run") == [1, 2]  # the old run is gone
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert train(flags).start_step == 2
    assert "--overwrite_output_dir: the run in" in caplog.text and "Slurm job 7 did so at its first" in caplog.text
    assert steps(tmp_path / "run") == [1, 2, 3, 4]
    assert train(flags).start_step == 4  # put back by hand when it was done
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    monkeypatch.delenv("SLURM_RESTART_COUNT")
    stopping(signal.SIGTERM)
    with pytest.raises(Preempted):
        train(flags)
    assert steps(tmp_path / "run") == [1, 2]  # submitted again by hand, after its end: anew
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    assert train(flags).start_step == 2  # submitted by its predecessor's end
    assert "was stopped here, with status 75" in caplog.text


def test_without_a_scheduler_a_second_command_starts_anew(tiny, tmp_path, stopping):
    flags = [*tiny.flags(tmp_path / "run", max_steps=3), "--overwrite_output_dir"]
    stopping(signal.SIGINT)
    with pytest.raises(Interrupted, match="the same command again without --overwrite_output_dir goes on there"):
        train(flags)
    assert train(flags).start_step == 0
    stopping(signal.SIGTERM)
    with pytest.raises(Preempted, match="the same command again goes on there"):
        train(flags)
    assert train(flags).start_step == 2  # until bash train.sh; do [ $? = 75 ] || break; done
    assert train(flags).start_step == 0


def interrupted(_folder, ignore_errors=False):
    if not ignore_errors:  # as signs of ranks are removed, where there are none
        raise KeyboardInterrupt


def test_a_removal_that_was_interrupted_is_finished(tiny, tmp_path, monkeypatch, stopping):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    train(tiny.flags(tmp_path / "run", max_steps=2, save_steps=1))
    flags = [*tiny.flags(tmp_path / "run", max_steps=3), "--overwrite_output_dir"]
    with monkeypatch.context() as patch:
        patch.setattr("ppldm.training.run_folder.shutil.rmtree", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(flags)
    assert json.loads((tmp_path / "run" / "start.json").read_text())["clearing"]
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert train(flags).start_step == 0
    assert not (tmp_path / "run" / "checkpoint-2").exists()


def test_a_refused_start_leaves_no_trace(tiny, tmp_path):
    train(tiny.flags(tmp_path / "run", max_steps=1))
    before = (tmp_path / "run/start.json").read_text()
    assert read_start(tmp_path / "run").finished
    for folder, kind, changes in (
        ("run", CheckpointError, {"seed": 99}),
        ("new", ConfigError, {"tokenizer_name": "x"}),
    ):
        with pytest.raises(kind):
            train_recipe(read_recipe(tiny.flags(tmp_path / folder, max_steps=1, **changes), True, None), run_loop)
    assert (tmp_path / "run/start.json").read_text() == before
    assert not (tmp_path / "new").exists()


def test_what_another_process_holds_is_not_undone(tmp_path):
    """A start that found no folder and meets that of a run which was quicker."""
    folder = tmp_path / "run"
    with pytest.raises(OutputError), refusals_undone(SimpleNamespace(output_dir=folder, overwrite_output_dir=False)):
        folder.mkdir()
        write_start(folder, Start(None, "of the other"))
        raise OutputError("another process is writing")
    assert read_start(folder).command == "of the other"
    with pytest.raises(OutputError), refusals_undone(SimpleNamespace(output_dir=folder, overwrite_output_dir=False)):
        write_start(folder, Start(None, "of the other, later"))
        raise OutputError("another process is writing")
    assert read_start(folder).command == "of the other, later"

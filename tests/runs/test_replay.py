"""An update made again is that of the log, from any checkpoint; what is not, is said to be so."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from toy_runs import ROOT, change_row, seal, train

from ppldm.cli.main import run as run_command
from ppldm.runs.compare import describe_update, replay, replay_update
from ppldm.runs.read import open_run
from ppldm.utils.errors import CheckpointError, ConfigError


def files(folder) -> dict:
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*")}


@pytest.mark.parametrize(("step", "start", "last"), [(1, 0, 2), (4, 0, 4), (5, 4, 6), (8, 4, 8), (12, 8, 12)])
def test_an_update_is_that_of_the_log_to_the_bit(straight, step, start, last):
    before = files(straight)
    report = json.loads(json.dumps(replay_update(open_run(straight), step)))
    assert report["verdict"] == "the update of the log, to the bit" and report["machine"] == []
    assert (report["start"], report["updates_made"], report["log"]["last"]) == (start, last - start, last)
    assert {"loss", "grad_norm", "data_crc32", "loss_quarter_1"} <= report["log"]["values"].keys()
    assert len(report["samples"]) == 4
    assert np.isclose(np.mean([one["loss"] for one in report["samples"]]), report["loss"])
    assert files(straight) == before


def test_an_interval_that_a_checkpoint_cuts_is_whole(tiny, tmp_path):
    run = train(tmp_path / "run", tiny.file_list, max_steps=6, logging_steps=3, save_steps=2)
    report = replay_update(open_run(run), 3)
    assert (report["start"], report["log"]["first"], report["verdict"]) == (2, 1, "the update of the log, to the bit")


def test_one_row_and_its_picture(straight, tmp_path):
    run = open_run(straight)
    every = replay_update(run, 5)["samples"]
    row = every[2]["row"]
    report = replay_update(run, 5, row, tmp_path / "pictures")
    assert report["samples"] == [every[2]] and report["row_is_in_update"] == 5
    with Image.open(report["picture"]) as sheet:
        assert sheet.width > 100 and f"row {row}," in describe_update(report)
    missing = next(one["row"] for one in replay_update(run, 7)["samples"])
    with pytest.raises(ConfigError, match=f"--row {missing} is not in update 5, .*; in epoch 0 update 7 has it"):
        replay_update(run, 5, missing)


def test_what_the_run_no_longer_holds_is_said(straight, copy):
    for step in (0, 13):
        with pytest.raises(CheckpointError, match=f"has no update {step}; choose from 1 to 12"):
            replay_update(open_run(straight), step)
    (copy / "checkpoint-4/optimizer.pdopt").write_bytes(b"cut short")
    report = replay_update(open_run(copy), 6)
    assert report["start"] == 0 and report["verdict"] == "the update of the log, to the bit"


def test_relative_paths_are_those_of_the_folder_where_the_run_was_started(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tiny.folder)
    run = train(tmp_path / "run", "tiny.filelist", max_steps=2)
    monkeypatch.chdir(tmp_path)
    assert replay_update(open_run(run), 2)["verdict"] == "the update of the log, to the bit"
    assert Path.cwd() == tmp_path


def test_data_that_have_changed_since_are_not_taken_for_those_of_the_run(tiny, tmp_path):
    run = train(tmp_path / "run", change_row(tiny, tmp_path / "data", 7), max_steps=4, save_steps=2)
    shutil.copy(tiny.folder / "part-00000.gz", tmp_path / "data")
    for step in (1, 4):  # from the beginning, and from a checkpoint
        with pytest.raises(CheckpointError, match="was trained on other data: .*part-00000.gz"):
            replay_update(open_run(run), step)


@pytest.mark.parametrize("changed", [{"loss": 2.0}, {"data_crc32": 1}, {"grad_norm": None}])
def test_a_log_that_says_something_else_is_told(copy, changed):
    lines = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    lines[3] |= changed
    (copy / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    verdict = replay_update(open_run(copy), 8)["verdict"]
    assert verdict.startswith("other data" if "data_crc32" in changed else "not the update of the log: results differ")
    assert replay_update(open_run(copy), 6)["verdict"] == "the update of the log, to the bit"


@pytest.mark.parametrize("own, threads", [(None, "3"), ("5", "5")])
def test_the_command_computes_as_the_run_did_unless_told(copy, monkeypatch, own, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", own) if own else monkeypatch.delenv("OMP_NUM_THREADS")
    for checkpoint in copy.glob("checkpoint-*"):
        seal(checkpoint, machine={"OMP_NUM_THREADS": "3"})
    with pytest.raises(CheckpointError, match="999"):
        replay(str(copy), step=999)
    assert os.environ["OMP_NUM_THREADS"] == threads


def test_the_command(straight, capsys):
    run_command(["replay", str(straight), "--step", "3", "--json"])
    assert json.loads(capsys.readouterr().out)["verdict"] == "the update of the log, to the bit"
    run_command(["replay", str(straight), "--bisect", str(straight)])
    assert capsys.readouterr().out.startswith("the runs do not part")
    run_command(["compare", str(straight), str(straight)])
    assert capsys.readouterr().out.startswith("the same experiment, to the bit")
    for words in ([], ["--step", "1", "--bisect", "x"], ["--bisect", "x", "--row", "1"]):
        with pytest.raises(ConfigError):
            run_command(["replay", str(straight), *words])
    with pytest.raises(ConfigError, match="is not there; name a training's --output_dir"):
        run_command(["replay", str(straight / "nowhere"), "--step", "1"])


@pytest.mark.turn("what holds on one rank holds on two", 2)
@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_an_update_of_two_ranks_is_made_again_by_one(tiny, tmp_path, dropout):
    config = json.loads(Path(tiny.config("ldmbert")).read_text()) | {"dropout": dropout}
    (tmp_path / "ldmbert.json").write_text(json.dumps(config))
    launch = ("-m", "paddle.distributed.launch", "--nproc_per_node", "2", "--log_dir", str(tmp_path / "log"))
    words = tiny.flags(tmp_path / "run", text_encoder_config_file=tmp_path / "ldmbert.json", max_steps=3, save_steps=2,
                       per_device_train_batch_size=2, gradient_accumulation_steps=2)  # fmt: skip
    done = subprocess.run(
        [sys.executable, *launch, ROOT / "tests/helpers/law_run.py", "ldm", "loop", *words], cwd=ROOT, text=True,
        capture_output=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    report = replay_update(open_run(tmp_path / "run"), 3)
    assert report["log"]["data"] is None and (report["log"]["results"] or {"largest": 0})["largest"] < 1e-5
    assert report["start"] == 2 and len(report["samples"]) == 8
    assert all(one["caption"] == f"picture {one['row']}" for one in report["samples"] if one["caption"])

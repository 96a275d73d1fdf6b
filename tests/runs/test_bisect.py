"""Where two runs part is found, and the cause is named: a setting, a row, a weight, the kind of machine."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import paddle
import pytest
from formats import write_folder
from toy_runs import ROOT, change_row, flags, flip_weight, read_rows, seal, train

from ppldm.runs.compare import compare_runs, describe_parting, find_parting
from ppldm.runs.read import open_run
from ppldm.runs.remake import places_of, remade


def parting(one, other) -> dict:
    report = json.loads(json.dumps(find_parting(open_run(one), open_run(other))))
    assert describe_parting(report)
    return report


def cut_back(run, step: int) -> None:
    """As a run that was stopped after update `step`."""
    for folder in run.glob("checkpoint-*"):
        if int(folder.name.split("-")[1]) > step:
            shutil.rmtree(folder)


def test_the_same_run_again_does_not_part(straight, tiny, tmp_path):
    again = train(tmp_path / "run", tiny.file_list)
    assert parting(straight, again)["cause"] is None
    report = compare_runs(open_run(straight), open_run(again))
    assert report["same"] and report["verdict"] == "the same experiment, to the bit"
    one, other = report["runs"]
    assert all(one[name] == other[name] for name in ("settings", "data", "samples", "results", "weights"))


def test_means_over_other_updates_are_not_compared(straight, tiny, tmp_path):
    other = train(tmp_path / "run", tiny.file_list, logging_steps=3)
    report = compare_runs(open_run(straight), open_run(other))
    assert report["lines"]["compared"] == 0 and report["verdict"].startswith("nothing to compare: no line")
    assert report["checkpoint"] == {"step": 12, "difference": None} and parting(straight, other)["cause"] is None


def test_another_setting_is_named(straight, tiny, tmp_path):
    report = parting(straight, train(tmp_path / "run", tiny.file_list, learning_rate=0.02, max_steps=4))
    assert report["cause"] == "setting" and (report["first"], report["last"]) == (1, 2)
    assert "learning_rate is 0.01 and 0.02" in report["why"]


def test_a_changed_row_is_named_with_its_part_and_first_update(straight, tiny, tmp_path):
    other = train(tmp_path / "run", change_row(tiny, tmp_path / "data", 7))
    report = parting(straight, other)
    with remade(open_run(straight), 1) as again:
        step = next(step for step in range(1, 13) if 7 in (row for one in places_of(again, step) for _, row in one))
    assert report["cause"] == "data" and (report["first"], report["last"]) == (step - (step + 1) % 2, step + step % 2)
    assert "part-00000.gz" in report["why"][0]
    assert report["why"][1] == f"update {step} is the first to read it: row 7"


@pytest.mark.parametrize("flipped_is_first", [False, True])
def test_a_flipped_weight_is_named_and_whose_it_is(straight, tiny, copy, flipped_is_first):
    cut_back(copy, 4)
    flip_weight(copy / "checkpoint-4", "net.up.weight")
    train(copy, tiny.file_list)
    report = parting(copy, straight) if flipped_is_first else parting(straight, copy)
    assert report["cause"] == "weights" and (report["first"], report["last"]) == (1, 4)
    said = "\n".join(report["why"])
    assert "net.up.weight differs in 1 of" in said and "by up to 0.5 (1 of " in said
    assert f"{copy} went on from weights that were changed" in said and f"{straight} went on" not in said


def test_a_weight_that_was_flipped_after_the_checkpoint_is_the_other_run_s(straight, tiny, copy):
    """Both have the same checkpoint, and what one of them made of it is not what it makes."""
    cut_back(copy, 8)
    kept = shutil.copytree(copy / "checkpoint-8", copy.parent / "kept")
    flip_weight(copy / "checkpoint-8", "net.down.bias")
    train(copy, tiny.file_list)
    shutil.rmtree(copy / "checkpoint-8")
    shutil.move(kept, copy / "checkpoint-8")
    report = parting(straight, copy)
    assert report["cause"] == "weights" and (report["first"], report["last"]) == (9, 10)
    assert f"{copy} went on from weights that were changed" in "\n".join(report["why"])


def test_last_bits_of_another_kind_of_machine_are_its_own(straight, copy):
    """Simulated: results and weights of the copy differ in last bits, and it names another processor."""
    lines = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["loss"] = float(np.nextafter(np.float32(line["loss"]), np.float32(9)))
    (copy / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for folder in copy.glob("checkpoint-*"):
        state = paddle.load(str(folder / "model_state.pdparams"))
        state = {name: one * (1 + 2**-22) if isinstance(one, paddle.Tensor) else one for name, one in state.items()}
        paddle.save(state, str(folder / "model_state.pdparams"))
        manifest = json.loads((folder / "manifest.json").read_text())
        seal(folder, machine=manifest["machine"] | {"device": "Another CPU"})
    report = parting(straight, copy)
    assert report["cause"] == "machine" and "Another CPU" in report["why"][0] and report["last"] == 2
    verdict = compare_runs(open_run(straight), open_run(copy))["verdict"]
    assert verdict.startswith("the same experiment on machines of other kinds: results")


@pytest.mark.slow
def test_another_path_of_the_mathematics_is_another_kind_of_machine(straight, tiny, tmp_path):
    command = [sys.executable, ROOT / "tests/helpers/law_run.py", "toy", "loop"]
    settings = {"OMP_NUM_THREADS": "2", "MKL_DEBUG_CPU_TYPE": "", "MKL_CBWR": "COMPATIBLE", "PPLDM_NO_CPU_TUNING": "1"}
    done = subprocess.run(
        [*command, *flags(tmp_path / "run", tiny.file_list)], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, **settings, "PYTHONPATH": str(ROOT)}, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    report = parting(straight, tmp_path / "run")
    assert report["cause"] == "machine" and "OMP_NUM_THREADS is 1 and 2" in report["why"][0]


def test_a_weight_that_was_flipped_on_another_machine_is_no_last_bit(straight, tiny, copy):
    cut_back(copy, 4)
    flip_weight(copy / "checkpoint-4", "net.up.weight")
    train(copy, tiny.file_list)
    for folder in copy.glob("checkpoint-*"):
        seal(folder, machine={"device": "Another CPU"})
    assert parting(straight, copy)["cause"] == "weights"


def test_a_picture_that_was_changed_behind_its_name_is_data_too(straight, tiny, tmp_path):
    """Of a folder of pictures the names are recorded, and not their bytes: only what was read tells."""
    rows = read_rows(tiny.folder / "part-00000.gz")
    rows = [replace(row, meta={"key": f"{number:05d}"}) for number, row in enumerate(rows)]
    write_folder(tmp_path / "pictures", rows)
    (tmp_path / "all.filelist.list").write_text("all.filelist format=folder\n")
    (tmp_path / "all.filelist").write_text("pictures\n")
    one = train(tmp_path / "one", tmp_path / "all.filelist.list")
    shutil.copytree(tmp_path / "pictures", tmp_path / "kept/pictures")
    for name in ("all.filelist.list", "all.filelist"):
        shutil.copy(tmp_path / name, tmp_path / "kept")
    (tmp_path / "pictures/00007.png").write_bytes(rows[8].image)
    report = parting(one, train(tmp_path / "other", tmp_path / "all.filelist.list"))
    assert report["cause"] == "data" and report["why"][-1].startswith("what both read now is the same")
    report = parting(train(tmp_path / "third", tmp_path / "kept/all.filelist.list"), tmp_path / "other")
    assert report["cause"] == "data" and report["why"][-1].endswith("is the first to read it: row 7")

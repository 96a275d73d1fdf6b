"""The acceptance of a GPU: what it would run, what it says of each outcome; and it runs, with the CPU in its place."""

import importlib
import json
import math
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import parse_arguments

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "run_scripts/accept_gpu.sh"


@pytest.fixture(scope="module")
def accept():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "run_scripts"))
        yield importlib.import_module("accept_gpu")


@pytest.fixture
def settings(accept, tmp_path):
    return accept.Settings(tmp_path, accept.SIZES["tiny"], "gpu", 6)


def test_every_command_is_one_that_the_scripts_take(accept, settings):
    for case in accept.CASES:
        command = accept.train_command(case, settings)
        script = next(word for word in command if word.startswith("examples/"))
        assert (ROOT / script).exists()
        flags = command[command.index(script) + 1 :]
        _, _, training = parse_arguments(flags, loop=case.script == "no_trainer")
        assert training.per_device_train_batch_size * case.cards == settings.size.batch
        assert ("--devices 0,1" in " ".join(command)) == (case.cards > 1)
        assert training.save_steps < training.max_steps


def test_every_switch_that_needs_a_gpu_is_tried(accept):
    flags = {flag for case in accept.CASES for flag in case.flags}
    assert flags >= {"--bf16", "--fp16", "O2", "--enable_xformers_memory_efficient_attention", "--tf32",
                     "--cudnn_search", "--fused_adamw", "--to_static", "--sharding", "--recompute"}  # fmt: skip
    assert {case.script for case in accept.CASES if case.cards == 2} == {"trainer", "no_trainer"}
    assert {case.stop for case in accept.CASES} == {None, signal.SIGKILL, signal.SIGUSR1}
    names = [case.name for case in accept.CASES]
    assert len({accept.slug(case) for case in accept.CASES}) == len(names)
    for case in accept.CASES:
        assert names.index(case.reference) <= names.index(case.name)


def test_the_dry_run_prints_commands_that_a_shell_reads(tmp_path):
    done = subprocess.run(["bash", SCRIPT, "--dry-run", "--out", tmp_path / "new out"], capture_output=True, text=True,
                          env={**os.environ, "PPLDM_VENV": str(tmp_path / "venv")})  # fmt: skip
    assert done.returncode == 0, done.stderr
    commands = [shlex.split(line) for line in done.stdout.replace("\\\n", "").split("\n/")]
    assert sum("--devices" in command for command in commands) >= 4
    assert any(str(tmp_path / "new out/data") in command for command in commands)
    assert not (tmp_path / "new out").exists() and not (tmp_path / "venv").exists()


@pytest.mark.parametrize("flags, words", [
    ([], "no driver of a device is here"),
    (["--device", "npu"], "an Ascend NPU is not to be seen here"),
])  # fmt: skip
def test_a_machine_without_the_device_is_told_so(accept, tmp_path, capsys, monkeypatch, flags, words):
    monkeypatch.setattr(accept.devices, "seen_kinds", list)
    assert accept.main(["--out", str(tmp_path), *flags]) == 1
    assert capsys.readouterr().err == f"error: {words}; --device cpu tries the script itself\n"


@pytest.mark.parametrize("name", ["npu", "dcu", "gpu", "cpu"])
def test_the_device_is_what_the_driver_shows_or_what_is_asked_for(accept, tmp_path, capsys, monkeypatch, name):
    kind = accept.devices.KINDS[name]
    monkeypatch.setattr(accept.devices, "seen_kinds", lambda: [] if kind.is_cpu else [kind])
    flags = ["--device", "cpu"] if kind.is_cpu else []
    assert accept.main(["--out", str(tmp_path), "--dry-run", *flags]) == 0
    commands = [line for line in capsys.readouterr().out.splitlines() if "examples/" in line]
    assert len(commands) == len(accept.CASES) and all(f"--device {name} " in line for line in commands)
    launched = [line for line in commands if "distributed.launch" in line]
    assert len(launched) == sum(case.cards == 2 for case in accept.CASES)
    assert all(("--nproc_per_node 2 " if kind.is_cpu else "--devices 0,1 ") in line for line in launched)


def test_what_a_device_lacks_is_not_a_failure(accept, settings, tmp_path):
    npu = accept.Settings(tmp_path, settings.size, "npu", 1)
    losses = {"losses": [1.0], "on_device": True}
    assert accept.judge(losses, "error: --bf16: card (npu:0) has no bfloat16, says Paddle", npu, "")[0] == "not run"
    assert accept.judge(losses, "error: … needs a GPU; omit it on an Ascend NPU", npu, "")[0] == "not run"
    assert accept.judge(losses, None, npu, "--tf32 does nothing on an Ascend NPU")[0] == "no effect"
    assert "Paddle for an Ascend NPU" in accept.judge(losses | {"on_device": False}, None, npu, "")[1]
    assert accept.count_cards(accept.devices.CPU) == accept.count_cards(accept.devices.GPU) == 0


@pytest.mark.parametrize(
    ("losses", "reference", "gap"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.2], [1.0, 2.0], 0.1),
        ([0.9, 2.0], [1.0, 2.0], 0.1),
        ([1.0], [1.0, 2.0], math.inf),
        ([], [], math.inf),
        ([1.0, None], [1.0, 2.0], math.inf),
        ([1.0, math.nan], [1.0, 2.0], math.inf),
    ],
)
def test_the_difference_is_the_largest_of_any_update(accept, losses, reference, gap):
    assert accept.difference(losses, reference) == pytest.approx(gap)


def found(losses, outcome="passed", speed=10.0):
    return {"name": "x", "outcome": outcome, "why": "", "losses": losses, "images_per_second": speed}


def test_a_case_passes_up_to_its_bar_and_fails_beyond(accept):
    case = accept.Case("x", bar=0.01)
    reference = found([1.0, 1.0], speed=5.0)
    passed = accept.compare(found([1.0, 1.0099]), case, reference)
    assert passed["outcome"] == "passed" and passed["speed_ratio"] == 2.0
    failed = accept.compare(found([1.0, 1.02]), case, reference)
    assert failed["outcome"] == "failed" and "off by 0.02, more than 0.01" in failed["why"]
    assert accept.compare(found([1.0, None]), case, reference)["outcome"] == "failed"
    assert accept.compare(found([1.0, None]), accept.Case("plain"), None)["outcome"] == "failed"
    # Without a reference nothing is claimed of the difference.
    assert accept.compare(found([1.0]), case, found([1.0], "failed"))["difference"] is None


def test_a_run_that_fell_back_to_the_cpu_is_no_proof_of_a_gpu(accept, settings, tmp_path):
    lines = [
        {"global_step": step, "loss": 1.0, "images_per_second": step, "peak_memory_gb": 2.0} for step in range(1, 7)
    ]
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    figures = accept.read_figures(metrics)
    assert figures["images_per_second"] == 5 and figures["peak_memory_gb"] == 2.0
    outcome, why = accept.judge(figures, None, settings, "")
    assert outcome == "failed" and "ran on the CPU" in why
    metrics.write_text("".join(json.dumps(line | {"peak_device_memory_gb": 3.0}) + "\n" for line in lines))
    figures = accept.read_figures(metrics)
    assert accept.judge(figures, None, settings, "") == ("passed", "") and figures["peak_memory_gb"] == 3.0
    assert accept.judge(figures, "error: x", settings, "")[0] == "failed"
    figures["losses"].pop()
    assert accept.judge(figures, None, settings, "")[1] == "5 of 6 updates were logged"


def test_what_cannot_run_is_said_and_not_failed(accept, settings, monkeypatch):
    monkeypatch.setattr(accept, "count_cards", lambda kind: 1)
    monkeypatch.setattr(accept, "try_case", lambda case, settings, seconds: found([1.0]) | {"name": case.name})
    results = accept.run_all(accept.CASES, settings, minutes=1)
    for case, result in zip(accept.CASES, results, strict=True):
        assert result["outcome"] == ("not run" if case.cards == 2 else "passed")
    assert all(result["outcome"] == "not run" for result in accept.run_all(accept.CASES, settings, minutes=0))


def test_the_report_begins_with_a_readable_table(accept, settings):
    figures = {"difference": 1e-4, "bar": 2e-3, "peak_memory_gb": 3.2, "seconds": 40.0, "speed_ratio": 1}
    results = [found([1.0]) | figures,
               {"name": "y", "outcome": "not run", "why": "needs 2 cards, this machine has 1"}]  # fmt: skip
    report = accept.make_report(results, settings, {"devices": ["Card, driver 550.1"], "cores": 8})
    text = "\n".join(report["table"])
    assert list(report)[0] == "table" and json.loads(json.dumps(report)) == report
    assert "Card, driver 550.1" in text and "1 passed, 1 not run" in text and "needs 2 cards" in text
    assert "1.0e-04" in text and "3.20" in text and report["counts"]["failed"] == 0


@pytest.mark.night("the acceptance of a GPU, played on the CPU")
@pytest.mark.slow
def test_it_runs_with_the_cpu_in_the_place_of_the_gpu(tmp_path):
    chosen = ("plain again", "two cards, half the batch each", "killed, then resumed", "fused attention", "TF32")
    command = [sys.executable, ROOT / "run_scripts/accept_gpu.py", "--device", "cpu", "--size", "tiny", "--steps", "4",
               "--out", tmp_path / "out", "--only", *chosen]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert "\n".join(report["table"]) in done.stdout
    outcomes = {case["name"]: case["outcome"] for case in report["cases"]}
    assert outcomes == {"plain": "passed", **dict.fromkeys(chosen[:3], "passed"), "fused attention": "not run",
                        "TF32": "no effect"}  # fmt: skip
    for case in report["cases"]:
        if case["outcome"] == "passed":
            assert case["difference"] <= 1e-4 and len(case["losses"]) == 4
            assert case["images_per_second"] > 0 and case["peak_memory_gb"] > 0
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 1 and "holds an earlier run" in again.stderr

"""The quickstart with the real programs, at its smallest: stopped in each training, it goes on and draws."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = """#!/usr/bin/env bash
export PYTHONPATH={root}
exec {python} "$@"
"""

pytestmark = pytest.mark.slow


@pytest.fixture
def variables(tmp_path):
    """An environment that lib.sh takes for a finished one: this very Python."""
    python = tmp_path / "venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON.format(root=ROOT, python=sys.executable))
    python.chmod(0o755)
    (tmp_path / "venv/ppldm.device").write_text("cpu\n")
    variables = {**os.environ, "PPLDM_VENV": str(tmp_path / "venv"), "PYTHON": ""}
    program = f"source {ROOT}/run_scripts/lib.sh; decide_device; environment_stamp"
    stamp = subprocess.run(["bash", "-c", program], env=variables, capture_output=True, text=True, check=True).stdout
    (tmp_path / "venv/ppldm.stamp").write_text(stamp)
    return variables


STEPS = {"autoencoder": 60, "diffusion": 30}  # the first line of their metrics comes after 50 and 20


def command(out):
    steps = ["--autoencoder-steps", str(STEPS["autoencoder"]), "--steps", str(STEPS["diffusion"])]
    return ["bash", "run_scripts/quickstart.sh", *steps, "--out", str(out)]


def stop_in(stage: str, out: Path, variables: dict) -> str:
    """Start the command and press Ctrl-C once the stage has logged a line. What it said."""
    process = subprocess.Popen(
        command(out), cwd=ROOT, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    metrics, ends = out / stage / "metrics.jsonl", time.monotonic() + 900
    while process.poll() is None and time.monotonic() < ends and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=300)[1]
    assert process.returncode == 130, said
    return said


def test_stopped_in_both_trainings_it_goes_on_and_draws(tmp_path, variables):
    out = tmp_path / "out"
    for stage, steps in STEPS.items():
        said = stop_in(stage, out, variables)
        assert "the same command again goes on from what is finished" in said and "Traceback" not in said
        reached = [int(path.name.partition("-")[2]) for path in (out / stage).glob("checkpoint-*")]
        assert reached and max(reached) < steps
    last = subprocess.run(command(out), cwd=ROOT, env=variables, capture_output=True, text=True)
    assert last.returncode == 0, last.stderr
    assert last.stderr.count("done before") == 2 and (out / "pictures/grid.png").stat().st_size
    for stage, steps in STEPS.items():
        logged = [json.loads(line)["global_step"] for line in (out / stage / "metrics.jsonl").read_text().splitlines()]
        assert logged == sorted(set(logged)) and logged[-1] == steps
    again = subprocess.run(command(out), cwd=ROOT, env=variables, capture_output=True, text=True)
    assert again.returncode == 0 and again.stderr.count("done before") == 5

"""The quickstart with the real programs, at its smallest: stopped in its training, it goes on and draws."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from ppldm.cli.main import run
from ppldm.demo.quickstart import next_commands, quickstart
from ppldm.utils import stages
from ppldm.weights.folders import model_in

ROOT = Path(__file__).resolve().parents[2]
PYTHON = """#!/usr/bin/env bash
export PYTHONPATH={root}
exec {python} "$@"
"""
STEPS = 30  # the first line of the metrics comes after 20

pytestmark = pytest.mark.slow


@pytest.fixture
def variables(tmp_path, programs):
    """An environment that lib.sh takes for a finished one: this very Python."""
    python = tmp_path / "venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON.format(root=ROOT, python=programs / "python"))
    python.chmod(0o755)
    (tmp_path / "venv/ppldm.device").write_text("cpu\n")
    variables = {**os.environ, "PPLDM_VENV": str(tmp_path / "venv"), "PYTHON": ""}
    program = f"source {ROOT}/run_scripts/lib.sh; decide_device; environment_stamp"
    stamp = subprocess.run(["bash", "-c", program], env=variables, capture_output=True, text=True, check=True).stdout
    (tmp_path / "venv/ppldm.stamp").write_text(stamp)
    return variables


def stop_in_training(flags: list[str], variables: dict) -> str:
    """Start the script and press Ctrl-C once its training has logged a line. What it said."""
    with subprocess.Popen(
        ["bash", "run_scripts/quickstart.sh", *flags], cwd=ROOT, env=variables, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:  # fmt: skip
        said = []
        for line in process.stderr:
            said.append(line)
            if "INFO step 20 " in line:
                process.send_signal(signal.SIGINT)
    assert process.returncode == 130, "".join(said)
    return "".join(said)


def test_stopped_in_its_training_it_goes_on_and_draws(tmp_path, variables, monkeypatch, capsys):
    out = tmp_path / "out"
    flags = ["--steps", str(STEPS), "--processes", "1", "--out", str(out)]
    said = stop_in_training(flags, variables)
    assert "the same command again goes on from what is finished" in said and "Traceback" not in said
    (reached,) = ((int(path.name.partition("-")[2])) for path in (out / "diffusion").glob("checkpoint-*"))
    assert 20 <= reached < STEPS

    def run_here(stage):
        words = stage.command[stage.command.index("ppldm") + 1 :]
        run([*words, *(["--num-samples", "1"] if stage.name == "pictures" else [])])

    monkeypatch.setattr(stages, "run_stage", run_here)  # without the seconds of starting
    quickstart(flags)
    told = capsys.readouterr().err
    assert told.count("done before") == 1 and (out / "pictures/grid.png").stat().st_size
    assert all(command in told for command in next_commands(out))
    lines = (out / "diffusion/metrics.jsonl").read_text().splitlines()
    logged = [json.loads(line)["global_step"] for line in lines]
    assert logged == sorted(set(logged)) and logged[-1] == STEPS
    kept = json.loads((model_in(out) / "ppldm.json").read_text())
    assert (kept["guidance_scale"], kept["num_inference_steps"]) == (2, 20)
    assert (out / f"diffusion/samples/step-{STEPS:06d}-flow-euler-samples-2.0.png").is_file()
    quickstart(flags)
    assert capsys.readouterr().err.count("done before") == 4

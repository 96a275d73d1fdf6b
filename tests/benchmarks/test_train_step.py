import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.night("a benchmark from end to end")
@pytest.mark.slow
def test_the_benchmark_of_the_step_runs(tmp_path):
    command = [sys.executable, ROOT / "benchmarks/train_step.py", "--quick", "--json", tmp_path / "results.json"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environ)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results.json").read_text())["results"]["tiny"]
    overhead, settings = results["overhead"], results["settings"]
    assert overhead["share"] == pytest.approx(overhead["ours"]["cpu"] / overhead["bare"]["cpu"] - 1)
    assert settings["speedup"] == pytest.approx(settings["bare_without"] / settings["ours"])
    assert settings["threads"] != settings["threads_without"]
    assert len(results["data"]["shares"]) == 3 and all(0 <= share < 1 for share in results["data"]["shares"])
    assert "waited for data, 2 workers" in done.stdout

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.night("a benchmark from end to end")
@pytest.mark.slow
def test_the_benchmark_of_downloads_runs(tmp_path):
    command = [sys.executable, ROOT / "benchmarks/download.py", "--quick", "--json", tmp_path / "results.json"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    assert results[0]["name"] == "ppldm" and results[0]["rows_per_sec"] > 0
    # Photographs of the size that is asked for are not touched by anyone.
    assert len({result["mb_per_1000"] for result in results}) == 1

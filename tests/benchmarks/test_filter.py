import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.night("a benchmark from end to end")
def test_the_benchmark_of_filters_runs(tmp_path):
    command = [sys.executable, ROOT / "benchmarks/filter.py", "--rows", "1000", "--repeats", "1", "--engines", "duckdb"]
    done = subprocess.run(
        [*command, "--json", tmp_path / "results.json"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    runs = json.loads((tmp_path / "results.json").read_text())["results"]["runs"]
    assert [run["shuffle"] for run in runs] == [True, False] and all(run["rows_per_sec"] > 0 for run in runs)
    assert len({run["rows_out"] for run in runs}) == 1 and 150 < runs[0]["rows_out"] < 350

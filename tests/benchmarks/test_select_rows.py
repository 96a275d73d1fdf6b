import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.night("a benchmark from end to end")
def test_the_benchmark_of_selection_runs(tmp_path):
    command = [sys.executable, ROOT / "benchmarks/select_rows.py", "--rows", "20001", "--workers", "1"]
    done = subprocess.run(
        [*command, "--json", tmp_path / "results.json"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "results.json").read_text())["results"]
    assert (found["rows"], found["parts"]) == (20001, 3) and found["rows_per_second"] > 0
    # Chances of the fields: about 0.694² · 0.5 · 0.75 · 0.5 · 0.5.
    assert 0.02 < found["rows_selected"] / found["rows"] < 0.12

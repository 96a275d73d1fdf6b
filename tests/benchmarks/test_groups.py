import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.night("a benchmark from end to end")
def test_the_benchmark_of_groups_runs(tmp_path):
    command = [sys.executable, ROOT / "benchmarks/groups.py", "--rows", "300000", "--buckets", "5", "--steps", "50"]
    done = subprocess.run(
        [*command, "--json", tmp_path / "results.json"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "results.json").read_text())["results"]
    assert found["rows"] == 300_000 and found["bytes_a_row_beside_the_codes"] < 0.1
    measured = [name for name in found if name.startswith("ms_") and name[3] != "o"]
    assert measured and all(found[name]["median"] <= found[name]["most"] for name in measured)

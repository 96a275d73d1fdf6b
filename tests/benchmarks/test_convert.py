import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.night("a benchmark from end to end")
@pytest.mark.parametrize("flags", [[], pytest.param(["--commands"], marks=pytest.mark.slow)], ids=str)
def test_the_benchmark_of_convert_runs(tmp_path, flags):
    command = [sys.executable, ROOT / "benchmarks/convert.py", "--rows", "4", "--photographs", "2", "--repeats", "1"]
    done = subprocess.run(
        [*command, *flags, "--json", tmp_path / "results.json"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    assert results["rows"] == 4
    assert all(results[f"{name}_rows_per_sec"] > 0 for name in ("floor", "files", "webdataset"))
    assert ("ppldm convert" in results) == bool(flags)

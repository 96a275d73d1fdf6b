import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.night("a benchmark from end to end")
@pytest.mark.parametrize("name", ["folders", "foreign_rows"])
def test_the_benchmarks_of_formats_run(tmp_path, name):
    done = subprocess.run(
        [sys.executable, ROOT / f"benchmarks/{name}.py", "--quick", "--json", tmp_path / "results.json"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    if name == "folders":
        assert [(found["names"], found["rows"]) for found in results] == [(200, 100), (2000, 1000)]
        return
    assert all(table["ratio"] > 0 for tables in results["reading"].values() for table in tables.values())
    assert results["first use"]["own"]["copy_share"] == 0 < results["first use"]["gzip"]["copy_share"]

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.night("a benchmark from end to end")
@pytest.mark.slow
def test_the_benchmark_of_loaders_runs_and_the_pixels_agree(tmp_path):
    command = [sys.executable, ROOT / "benchmarks/loader.py", "--quick", "--json", tmp_path / "results.json"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    measured = {found["loader"] for found in results["loaders"]}
    assert measured >= {"usual", "ppldm lanczos", "ppldm area"}
    assert measured | set(results["missing"]) == measured | {"webdataset", "streaming"}
    assert all("pip install" in why and name in done.stdout for name, why in results["missing"].items())
    assert len(results["loaders"]) == len(measured) and all(
        found["samples_per_second"] > 0 for found in results["loaders"]
    )
    for differences in results["pixels"].values():
        assert differences["lanczos"] == {"mean": 0, "largest": 0} and 0 < differences["area"]["mean"] < 3

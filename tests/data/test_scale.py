"""400 million rows in 60,000 parts: links to one part, since only names and indexes count."""

import json
import os
import subprocess
import sys

import pytest

from ppldm.data.part import write_part

RUN = """
import json, re, sys
from ppldm.data.dataset import TextImageDataset
from ppldm.data.filelist import read_sources
from ppldm.data.order import Mix
from ppldm.data.sampler import StepSampler
from ppldm.utils.world import World

dataset = TextImageDataset(read_sources(sys.argv[1]), None, 16, (4, 2, 2), 0, pixels_only=True)
sampler = StepSampler(Mix(dataset.list_sizes, dataset.weights, 0), 100, 100, World(), 10**6, 10**7)
keys = next(iter(sampler))
read = [int(dataset[key]["row_ids"]) for key in keys]
# Not of getrusage, which counts what the parent had before exec.
peak = int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) >> 10
print(json.dumps({"rows": len(dataset), "read": read, "keys": [row for _, row in keys], "peak_mib": peak}))
"""


@pytest.mark.slow
def test_400_million_rows_start_and_resume_in_little_memory(tmp_path, make_rows):
    write_part(tmp_path / "one.gz", (make_rows(i % 3, i % 3 + 1)[0] for i in range(6667)))
    for i in range(60_000):
        os.symlink("one.gz", tmp_path / f"part-{i:05}.gz")
        os.symlink("one.gz.idx", tmp_path / f"part-{i:05}.gz.idx")
    (tmp_path / "all.filelist").write_text("".join(f"part-{i:05}.gz\n" for i in range(60_000)))
    run = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path / "all.filelist")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(run.stdout)
    assert found["rows"] == 60_000 * 6667 and found["read"] == found["keys"] and len(set(found["keys"])) == 100
    assert found["peak_mib"] < 1024

"""400 million rows in 60,000 parts: links to one part, since only names, indexes and columns count."""

import json
import os
import subprocess
import sys

import pytest

from ppldm.data.formats.part import write_part

pytestmark = pytest.mark.cold

RUN = """
import json, re, sys, time
from ppldm.data.dataset import TextImageDataset
from ppldm.data.inputs import Pixels
from ppldm.data.filelist import read_sources
from ppldm.data.order import Mix
from ppldm.data.order import StepSampler
from ppldm.data.select.selection import select_rows
from ppldm.data.select.expression import parse_where
from ppldm.utils.processes.ranks import World

if __name__ == "__main__":
    began = time.perf_counter()
    sources = read_sources(sys.argv[1])
    found = {"seconds_to_find_parts": time.perf_counter() - began}
    for name, where in (("all", None), ("where", parse_where("key != '1' and width < 22"))):
        began = time.perf_counter()
        selection = select_rows(sources, where, 16, 2)
        dataset = TextImageDataset(sources, {"pixel_values": Pixels()}, 16, 0, selection=selection)
        sampler = StepSampler(Mix(dataset.list_sizes, dataset.weights, 0), 100, 100, World(), 10**6, 10**7)
        keys = next(iter(sampler))
        seconds = time.perf_counter() - began
        read = [int(dataset[key]["row_ids"]) for key in keys]
        asked = [dataset.selection[place] for _, place in keys]
        found[name] = {"rows": len(dataset), "read": read, "asked": asked, "seconds": seconds}
    # Not of getrusage, which counts what the parent had before exec.
    found["peak_mib"] = int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) >> 10
    print(json.dumps(found))
"""


@pytest.mark.night("time and memory at scale")
@pytest.mark.slow
def test_400_million_rows_start_and_resume_in_little_memory(tmp_path, make_rows, capsys):
    write_part(tmp_path / "one.gz", (make_rows(i % 3, i % 3 + 1)[0] for i in range(6667)))
    for i in range(60_000):
        for suffix in ("", ".idx", ".columns"):
            os.symlink(f"one.gz{suffix}", tmp_path / f"part-{i:05}.gz{suffix}")
    (tmp_path / "all.filelist").write_text("".join(f"part-{i:05}.gz\n" for i in range(60_000)))
    (tmp_path / "run.py").write_text(RUN)
    run = subprocess.run(
        [sys.executable, str(tmp_path / "run.py"), str(tmp_path / "all.filelist")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    for name in ("all", "where"):
        seen = found[name]
        assert seen["read"] == seen["asked"] and len(set(seen["read"])) == 100
        with capsys.disabled():
            print(f"\n{name}: {seen['rows']:,} of {60_000 * 6667:,} rows in {seen['seconds']:.1f} s", end="")
    with capsys.disabled():
        print(f"\nparts found in {found['seconds_to_find_parts']:.1f} s, {found['peak_mib']} MiB at most")
    assert found["all"]["rows"] == 60_000 * 6667
    # Of three rows of a part the second has key 1 and the third is 22 pixels wide.
    assert found["where"]["rows"] == 60_000 * 2223 and all(row % 6667 % 3 == 0 for row in found["where"]["read"])
    assert found["peak_mib"] < 1024

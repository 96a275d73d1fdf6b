"""Reading costs the same memory after a hundred thousand rows as after ten thousand."""

import re
from pathlib import Path

import pytest

from ppldm.data.loader import BatchLoader
from ppldm.data.order import Mix, StepSampler
from ppldm.utils.processes.ranks import World

pytestmark = pytest.mark.cold

BATCH = 100
ALLOWED_GROWTH_KB = 6 << 10


def read_rss_kb(pid) -> int:
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])


@pytest.mark.night("time and memory at scale")
@pytest.mark.slow
def test_memory_does_not_grow_over_100_000_rows(make_dataset, make_sources, new_children):
    dataset = make_dataset(make_sources([60] * 100), resolution=8)
    sampler = StepSampler(Mix(dataset.list_sizes, None, 7), BATCH, BATCH, World(), 0, 1000)
    after = {}
    for number, batch in enumerate(BatchLoader(dataset, sampler, 1), start=1):
        assert len(batch["pixel_values"]) == BATCH
        if number in (100, 990):
            (worker,) = new_children()
            after[number] = [read_rss_kb("self"), read_rss_kb(worker.pid)]
    assert number == 1000
    growth = [late - early for early, late in zip(*after.values(), strict=True)]
    assert max(growth) < ALLOWED_GROWTH_KB, (after, growth)

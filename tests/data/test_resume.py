"""Runs killed at random points see the rows that a run which was never killed sees."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from ppldm.data.order import Mix

# Imports paddle once, then forks a process for each rank of each run that a line of stdin asks for. A rank goes on at a
# step and writes its row ids, a line for each step, when the step's batches are in.
RUN = """
import json, os, signal, sys
from ppldm.data.dataset import TextImageDataset
from ppldm.data.inputs import Pixels
from ppldm.data.filelist import read_sources
from ppldm.data.loader import BatchLoader
from ppldm.data.order import Mix
from ppldm.data.order import StepSampler
from ppldm.utils.processes.ranks import World

def run(filelist, log, start, rank, ranks, workers, steps):
    dataset = TextImageDataset(read_sources(filelist), {"pixel_values": Pixels()}, 16, 7)
    mix = Mix(dataset.list_sizes, dataset.weights, 7)
    sampler = StepSampler(mix, 8, 2, World(rank, ranks), start, steps)
    batches = iter(BatchLoader(dataset, sampler, workers))
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for step in range(start, steps):
        ids = [str(row) for _ in range(8 // ranks // 2) for row in next(batches)["row_ids"].numpy().tolist()]
        os.write(file, (" ".join([str(step), *ids]) + "\\n").encode())

for line in sys.stdin:
    arguments = json.loads(line)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    pid = os.fork()
    if not pid:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            run(*arguments)
        finally:
            os._exit(0)
    print(pid, flush=True)
"""
STEPS = 15  # of 8 rows: three epochs of 40


@pytest.fixture(scope="module")
def starter():
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", RUN], env=environ, **pipes) as process:

        def start(*arguments) -> int:
            process.stdin.write(json.dumps(arguments) + "\n")
            process.stdin.flush()
            return int(process.stdout.readline())

        yield start
        process.stdin.close()


def is_running(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


def finished_steps(folder, first, ranks):
    """The rows of the steps from `first` on that all ranks finished, rank after rank."""
    logs = []
    for rank in range(ranks):
        path = folder / f"log-{first}-{rank}"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        logs.append([line.split(" ")[1:] for line in lines])
    return [[int(row) for rows in step for row in rows] for step in zip(*logs, strict=False)]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("workers", [0, 1, 4])
def test_killed_and_resumed_runs_see_the_same_rows(tmp_path, make_dataset, make_sources, starter, ranks, workers):
    dataset = make_dataset(make_sources([11, 9], [20]))
    _, rows = Mix(dataset.list_sizes, None, 7).samples(0, 8 * STEPS)
    # Killed, resumed as it was, killed again, resumed with other ranks and workers.
    runs = [(ranks, workers), (ranks, workers), ({1: 2, 2: 4, 4: 1}[ranks], {0: 1, 1: 4, 4: 0}[workers])]
    seen, chance = [], random.Random(str(runs))
    for number, (ranks, workers) in enumerate(runs):
        first = len(seen)
        pids = [
            starter(
                str(tmp_path / "train.filelist.list"),
                str(tmp_path / f"log-{first}-{rank}"),
                first,
                rank,
                ranks,
                workers,
                STEPS,
            )
            for rank in range(ranks)
        ]
        wanted = chance.randint(1, 4) if number < len(runs) - 1 else STEPS
        while len(finished_steps(tmp_path, first, ranks)) < wanted and any(map(is_running, pids)):
            time.sleep(0.002)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while any(map(is_running, pids)):
            time.sleep(0.002)
        seen += finished_steps(tmp_path, first, ranks)
    assert [row for step in seen for row in step] == rows.tolist()
    assert all(sorted(rows[epoch * 40 : epoch * 40 + 40].tolist()) == list(range(40)) for epoch in range(3))

"""Killed at any moment, the same command comes to the same data."""

import os
import random

import pytest
from dataset_files import SETS
from dataset_server import environment, serving
from forking import forking, kill, stop_when

_IMPORTS = """
from pathlib import Path
from dataclasses import replace
import ppldm.prepare.convert.convert, ppldm.prepare.datasets.extract, duckdb, requests, huggingface_hub
from ppldm.prepare.datasets import fetch, get
from ppldm.prepare.datasets.entry import find_entry

fetch._FIRST_WAIT_SECONDS = 0.0
get.run_stage = lambda stage, stdout=None: None


def go(out):
    get.get_dataset(get.Request(find_entry("journeydb"), "small", Path(out), num_workers=1))
"""


def settled(out) -> int:
    """How many files have come, in all stages, whole or in part."""
    return sum(len(names) for _, _, names in os.walk(out))


def data_of(out) -> dict:
    return {path.name: path.read_bytes() for path in sorted((out / "data/parts").glob("*"))}


@pytest.mark.turn("a killed command goes on", 1)
@pytest.mark.slow
def test_killed_at_twenty_moments(tmp_path):
    with serving(SETS["journeydb"][0]()) as server:
        server.gated, server.drops = {"JourneyDB/JourneyDB"}, 1
        os.environ.update(environment(server, tmp_path / "home", server.token))
        with forking(_IMPORTS, tmp_path / "log") as start:
            _, wait = start(str(tmp_path / "whole"))
            assert wait() == 0
            whole, total = data_of(tmp_path / "whole"), settled(tmp_path / "whole")
            moments = random.Random(15)
            for number in range(20):
                out, wanted = tmp_path / f"out{number // 5}", moments.randrange(1, total)
                pid, wait = start(str(out))
                stop_when(pid, lambda out=out, wanted=wanted: settled(out) >= wanted)
                kill(pid)
                wait()
            for out in sorted(tmp_path.glob("out*")):
                _, wait = start(str(out))
                assert wait() == 0 and data_of(out) == whole
                assert not [path for path in out.rglob("*") if path.name.endswith((".part", ".part.json", ".tmp"))]

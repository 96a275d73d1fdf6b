"""`world(files)`: a server of the sources, as this process sees the hub and all hosts."""

import huggingface_hub.constants
import pytest
from dataset_server import environment, serving

from ppldm.prepare.datasets import fetch as fetching
from ppldm.prepare.datasets import get as getting


@pytest.fixture
def world(monkeypatch, tmp_path):
    monkeypatch.setattr(fetching, "_FIRST_WAIT_SECONDS", 0.0)
    monkeypatch.setattr(getting, "run_stage", lambda stage, stdout=None: None)
    opened = []

    def start(files):
        opened.append(serving(files))
        server = opened[-1].__enter__()
        for name, value in environment(server, tmp_path / "home", server.token).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
        return server

    yield start
    for one in opened:
        one.__exit__(None, None, None)

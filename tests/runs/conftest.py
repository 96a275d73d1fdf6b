"""A run that nothing went wrong with, to be looked at and copied."""

import shutil
from pathlib import Path

import pytest
from toy import registered_toy
from toy_runs import train


@pytest.fixture(autouse=True, scope="module")
def registered():
    with registered_toy():
        yield


@pytest.fixture(scope="module")
def straight(registered, tiny, tmp_path_factory) -> Path:
    """12 updates, a line of the log every 2, a checkpoint every 4."""
    return train(tmp_path_factory.mktemp("straight") / "run", tiny.file_list)


@pytest.fixture
def copy(straight, tmp_path) -> Path:
    """Another folder with the same run."""
    return Path(shutil.copytree(straight, tmp_path / "copy"))

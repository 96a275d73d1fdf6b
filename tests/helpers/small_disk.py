"""A file system of a few megabytes, which a test can fill."""

import os
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, size: str = "4m"):
    """`folder`, made, as a file system of that size of its own while the block runs; the test is skipped where that
    needs more rights."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs more rights")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill(folder: Path, left: int) -> Path:
    """A file that takes all of a file system but `left` bytes."""
    filler, state = folder / "filler", os.statvfs(folder)
    with open(filler, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, state.f_bavail * state.f_frsize - left)
    return filler

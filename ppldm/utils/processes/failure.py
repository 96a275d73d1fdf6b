"""When a rank failed, left for the launcher, which blames the first.

The ranks that wait for the one that failed lose their connection and fail too, and may well be gone before it. So each
notes the moment before it lets go of its connections. A rank that is killed can note nothing.
"""

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from ..variables import read

FOLDER_VARIABLE = "PPLDM_FAILURES"  # the folder that the launcher made for the notes


def note_failure(rank: int) -> None:
    """Note that this rank fails now. Without a launcher of ours, or where nothing can be written, nothing happens."""
    if folder := read(FOLDER_VARIABLE):
        with suppress(OSError):
            Path(folder, str(rank)).write_text(repr(time.monotonic()))


def end_process(rank: int, text: str):
    """End this process at once, from any of its threads: one line on stderr, exit status 1."""
    note_failure(rank)
    sys.stderr.write(f"error: {text}\n")
    sys.stderr.flush()
    os._exit(1)


def failure_time_sec(folder: str | Path, rank: int) -> float:
    """The moment that the rank noted, by the clock of this machine since it was started; infinity where it did not."""
    try:
        return float(Path(folder, str(rank)).read_text())
    except (OSError, ValueError):
        return float("inf")

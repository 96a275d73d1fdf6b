"""Which processes run, and what they say of it."""

import os
import select
from pathlib import Path


def running(words) -> list[str]:
    """The command lines in which `words` stand."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_text().replace("\0", " ")
        except OSError:  # it has ended
            continue
        found += [line] if str(words) in line else []
    return found


def hear(fifo, seconds: float) -> bytes:
    """What a process writes into it. Fails where nothing comes, as of one that has ended."""
    with open(os.open(fifo, os.O_RDWR), "rb", buffering=0) as pipe:
        assert select.select([pipe], [], [], seconds)[0], f"nobody wrote into {fifo} within {seconds:.0f} s"
        return pipe.read(4096)

"""Rows whose noise is not a number, as a function and as a script: python poison.py loop|trainer ROWS FACTS [flags].

ROWS is a comma-separated list. Each rank writes its weights' sum of bits and the error it ended with to FACTS-<rank>.
"""

import json
import sys
import zlib
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from ppldm.data.dataset import TextImageDataset


@contextmanager
def poisoned(rows: list[int]):
    """Inside the block, every data set gives NaN as the noise of these rows."""
    make_batch = TextImageDataset.make_batch

    def make(self, *arguments):
        batch = make_batch(self, *arguments)
        batch["noise"][np.isin(batch["row_ids"], rows)] = np.nan
        return batch

    TextImageDataset.make_batch = make
    try:
        yield
    finally:
        TextImageDataset.make_batch = make_batch


def main(kind: str, rows: str, facts: str, *flags: str) -> None:
    from command_line import parse_arguments

    from ppldm.training.prepare import prepare
    from ppldm.training.train import run_loop
    from ppldm.training.trainer import run_trainer
    from ppldm.utils.errors import TrainingError

    run = prepare(*parse_arguments([*flags, "--do_train"], kind == "loop"))
    ended = None
    with poisoned([int(row) for row in rows.split(",")]):
        try:
            (run_loop if kind == "loop" else run_trainer)(run)
        except TrainingError as error:
            ended = str(error)
    bits = zlib.crc32(b"".join(p.numpy().tobytes() for p in run.state.model.parameters()))
    Path(f"{facts}-{run.world.rank}").write_text(json.dumps({"weights": bits, "ended": ended}))
    sys.exit(0 if ended is None else 1)


if __name__ == "__main__":
    main(*sys.argv[1:])

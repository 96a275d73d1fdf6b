"""A run whose disk fails on rank 1, as a script: python failing_disk.py loop|trainer [flags].

From the 12th read on, every read of a part gives EIO, in loader processes too: they are forked.
"""

import errno
import itertools
import os
import sys

from ppldm.utils.entry import entry
from ppldm.utils.processes.ranks import World


def main(kind: str, *flags: str) -> None:
    from command_line import parse_arguments

    from ppldm.training.prepare import prepare
    from ppldm.training.train import run_loop
    from ppldm.training.trainer import run_trainer

    run = prepare(*parse_arguments([*flags, "--do_train"], kind == "loop"))
    pread, reads = os.pread, itertools.count(1)

    def fail(*place):
        if World.detect().rank == 1 and next(reads) >= 12:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(*place)

    os.pread = fail
    (run_loop if kind == "loop" else run_trainer)(run)


if __name__ == "__main__":
    with entry():
        main(*sys.argv[1:])

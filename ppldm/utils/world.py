"""Which of how many processes this is, as plain numbers: a laptop test can be rank 37 of 64."""

import os
import time
from dataclasses import dataclass

from .rank_watch import waiting


@dataclass(frozen=True)
class World:
    """Rank `rank` of `size` processes. Only `detect` looks at the machine."""

    rank: int = 0
    size: int = 1

    def __post_init__(self):
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} is not in [0, {self.size})")

    @property
    def is_main(self) -> bool:
        """True on the one process that writes logs and checkpoints."""
        return self.rank == 0

    @classmethod
    def detect(cls) -> "World":
        """From the variables that `paddle.distributed.launch` sets for each process."""
        return cls(int(os.environ.get("PADDLE_TRAINER_ID", 0)), int(os.environ.get("PADDLE_TRAINERS_NUM", 1)))


_calls = 0  # of `barrier` in this process


def barrier(world: World) -> None:
    """A barrier that waits as long as `watch_ranks` lets it; every rank must call it the same number of times.

    Paddle's collectives on CPUs (gloo) fail after 30 seconds: a rank must not be in one while another one, as a rule
    the main one, saves a large checkpoint or waits for a lock. Here counts go through the key-value store of rank 0,
    which is the last to leave: the store may end with it. Imports paddle, whose communication must have been started.
    """
    global _calls
    if world.size == 1:
        return
    _calls += 1
    with waiting(world):
        _count_up("ppldm/arrived", 1, _calls * world.size)
        if world.is_main:
            _count_up("ppldm/left", 0, _calls * (world.size - 1))
        else:
            _count_up("ppldm/left", 1, 0)


def _count_up(key: str, own: int, expected: int) -> None:
    """Add to a count that all ranks share, and wait until it is as high as `expected`."""
    from paddle.base import core

    store, pause = core.create_or_get_global_tcp_store(), 0.001
    count = store.add(key, own)
    while count < expected:
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
        count = store.add(key, 0)

"""What ranks do together besides their updates: wait for each other, and see that they hold the same parameters."""

import time

import numpy as np
import paddle
from paddle.base import core

from ..utils.errors import TrainingError
from ..utils.world import World

_INTEGERS = {1: "int8", 2: "int16", 4: "int32", 8: "int64"}  # by bytes of an element


_calls = 0  # of `meet` in this process


def meet(world: World) -> None:
    """A barrier that waits as long as it takes; every rank must call it the same number of times.

    Paddle's collectives on CPUs (gloo) fail after 30 seconds: a rank must not be in one while another one, as a rule
    the main one, saves a large checkpoint or waits for a lock. Here counts go through the key-value store of rank 0,
    which is the last to leave: the store may end with it.
    """
    global _calls
    if world.size == 1:
        return
    _calls += 1
    _count_up("ppldm/arrived", 1, _calls * world.size)
    if world.is_main:
        _count_up("ppldm/left", 0, _calls * (world.size - 1))
    else:
        _count_up("ppldm/left", 1, 0)


def _count_up(key: str, own: int, expected: int) -> None:
    """Add to a count that all ranks share, and wait until it is as high as `expected`."""
    store = core.create_or_get_global_tcp_store()
    count = store.add(key, own)
    while count < expected:
        time.sleep(0.02)
        count = store.add(key, 0)


@paddle.no_grad()
def checksums(parameters: dict) -> paddle.Tensor:
    """One number for each of the named parameters, [P] int64: its bits as integers, added up modulo 2^64.

    A sum of integers has no rounding and no order, so that equal bits give equal numbers on every device.
    """
    sums = [p.detach().view(_INTEGERS[p.element_size()]).sum(dtype="int64") for p in parameters.values()]
    return paddle.stack(sums)


def check_ranks(parameters: dict, step: int, world: World) -> None:
    """Raises TrainingError on every rank where a parameter differs between ranks: which, on which, after which update.

    They never should: after each update every rank has applied the same averaged gradient to the same values.
    """
    if world.size == 1:
        return
    gathered: list = []
    paddle.distributed.all_gather(gathered, checksums(parameters))
    difference = first_difference(list(parameters), np.stack([one.numpy() for one in gathered]))
    if difference:
        name, ranks = difference
        raise TrainingError(
            f"after update {step}, {name} on {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))} "
            f"differs from the others' of {world.size}; go on from the last checkpoint, and if it comes again "
            "look for a device with faulty memory"
        )


def first_difference(names: list[str], sums: np.ndarray) -> tuple[str, list[int]] | None:
    """The first parameter that differs, and the ranks that do not hold what most hold; None where all are equal.

    `sums` is [ranks, P]. Where there is no majority, the lowest rank counts as right.
    """
    columns = np.flatnonzero((sums != sums[0]).any(axis=0))
    if not len(columns):
        return None
    held = sums[:, columns[0]].tolist()
    usual = max(held, key=lambda value: (held.count(value), -held.index(value)))
    return names[columns[0]], [rank for rank, value in enumerate(held) if value != usual]

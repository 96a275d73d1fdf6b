"""Do all ranks hold the same parameters?"""

import numpy as np
import paddle

from ...utils.errors import TrainingError
from ...utils.processes.rank_watch import waiting
from ...utils.processes.world import World
from ...utils.text import name_ranks

_INTEGERS = {1: "int8", 2: "int16", 4: "int32", 8: "int64"}  # by bytes of an element


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
    with waiting(world):
        paddle.distributed.all_gather(gathered, checksums(parameters))
    difference = first_difference(list(parameters), np.stack([one.numpy() for one in gathered]))
    if difference:
        name, ranks = difference
        raise TrainingError(
            f"after update {step}, {name} on {name_ranks(ranks)} "
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

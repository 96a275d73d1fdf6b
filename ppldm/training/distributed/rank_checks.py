"""What several ranks compare: their parameters, which never differ, and their pace.

All ranks wait for the slowest, so the pace of a run does not tell which one is slow. In its forward passes and its data
a rank waits for nobody. The former are timed in the last update before a log line, and the device waited for before and
after each: no other update loses anything by it.
"""

import time
from collections.abc import Sequence
from statistics import median

import numpy as np
import paddle

from ...utils.errors import TrainingError
from ...utils.machine.devices import wait_for_device
from ...utils.processes.ranks import World, waiting
from ...utils.text import name_ranks

SLOW, SLOW_ON_CPU = 1.2, 4 / 3  # times the median rank's seconds, in two log lines in a row
_INTEGERS = {1: "int8", 2: "int16", 4: "int32", 8: "int64"}  # by bytes of an element


@paddle.no_grad()
def checksums(parameters: dict) -> paddle.Tensor:
    """One number for each of the named parameters, [P] int64: its bits as integers, added up modulo 2^64. A sum of
    integers has no rounding and no order, so that equal bits give equal numbers on every device."""
    sums = [p.detach().view(_INTEGERS[p.element_size()]).sum(dtype="int64") for p in parameters.values()]
    return paddle.stack(sums)


def check_ranks(parameters: dict, step: int, world: World) -> None:
    """Raises TrainingError on every rank where a parameter differs between ranks: which, on which, after which update.
    They never should: after each update every rank has applied the same averaged gradient to the same values."""
    gathered: list = []
    if not parameters:
        return
    with waiting(world):
        paddle.distributed.all_gather(gathered, checksums(parameters))
    difference = first_difference(list(parameters), np.stack([one.numpy() for one in gathered]))
    if difference:
        name, ranks = difference
        what = f"after update {step}, {name} on {name_ranks(ranks)} differs from the others' of {world.size}"
        fix = "go on from the last checkpoint, and if it comes again look for a device with faulty memory"
        raise TrainingError(f"{what}; {fix}")


def first_difference(names: list[str], sums: np.ndarray) -> tuple[str, list[int]] | None:
    """The first parameter that differs, and the ranks that do not hold what most hold; None where all are equal. `sums`
    is [ranks, P]. Where there is no majority, the lowest rank counts as right."""
    columns = np.flatnonzero((sums != sums[0]).any(axis=0))
    if not len(columns):
        return None
    held = sums[:, columns[0]].tolist()
    usual = max(held, key=lambda value: (held.count(value), -held.index(value)))
    return names[columns[0]], [rank for rank, value in enumerate(held) if value != usual]


class ForwardTimer:
    """Adds up the seconds of a model's forward passes in training while `is_on`. `close` leaves it alone again."""

    def __init__(self, model: paddle.nn.Layer):
        self.is_on, self.seconds, self._began = False, 0.0, None
        self._hooks = [model.register_forward_pre_hook(self._begin), model.register_forward_post_hook(self._end)]

    def _begin(self, layer, _inputs) -> None:
        if self.is_on and layer.training:
            wait_for_device()
            self._began = time.perf_counter()

    def _end(self, _layer, _inputs, _outputs) -> None:
        if self._began is not None:
            wait_for_device()
            self.seconds, self._began = self.seconds + time.perf_counter() - self._began, None

    def take(self) -> float:
        """The seconds since the last time."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def close(self) -> None:
        """Time nothing more."""
        for hook in self._hooks:
            hook.remove()


class SlowRanks:
    """Finds those that the others wait for, from the seconds of all ranks at each log line."""

    def __init__(self, limit: float = SLOW):
        self._limit, self._slow = limit, dict[int, int]()  # rank -> log lines in a row

    def find(self, seconds: Sequence[tuple[float, str]]) -> list[str]:
        """What to say of ranks that are newly known to be slow. seconds: (own seconds of an update, host) by rank."""
        usual = median(one for one, _ in seconds)
        ratios = {rank: one / usual for rank, (one, _) in enumerate(seconds)} if usual else {}
        self._slow = {rank: self._slow.get(rank, 0) + 1 for rank, ratio in ratios.items() if ratio >= self._limit}
        return [
            f"rank {rank} on {seconds[rank][1]} takes {ratios[rank]:.2f} times as long as the median rank for its "
            "forward pass and its data, and the others wait for it; see what else that machine or device does"
            for rank, lines in self._slow.items()
            if lines == 2
        ]

"""Which rank is slow. All wait for the slowest, so the pace of a run does not tell which that is.

What a rank waits for nobody in is its forward passes and its data. The former are timed in the last update before a
log line, and the device waited for before and after each: no other update loses anything by it. A rank that takes
SLOW times the median rank's seconds, in two log lines in a row, is named once, and again when it was better meanwhile.
"""

import socket
import time
from collections.abc import Sequence
from statistics import median

import paddle

from ...utils.machine.devices import wait_for_device
from ...utils.processes.rank_watch import gather_objects
from ...utils.processes.world import World

SLOW = 1.2


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
    """Finds those that the others wait for, from what `gather_seconds` gives at each log line."""

    def __init__(self):
        self._slow: dict[int, int] = {}  # rank -> log lines in a row

    def find(self, seconds: Sequence[tuple[float, str]]) -> list[str]:
        """What to say of ranks that are newly known to be slow. seconds: (own seconds of an update, host) by rank."""
        usual = median(one for one, _ in seconds)
        ratios = {rank: one / usual for rank, (one, _) in enumerate(seconds)} if usual else {}
        self._slow = {rank: self._slow.get(rank, 0) + 1 for rank, ratio in ratios.items() if ratio >= SLOW}
        return [
            f"rank {rank} on {seconds[rank][1]} takes {ratios[rank]:.2f} times as long as the median rank for its "
            "forward pass and its data, and the others wait for it; see what else that machine or device does"
            for rank, lines in self._slow.items()
            if lines == 2
        ]


def gather_seconds(own: float, world: World) -> list[tuple[float, str]]:
    """(`own` seconds, name of the host) of all ranks. A collective call."""
    return gather_objects((own, socket.gethostname()), world)

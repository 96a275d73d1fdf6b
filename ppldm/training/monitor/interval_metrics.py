"""What happened between two log lines, on all ranks, as means that are means.

Its `state` is part of the checkpoint: an interval that a stop cut in two is one again, and the curve too.

`SkippedShare` tells how large a share of the rows could not be used lately, and when that is too much. Counted are the
rows read for the newest updates that together have `WINDOW_SAMPLES` samples, or for all since the run's first while
there are fewer; so the window moves by whole updates, and what it says is a function of (config, seed, step). Its state
is part of the checkpoint. All ranks are told the same numbers, and so raise together.
"""

import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from ...networks.model import Loss
from ...utils.errors import DataError
from ...utils.machine.devices import peak_device_memory_bytes
from ...utils.machine.resources import peak_memory_bytes
from ...utils.processes.rank_watch import gather_objects
from ...utils.processes.world import World
from .control import NOTHING, Order
from .metrics import NUM_QUARTERS

WINDOW_SAMPLES = 1000
LEAST_SAMPLES = 100  # a share of fewer says nothing


@dataclass(frozen=True)
class Update:
    """What came of an update, the same on all ranks but for `losses`."""

    loss: float  # mean over micro-batches and ranks
    grad_norm: float  # global norm of the ranks' mean gradient, before clipping
    stop: bool = False  # some rank asked to stop, or the user did
    skipped_rows: int = 0  # bad rows passed over to make its samples, on all ranks
    losses: Sequence[Loss] = ()  # this rank's, one of each micro-batch
    orders: Order = NOTHING  # what the user asks for after it

    @property
    def applied(self) -> bool:
        """False where the update was skipped."""
        return bool(np.isfinite(self.loss) and np.isfinite(self.grad_norm))


class SkippedShare:
    """`limit`: the share of skipped rows, of all rows read, above which the run ends. `state`: what `state` gave."""

    def __init__(self, limit: float, state: list | None = None):
        self.limit = limit
        self._updates = deque(map(tuple, state or []))

    def add(self, samples: int, skipped: int) -> None:
        """One update: its samples, and the rows that were skipped to find them, over all ranks."""
        self._updates.append((samples, skipped))
        total = sum(count for count, _ in self._updates)
        while total - self._updates[0][0] >= WINDOW_SAMPLES:
            total -= self._updates.popleft()[0]

    def state(self) -> list:
        """What a checkpoint keeps, ready for JSON."""
        return [list(update) for update in self._updates]

    @property
    def is_too_large(self) -> bool:
        """Whether the run has to end. False before there are `LEAST_SAMPLES` samples."""
        samples, skipped = map(sum, zip(*self._updates, strict=True)) if self._updates else (0, 0)
        return samples >= LEAST_SAMPLES and skipped > self.limit * (samples + skipped)

    def error(self, reasons: Counter) -> DataError:
        """What ends the run. `reasons`: rows skipped since its first update, by reason, on all ranks."""
        samples, skipped = map(sum, zip(*self._updates, strict=True))
        counts = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common(5))
        return DataError(
            f"of the {samples + skipped} rows read for the last {samples} samples, {skipped} could not be used, more "
            f"than the share of {self.limit:g} that --max_skipped_share allows (since the first update: {counts}); "
            "look at the data with ppldm verify, or go on with a larger share and --accept_changes max_skipped_share"
        )


class IntervalMetrics:
    """What happened since the last log line: losses, samples, seconds, seconds spent waiting for data.

    `add` is told of each update what all ranks agree on and what only this rank has seen, `see` more of the latter.
    `gather` makes that known to all; it is a collective call, as are `summary` and `state`. `skipped` counts rows by
    reason over the whole run, `skipped_updates` updates; the rest starts anew with each `summary`.
    """

    def __init__(self, world: World, by_level: bool = False, state: dict | None = None, max_skipped_share: float = 1.0):
        """`by_level`: whether samples have a noise level. `state`: what `state` gave before a stop.

        `max_skipped_share`: of the rows read lately (`SkippedShare`), above which `check_skipped` raises.
        """
        # Of checkpoints without one, the window begins anew.
        self.skipped_share = SkippedShare(max_skipped_share, (state or {}).get("skipped_share"))
        self.world, self.by_level = world, by_level
        self.skipped, self.skipped_updates = Counter(), 0
        self._observed, self._skipped_here, self._checksum_here = [], Counter(), 0
        self._start()
        if state:
            self.checksum = state.get("checksum", 0)
            self.losses, self.grad_norms = list(state["losses"]), list(state["grad_norms"])
            self.quarters = np.array(state["quarters"])
            self.skipped.update(state["skipped"])
            self.skipped_updates = state["skipped_updates"]

    def _start(self):
        self.losses, self.grad_norms = [], []
        self.quarters = np.zeros((2, NUM_QUARTERS))  # sums of squared errors, numbers of samples
        self.checksum = 0  # the sum of its samples' CRC-32, which any order and any number of ranks gives
        self.restart_clock()

    def restart_clock(self) -> None:
        """Time and samples count from here on: training begins, or goes on after a log line."""
        self.updates, self.samples, self.wait_seconds, self.started = 0, 0, 0.0, time.perf_counter()

    @contextmanager
    def paused(self):
        """What is done inside the block takes no time: drawing and saving are no training."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.started += time.perf_counter() - began

    def add(self, update: Update, samples: int) -> None:
        """One update, and its samples over all ranks. The numbers of one that was skipped enter no mean."""
        self.skipped_share.add(samples, update.skipped_rows)
        self.updates += 1
        self.samples += samples
        self.skipped_updates += not update.applied
        if update.applied:
            self.losses.append(update.loss)
            self.grad_norms.append(update.grad_norm)
            observed = [one for one in update.losses if one.noise_level is not None]
            self._observed += [(one.noise_level, one.per_sample) for one in observed]

    def see(self, batch: dict) -> None:
        """What this rank has read: the samples of a batch, and rows that it could not use."""
        self._skipped_here.update(batch.get("skipped", ()))
        self._checksum_here += int(np.sum(np.asarray(batch.get("checksums", 0))))

    def check_skipped(self) -> None:
        """Raises DataError, on all ranks alike, where too many of the rows read lately could not be used."""
        if self.skipped_share.is_too_large:
            self.gather()
            raise self.skipped_share.error(self.skipped)

    def gather(self) -> None:
        """Add to `quarters`, `skipped` and `checksum` what each rank has seen since the last time."""
        mine = np.zeros((2, NUM_QUARTERS))
        for levels, errors in self._observed:
            places = (levels.numpy() * NUM_QUARTERS).astype(np.int64)
            np.add.at(mine[0], places, errors.numpy().astype(np.float64))
            np.add.at(mine[1], places, 1.0)
        for quarters, skipped, checksum in gather_objects(
            (mine, dict(self._skipped_here), self._checksum_here), self.world
        ):
            self.quarters += quarters
            self.skipped.update(skipped)
            self.checksum = (self.checksum + checksum) % 2**32
        self._observed, self._checksum_here = [], 0
        self._skipped_here.clear()

    def state(self) -> dict:
        """What a checkpoint keeps, ready for JSON, so that a resumed run logs what one without a stop does."""
        self.gather()
        return {
            "losses": self.losses,
            "grad_norms": self.grad_norms,
            "quarters": self.quarters.tolist(),
            "checksum": self.checksum,
            "skipped": dict(self.skipped),
            "skipped_updates": self.skipped_updates,
            "skipped_share": self.skipped_share.state(),
        }

    def summary(self) -> dict:
        """The interval's numbers, and its end. Seconds waited and memory are those of the rank that has most."""
        seconds = time.perf_counter() - self.started
        self.gather()
        wait_seconds, memory, device_memory = np.max(
            gather_objects((self.wait_seconds, peak_memory_bytes(), peak_device_memory_bytes()), self.world), axis=0
        )
        rate = self.samples / seconds
        values = {"loss": float(np.mean(self.losses)) if self.losses else float("nan")}
        if self.by_level:
            with np.errstate(invalid="ignore"):
                means = self.quarters[0] / self.quarters[1]
            values |= {f"loss_quarter_{number}": float(mean) for number, mean in enumerate(means, 1)}
        if self.grad_norms:
            values["grad_norm"] = float(np.mean(self.grad_norms))
        values |= {
            "data_crc32": self.checksum,
            "images_per_second": rate,
            "images_per_second_per_device": rate / self.world.size,
            "data_wait_share": wait_seconds / seconds,
            "avg_reader_cost": wait_seconds / max(1, self.updates),
            "avg_batch_cost": seconds / max(1, self.updates),
            "skipped_updates": self.skipped_updates,
            "skipped_rows": self.skipped.total(),
            **{f"skipped_rows_{reason}": count for reason, count in sorted(self.skipped.items())},
            "peak_memory_gb": memory / 1e9,
        }
        if device_memory:
            values["peak_device_memory_gb"] = device_memory / 1e9
        self._start()
        return values

"""Every wait of a rank for the others ends: by their coming, or by an error that names the one that does not come.

What ranks do together happens inside `waiting`. From `watch_ranks` on, one that is in there for longer than its
limit ends with one line and exit status 1. To know who is late, each rank leaves signs of life in a folder that all of
them see: a count that rises as long as its process runs, and how many waits it has begun. Who has begun fewer is
behind; whose count stands still is stopped, cut off or gone.

Nothing here imports paddle, and a rank whose storage hangs still keeps its limit.
"""

from __future__ import annotations

import re
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import TrainingError
from .failure import end_process
from .text import name_ranks

if TYPE_CHECKING:
    from .world import World

SIGNS_DIR = ".ranks"
_LONGEST_PAUSE_SECONDS = 5.0
_PAUSES_OF_SILENCE = 3  # so many without a new sign of life are silence
# What gloo, NCCL and Paddle's key-value store say where another rank is gone or late.
_LOST = re.compile(r"gloo/|TCP (?:receive|send|connect)|NCCL|Connection (?:closed|reset)")


class _Wait:
    """What this process does together with others: how many such waits it has begun, and since when it is in one."""

    def __init__(self):
        self.count, self.depth = 0, 0
        self.since: float | None = None


_own = _Wait()
_watch: RankWatch | None = None


@contextmanager
def waiting(world: World):
    """Around what needs the other ranks; one inside another is one. All ranks begin the same ones in the same order.

    Raises TrainingError, one line, in place of the library's own where the connection to another rank is lost.
    """
    if world.size == 1:
        yield
        return
    _own.depth += 1
    if _own.depth == 1:
        _own.count += 1
        _own.since = time.monotonic()
    try:
        yield
    except (RuntimeError, ValueError, OSError) as error:
        if not _LOST.search(str(error)):
            raise
        raise TrainingError(_describe_loss(world.rank, str(error))) from error
    finally:
        _own.depth -= 1
        if not _own.depth:
            _own.since = None


def watch_ranks(world: World, seconds: float) -> None:
    """Bound this process' waits from here on; 0: no limit. `leave_signs` makes it name who is late."""
    global _watch
    if world.size > 1 and seconds > 0:
        _watch = RankWatch(world, seconds)


def leave_signs(folder) -> None:
    """Leave signs of life in `folder`, which exists and which all ranks see, and look for those of the others."""
    if _watch:
        _watch.leave_signs(Path(folder, SIGNS_DIR))


class RankWatch:
    """Two threads: one keeps the limit, one leaves and reads signs of life."""

    def __init__(self, world: World, seconds: float):
        self.world, self.seconds = world, seconds
        self.pause = min(_LONGEST_PAUSE_SECONDS, seconds / 8)
        self.folder: Path | None = None
        self.seen: dict[int, tuple[str, float]] = {}  # rank -> its last sign, and when it was new
        threading.Thread(target=self._keep_limit, name="limit of waits for ranks", daemon=True).start()

    def leave_signs(self, folder: Path) -> None:
        """From here on. Another folder than before takes its place."""
        before, self.folder = self.folder, folder
        if before is None:
            threading.Thread(target=self._leave_signs, name="signs of life", daemon=True).start()

    def _leave_signs(self) -> None:
        count = 0
        while True:
            count += 1
            # A full disk, or a folder that is removed when the run has ended, is no reason to end.
            with suppress(OSError):
                self.folder.mkdir(exist_ok=True)
                Path(self.folder, str(self.world.rank)).write_text(f"{count} {_own.count}")
            if _own.since is not None:
                self.look(time.monotonic())
            time.sleep(self.pause)

    def look(self, now: float) -> None:
        """Read what the other ranks have left."""
        for rank in set(range(self.world.size)) - {self.world.rank}:
            sign = ""
            with suppress(OSError):
                sign = Path(self.folder, str(rank)).read_text()
            if rank not in self.seen or self.seen[rank][0] != sign:
                self.seen[rank] = sign, now

    def describe_late(self, now: float, own_count: int) -> str:
        """Who is late, of those that have begun fewer than `own_count` waits or are silent, and in what state."""
        silent = [rank for rank, (_, since) in self.seen.items() if now - since > _PAUSES_OF_SILENCE * self.pause]
        if silent:
            verb = "gives" if len(silent) == 1 else "give"
            return f"{name_ranks(silent)}, which {verb} no sign of life: stopped, cut off or gone"
        behind = [rank for rank, (sign, _) in self.seen.items() if sign and int(sign.split()[1]) < own_count]
        if behind:
            verb = "lives and has" if len(behind) == 1 else "live and have"
            return f"{name_ranks(behind)}, which {verb} something else to do: read data, save or compute"
        return "the other ranks"

    def _keep_limit(self) -> None:
        while True:
            time.sleep(min(1.0, self.seconds / 8))
            since, now = _own.since, time.monotonic()
            if since is not None and now - since > self.seconds:
                end_process(
                    self.world.rank,
                    f"rank {self.world.rank} has waited {self.seconds:g} s for "
                    f"{self.describe_late(now, _own.count)}; the same command goes on from the last checkpoint, and "
                    "--rank_timeout allows more",
                )


def _describe_loss(rank: int, reason: str) -> str:
    late = _watch.describe_late(time.monotonic(), _own.count) if _watch else "the other ranks"
    if "TIMEOUT" in reason:
        return f"rank {rank} has waited for {late}, for longer than gloo, which connects ranks on CPUs, allows"
    return f"rank {rank} has lost the connection to another rank, whose own last lines say why"

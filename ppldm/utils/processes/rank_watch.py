"""Every wait of a rank for the others ends: by their coming, or by an error that names the one that does not come.

What ranks do together happens inside `waiting`. From `watch_ranks` on, one that is in there for longer than its
limit ends with one line and exit status 1. To know who is late, each rank leaves signs of life in a folder that all of
them see: a count that rises as long as its process runs, and how many waits it has begun. Who has begun fewer is
behind; whose count stands still is stopped, cut off or gone.

Nothing here but `barrier` needs paddle, and a rank whose storage hangs still keeps its limit.
"""

from __future__ import annotations

import re
import shutil
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import TrainingError
from ..text import name_ranks
from .failure import end_process
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
_calls = 0  # of `barrier` in this process


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


def gather_objects(value, world: World) -> list:
    """The `value` of each rank, by rank, on all of them. Small ones: they are pickled. Imports paddle."""
    if world.size == 1:
        return [value]
    import paddle

    values = []
    with waiting(world):
        barrier(world)
        paddle.distributed.all_gather_object(values, value)
    return values


def _count_up(key: str, own: int, expected: int) -> None:
    """Add to a count that all ranks share, and wait until it is as high as `expected`."""
    from paddle.base import core

    store, pause = core.create_or_get_global_tcp_store(), 0.001
    count = store.add(key, own)
    while count < expected:
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
        count = store.add(key, 0)


def watch_ranks(world: World, seconds: float) -> None:
    """Bound this process' waits from here on; 0: no limit. `leave_signs` makes it name who is late."""
    global _watch
    if world.size > 1 and seconds > 0:
        _watch = RankWatch(world, seconds)


def leave_signs(folder) -> None:
    """Leave signs of life in `folder`, which exists and which all ranks see, and look for those of the others."""
    if _watch:
        _watch.leave_signs(Path(folder, SIGNS_DIR))


def remove_signs(world: World) -> None:
    """Leave no more signs of life, and remove the folder. All ranks call it together, at the end of what they watch."""
    folder = _watch.end_signs() if _watch else None
    barrier(world)
    if folder and world.is_main:
        shutil.rmtree(folder, ignore_errors=True)


class RankWatch:
    """Two threads: one keeps the limit, one leaves and reads signs of life."""

    def __init__(self, world: World, seconds: float):
        self.world, self.seconds = world, seconds
        self.pause = min(_LONGEST_PAUSE_SECONDS, seconds / 8)
        self.folder: Path | None = None
        self._lock = threading.Lock()
        self.seen: dict[int, tuple[str, float]] = {}  # rank -> its last sign, and when it was new
        threading.Thread(target=self._keep_limit, name="limit of waits for ranks", daemon=True).start()

    def leave_signs(self, folder: Path) -> None:
        """From here on. Another folder than before takes its place."""
        before, self.folder = self.folder, folder
        if before is None:
            threading.Thread(target=self._leave_signs, name="signs of life", daemon=True).start()

    def end_signs(self) -> Path | None:
        """Leave none from here on; the folder in which they were."""
        with self._lock:
            before, self.folder = self.folder, None
        self.seen = {}
        return before

    def _leave_signs(self) -> None:
        count = 0
        while self.folder:
            count += 1
            # A full disk, or a folder that somebody removes, is no reason to end.
            with suppress(OSError), self._lock:
                if self.folder:
                    self.folder.mkdir(exist_ok=True)
                    Path(self.folder, str(self.world.rank)).write_text(f"{count} {_own.count}")
            if _own.since is not None:
                self.look(time.monotonic())
            time.sleep(self.pause)

    def look(self, now: float) -> None:
        """Read what the other ranks have left."""
        folder = self.folder
        for rank in set(range(self.world.size)) - {self.world.rank} if folder else ():
            sign = ""
            with suppress(OSError):
                sign = Path(folder, str(rank)).read_text()
            # One that another process is just writing is empty, and says no more than its last one.
            if rank not in self.seen or (sign and self.seen[rank][0] != sign):
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

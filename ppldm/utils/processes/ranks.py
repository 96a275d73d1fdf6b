"""The ranks of a training: which of how many this process is, how they meet, and that every wait for others ends.

Paddle's own wait for all ranks is native code, in which no handler runs and no end is seen. So from the start of a rank
on (`begin`) the main one listens where Paddle's store will listen later, and the others connect to it. A rank that ends
says so there, one that is killed loses its connection: whoever waits in `join` ends as well. When all are in there, the
port is given back, and Paddle's own meeting takes a moment.

What ranks do together later happens inside `waiting`. From `watch_ranks` on, one that is in there for too long ends
with one line and exit status 1. To know who is late, each leaves signs of life in a folder that all see: a count that
rises while its process runs, and how many waits it has begun. A rank whose storage hangs still keeps its limit.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import socket
import stat
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from ..errors import Interrupted, PpldmError, Preempted, TrainingError
from ..log import get_logger
from ..text import name_ranks
from ..variables import read
from .signals import before_stop, end_process, ending_at_once

_PAUSE_SECONDS = 0.05
_PATIENCE_SECONDS = 5.0  # before a rank says for whom it waits
_LIMIT_SECONDS = 1800.0
_GLOO_WAITED_SECONDS = 15.0
_LONGEST = 1000  # bytes that a rank says
_END = re.compile(rb"^end (\d{1,9}) (\d{1,3})$", re.MULTILINE)
SIGNS_DIR = ".ranks"
_LONGEST_PAUSE_SECONDS = 5.0
_PAUSES_OF_SILENCE = 3  # so many without a new sign of life are silence
# What gloo, NCCL and Paddle's key-value store say where another rank is gone or late.
_LOST = re.compile(r"gloo/|TCP (?:receive|send|connect)|NCCL|Connection (?:closed|reset)")

_open: Meeting | None = None  # from `begin` to the end of `join`
# What this process does together with others: how many such waits it has begun, and since when it is in one.
_own = SimpleNamespace(count=0, depth=0, since=None)
_watch: RankWatch | None = None
_calls = 0  # of `barrier` in this process


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
    def detect(cls) -> World:
        """From the variables that `paddle.distributed.launch` sets for each process."""
        return cls(int(read("PADDLE_TRAINER_ID", "0")), int(read("PADDLE_TRAINERS_NUM", "1")))


def shard(count: int, world: World) -> range:
    """Which of `count` things are this rank's: they are dealt out like cards."""
    return range(world.rank, count, world.size)


def gather_in_order(gathered: list[list]) -> list:
    """What all ranks made of their shares, in order: the inverse of `shard`."""
    things = [None] * sum(len(one) for one in gathered)
    for rank, one in enumerate(gathered):
        things[rank :: len(gathered)] = one
    return things


def begin(world: World) -> None:
    """Let the other ranks see this one. Where the variables name no place to meet, Paddle will say so."""
    global _open
    host, _, port = _find_place().rpartition(":")
    if world.size > 1 and host and port.isdecimal() and not _open:
        before_stop[:] = [tell_end]  # first, as others may see this rank from here on
        _open = Meeting(world, (host, int(port)))


def tell_end(status: int) -> None:
    """Tell the ranks that have not met this one that it ends, with this exit status; a signal's handler may call it."""
    if _open:
        with suppress(OSError, ValueError):
            _open.tell(_open.world.rank, status)


def join_world() -> World:
    """This process's place among those that a launcher started, which can talk to one another from here on."""
    world = World.detect()
    join(world)
    return world


def join(world: World, seconds: float = _LIMIT_SECONDS) -> None:
    """Wait for the other ranks, 0: without a limit; all can talk to one another afterwards. Imports paddle. Raises
    Interrupted, Preempted or TrainingError where one of them has ended or does not come."""
    global _open
    if world.size == 1:
        return
    import paddle

    from ..machine.cpu import quiet_paddle

    if not paddle.distributed.is_initialized():
        begin(world)
        if _open:
            _open.wait(time.monotonic() + (seconds or float("inf")), seconds)
            _open = None
        with quiet_paddle(), ending_at_once():  # all are there, and there is nothing to save yet
            paddle.distributed.init_parallel_env()
        port = _find_place().rpartition(":")[2]
        if port.isdecimal():
            send_at_once(int(port))


def send_at_once(port: int) -> None:
    """Let this process' connections to a port send small messages at once, where there is a /proc: Paddle's store sends
    command, key and value one by one, and TCP holds the second back until the first is acknowledged, 40 ms later."""
    with suppress(OSError):
        for number in map(int, os.listdir("/proc/self/fd")):
            with suppress(OSError):  # the one that listed them
                if stat.S_ISSOCK(os.fstat(number).st_mode):
                    with socket.socket(fileno=os.dup(number)) as link:
                        if link.family in (socket.AF_INET, socket.AF_INET6) and link.getpeername()[1] == port:
                            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _find_place() -> str:
    """Where Paddle's store will be, as HOST:PORT, by the variables that Paddle reads."""
    if read("MASTER_ADDR") and read("MASTER_PORT"):
        return f"{read('MASTER_ADDR')}:{read('MASTER_PORT')}"
    return read("PADDLE_MASTER") or read("PADDLE_TRAINER_ENDPOINTS").partition(",")[0]


class Meeting:
    """One rank's side. Said are `here RANK SIZE`, `ready`, `end RANK STATUS`, by the main one also `hello` and `go`."""

    def __init__(self, world: World, place: tuple[str, int]):
        self.world, self.place = world, place
        self.links: dict[socket.socket, bytes] = {}  # what each has said
        self.listener: socket.socket | None = None
        self._connecting = threading.RLock()  # a second connection would seem to be a rank that ends without a word
        if not world.is_main:
            threading.Thread(target=self._connect, name="meeting of ranks", daemon=True).start()
            return
        with suppress(OSError):  # the port is taken: `wait` says so
            self.listener = socket.create_server(("", place[1]), backlog=world.size)

    def tell(self, rank: int, status: int) -> None:
        """Say to all that can hear it that `rank` ends with this exit status."""
        if self.listener:
            while select.select([self.listener], [], [], 0)[0]:
                self._accept()
        elif not self.links and not self.world.is_main:
            self._try(timeout=1.0)
        for link in tuple(self.links):
            with suppress(OSError):
                link.sendall(f"end {rank} {status}\n".encode())

    def wait(self, until: float, seconds: float) -> None:
        """Until all are ready. Raises Interrupted, Preempted, TrainingError."""
        said_at = time.monotonic() + _PATIENCE_SECONDS
        if self.world.is_main and not self.listener:
            raise TrainingError(f"port {self.place[1]}, where the ranks are to meet, is taken; name another")
        greeted: set[socket.socket] = set()  # to whom this one has said that it is ready
        while missing := self._look(greeted):
            who = f"rank {self.world.rank} waits for {name_ranks(missing)} to start"
            if time.monotonic() > said_at:
                get_logger().info("%s", who)
                said_at = float("inf")
            if time.monotonic() > until:
                raise TrainingError(f"{who}, and has done so for {seconds:g} s; start all ranks again")
        self._part()

    def _look(self, greeted: set[socket.socket]) -> list[int]:
        """Read what was said since the last look; the ranks that are still missed."""
        sources = [*self.links, *([self.listener] if self.listener else [])]
        if not sources:
            time.sleep(_PAUSE_SECONDS)
        for one in select.select(sources, [], [], _PAUSE_SECONDS)[0] if sources else ():
            self._accept() if one is self.listener else self._read(one)
        if not self.world.is_main:
            for link in self.links.keys() - greeted:
                with suppress(OSError):
                    link.sendall(b"ready\n")
                greeted.add(link)
            return [] if any(b"go\n" in text for text in self.links.values()) else [0]
        ready = {rank for text in self.links.values() if b"ready\n" in text and (rank := self._rank_of(text))}
        return sorted(set(range(1, self.world.size)) - ready)

    def _read(self, link: socket.socket) -> None:
        try:
            said = link.recv(4096)
        except OSError:
            said = b""
        self.links[link] += said
        text = self.links[link]
        rank = self._rank_of(text) if self.world.is_main else 0
        if rank is not None and (end := _END.search(text)):
            self._end(*map(int, end.groups()))
        if said and len(text) < _LONGEST:
            return
        del self.links[link]
        link.close()
        if rank if self.world.is_main else b"hello\n" in text:
            self._end(rank or 0, TrainingError.exit_status)
        if not self.world.is_main:  # another program's port, or a rank of a run before
            threading.Thread(target=self._connect, name="meeting of ranks", daemon=True).start()

    def _end(self, rank: int, status: int) -> None:
        if self.world.is_main:
            self.tell(rank, status)
        kinds: dict[int, type[PpldmError]] = {one.exit_status: one for one in (Interrupted, Preempted)}
        how = "was stopped" if status in kinds else "ended"
        raise kinds.get(status, TrainingError)(
            f"rank {rank} {how} before all ranks had met; its own lines say why: start all of them again"
        )

    def _rank_of(self, text: bytes) -> int | None:
        """The rank that said this; None for what is no rank of this run."""
        words = text.partition(b"\n")[0].split()
        known = words[:1] == [b"here"] and words[2:] == [b"%d" % self.world.size] and words[1].isdigit()
        return int(words[1]) if known and 0 < int(words[1]) < self.world.size else None

    def _accept(self) -> None:
        with suppress(OSError):
            link, _ = self.listener.accept()
            link.settimeout(1.0)
            self.links[link] = b""
            link.sendall(b"hello\n")

    def _connect(self) -> None:
        while not self.links:
            self._try(timeout=5.0)
            time.sleep(_PAUSE_SECONDS)

    def _try(self, timeout: float) -> None:
        with self._connecting, suppress(OSError):
            if self.links:
                return
            link = socket.create_connection(self.place, timeout=timeout)
            if link.getsockname() == link.getpeername():  # a free port of this machine may be given to the caller
                link.close()
                return
            link.settimeout(1.0)
            link.sendall(b"here %d %d\n" % (self.world.rank, self.world.size))
            self.links[link] = b""

    def _part(self) -> None:
        """Let go of the port before the others hear of it: what connects next wants Paddle's store."""
        if self.listener:
            self.listener.close()
            for link in self.links:
                with suppress(OSError):
                    link.sendall(b"go\n")
            for link in self.links:  # who closes first keeps the port for a while
                link.settimeout(5.0)
                with suppress(OSError):
                    while link.recv(4096):
                        pass
        for link in self.links:
            link.close()


@contextmanager
def waiting(world: World):
    """Around what needs the other ranks; one inside another is one. All ranks begin the same ones in the same order. A
    lost connection to another rank is a TrainingError, one line."""
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
        rank = f"rank {world.rank}"
        text = f"{rank} has lost the connection to another rank, whose own last lines say why"
        # Gloo, which waits for 30 seconds, calls it a timeout too when the other rank has just ended.
        if "TIMEOUT" in str(error) and time.monotonic() - (_own.since or 0) > _GLOO_WAITED_SECONDS:
            late = _watch.describe_late(time.monotonic(), _own.count) if _watch else "the other ranks"
            text = f"{rank} has waited for {late}, for longer than gloo, which connects ranks on CPUs, allows"
        raise TrainingError(text) from error
    finally:
        _own.depth -= 1
        if not _own.depth:
            _own.since = None


def barrier(world: World) -> None:
    """A barrier that waits as long as `watch_ranks` lets it; every rank must call it the same number of times, after
    `join`. Paddle's collectives on CPUs (gloo) fail after 30 seconds, and the main rank may save or wait for a lock for
    longer. So counts go through the key-value store of rank 0, which is the last to leave."""
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
    folder = None
    if _watch:
        with _watch.lock:
            folder, _watch.folder = _watch.folder, None
        _watch.seen = {}
    barrier(world)
    if folder and world.is_main:
        shutil.rmtree(folder, ignore_errors=True)


class RankWatch:
    """Two threads: one keeps the limit, one leaves and reads signs of life."""

    def __init__(self, world: World, seconds: float):
        self.world, self.seconds = world, seconds
        self.pause = min(_LONGEST_PAUSE_SECONDS, seconds / 8)
        self.folder: Path | None = None
        self.lock = threading.Lock()
        self.seen: dict[int, tuple[str, float]] = {}  # rank -> its last sign, and when it was new
        threading.Thread(target=self._keep_limit, name="limit of waits for ranks", daemon=True).start()

    def leave_signs(self, folder: Path) -> None:
        """From here on. Another folder than before takes its place."""
        before, self.folder = self.folder, folder
        if before is None:
            threading.Thread(target=self._leave_signs, name="signs of life", daemon=True).start()

    def _leave_signs(self) -> None:
        count = 0
        while self.folder:
            count += 1
            # A full disk, or a folder that somebody removes, is no reason to end.
            with suppress(OSError), self.lock:
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

"""How ranks meet before Paddle lets them: its own wait is native code, in which no handler runs and no end is seen.

From the start of a rank on (`begin`) the main one listens where Paddle's store will listen later, and the others
connect to it. A rank that ends says so over its connection, and one that is killed loses it: whoever waits in `join`
ends as well. When all are in there, the port is given back, and Paddle's own meeting takes a moment.
"""

from __future__ import annotations

import os
import re
import select
import socket
import stat
import threading
import time
from contextlib import suppress

from ..errors import Interrupted, PpldmError, Preempted, TrainingError
from ..log import get_logger
from ..text import name_ranks
from ..variables import read
from .interrupts import before_stop
from .signals import ending_at_once
from .world import World

_PAUSE_SECONDS = 0.05
_PATIENCE_SECONDS = 5.0  # before a rank says for whom it waits
_LIMIT_SECONDS = 1800.0
_LONGEST = 1000  # bytes that a rank says
_END = re.compile(rb"^end (\d{1,9}) (\d{1,3})$", re.MULTILINE)

_open: Meeting | None = None  # from `begin` to the end of `join`


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
    """Wait for the other ranks, 0: without a limit; all can talk to one another afterwards. Imports paddle.

    Raises Interrupted, Preempted or TrainingError where one of them has ended or does not come.
    """
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
    """Let this process' connections to a port send small messages at once.

    Paddle's store sends a command, a key and a value one after another, and TCP holds the second back until the first
    is acknowledged, 40 ms later: `barrier` takes two or three such messages. Nothing where the system has no /proc."""
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
    """One rank's side. Lines are sent: `here RANK SIZE`, `ready`, `end RANK STATUS`; the main one answers `hello`, and
    to all together `go`."""

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

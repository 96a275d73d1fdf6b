"""Ranks that look for one another find each other in any order, and the end of one is the end of all."""

import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import permutations

import pytest
from ports import free_port

from ppldm.utils.errors import Interrupted, Preempted, TrainingError
from ppldm.utils.processes.ranks import Meeting, World, send_at_once

LONG = 60.0  # seconds, after which a rank that waits for nothing fails the test


@pytest.fixture
def place():
    return "127.0.0.1", free_port()


def wait(meeting: Meeting):
    """None, or the error with which this rank ends; its connections are gone then."""
    try:
        meeting.wait(time.monotonic() + LONG, LONG)
    except (Interrupted, TrainingError) as error:
        for link in [*meeting.links, *filter(None, [meeting.listener])]:
            link.close()
        return error


@pytest.mark.parametrize("order", permutations(range(3)))
def test_ranks_meet_in_any_order_and_give_the_port_back(place, order):
    with ThreadPoolExecutor() as pool:
        assert list(pool.map(lambda rank: wait(Meeting(World(rank, 3), place)), order)) == [None] * 3
    socket.create_server(place).close()


def test_small_messages_to_a_port_are_sent_at_once_and_nothing_else_changes(place):
    with (
        socket.create_server(place),
        socket.create_server(("127.0.0.1", 0)) as other,
        socket.create_connection(place) as link,
        socket.create_connection(other.getsockname()) as foreign,
        closing(socket.socketpair()[0]),
    ):
        before = set(os.listdir("/proc/self/fd"))  # among them pipes, files and what is no stream
        send_at_once(place[1])
        assert set(os.listdir("/proc/self/fd")) == before
        is_at_once = [bool(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)) for one in (link, foreign)]
        assert is_at_once == [True, False]
        link.sendall(b"still open")


@pytest.mark.parametrize("status, kind", [(130, Interrupted), (75, Preempted), (2, TrainingError), (1, TrainingError)])
@pytest.mark.parametrize("told", [0, 1, 2])
@pytest.mark.parametrize("others_wait", [True, False])
def test_the_end_of_one_rank_is_that_of_all(place, status, kind, told, others_wait):
    meetings = {rank: Meeting(World(rank, 3), place) for rank in range(3)}
    one = meetings.pop(told)
    with ThreadPoolExecutor() as pool:
        ends = [pool.submit(wait, other) for other in meetings.values()] if others_wait else []
        while not all(other.links for rank, other in meetings.items() if rank):
            time.sleep(0.001)  # until their threads have connected
        one.tell(told, status)
        for link in [*one.links, *filter(None, [one.listener])]:
            link.close()
        ends = [end.result() for end in ends or [pool.submit(wait, other) for other in meetings.values()]]
    assert [type(error) for error in ends] == [kind] * 2
    assert all(f"rank {told} " in str(error) for error in ends)


RANK = """
import sys
from ppldm.utils.processes.ranks import Meeting
from ppldm.utils.processes.ranks import World
meeting = Meeting(World(int(sys.argv[1]), 2), ("127.0.0.1", int(sys.argv[2])))
while True:
    meeting._look(meeting.links.keys())  # is here, and never ready
    if any(b"\\n" in text for text in meeting.links.values()):
        print("heard", flush=True)
        sys.stdin.read()
"""


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_is_killed_is_missed(place, killed):
    words = [sys.executable, "-c", RANK, str(killed), str(place[1])]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ)
    with process, ThreadPoolExecutor() as pool:
        end = pool.submit(wait, Meeting(World(1 - killed, 2), place))
        assert process.stdout.readline() == b"heard\n"
        process.send_signal(signal.SIGKILL)
        assert type(end.result()) is TrainingError and f"rank {killed} ended" in str(end.result())


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n", b"end 1 130\n", b"here 7 2\nready\n", b"x" * 9000,
                                  b"here 1 3\nready\nend 1 1\n", b"here x 2\nready\n"])  # fmt: skip
def test_a_stranger_is_nobody(place, said):
    meeting = Meeting(World(0, 2), place)
    with socket.create_connection(place) as stranger:
        stranger.sendall(said)
        stranger.shutdown(socket.SHUT_WR)
        with ThreadPoolExecutor() as pool:
            ends = [pool.submit(wait, one) for one in (meeting, Meeting(World(1, 2), place))]
            assert [end.result() for end in ends] == [None, None]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_does_not_come_is_named(place, rank):
    with pytest.raises(TrainingError, match=f"rank {rank} waits for rank {1 - rank} to start, and has done so for 7 s"):
        Meeting(World(rank, 2), place).wait(0.0, 7)


def test_a_port_that_another_program_holds_is_named(place):
    with socket.create_server(("", place[1])), pytest.raises(TrainingError, match=f"port {place[1]}.* is taken"):
        Meeting(World(0, 2), place).wait(time.monotonic() + LONG, LONG)

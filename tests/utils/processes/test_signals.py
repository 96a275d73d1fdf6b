"""What a signal meets goes on, and a process does not outlive the one that started it."""

import _thread
import ctypes
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from forking import state_of

from ppldm.training.train import stop_on_signals
from ppldm.utils.processes.signals import handle
from ppldm.utils.processes.workers import wait_for

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def receive_through(number: int) -> tuple[int, int]:
    """(what a library's recv gives, its errno) where signal `number` comes while it waits, and a byte after it."""
    ours, theirs = socket.socketpair()
    libc = ctypes.CDLL(None, use_errno=True)

    def disturb():
        time.sleep(0.1)
        os.kill(os.getpid(), number)
        time.sleep(0.1)
        theirs.send(b"x")

    thread = threading.Thread(target=disturb)
    thread.start()
    ctypes.set_errno(0)
    received = libc.recv(ours.fileno(), ctypes.create_string_buffer(1), 1, 0), ctypes.get_errno()
    thread.join()
    return received


@pytest.fixture
def one_of_two_ranks(monkeypatch):
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.usefixtures("one_of_two_ranks")
def test_a_wait_outlives_a_signal(number):
    with stop_on_signals() as request:
        assert receive_through(number) == (1, 0)
        assert request.number == number


@pytest.mark.parametrize("number", NUMBERS)
def test_one_process_alone_answers_at_once(number):
    with stop_on_signals() as request:
        assert receive_through(number) == (-1, errno.EINTR)
        assert request.number == number


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.usefixtures("one_of_two_ranks")
def test_the_handler_before_comes_back_as_patient_as_it_was(number):
    came = []
    before = handle(number, lambda *_: came.append(number))
    try:
        with stop_on_signals():
            pass
        assert receive_through(number) == (1, 0) and came == [number]
    finally:
        signal.signal(number, before)


CHILD = """
import os, sys, time
sys.path[:0] = {path!r}
from ppldm.utils.processes.signals import end_with_parent
parent = os.getpid()
if not os.fork():
    end_with_parent(parent if {honest} else parent + 1)
    print(os.getpid(), flush=True)
    time.sleep(60)
    os._exit(0)
{then}
"""


@pytest.mark.parametrize("honest, then", [(True, "time.sleep(60)"), (False, "os.wait(); print('gone', flush=True)")])
def test_a_child_ends_with_its_parent(honest, then):
    code = CHILD.format(path=sys.path, honest=honest, then=then)
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    line = parent.stdout.readline().strip()
    if not honest:  # the parent had ended before
        assert line == "gone" and parent.wait() == 0
        return
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 120
    while state_of(int(line)) != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_signal_just_before_the_wait_is_handled_in_it():
    """`interrupt_main` marks a signal as come, as one is that comes before a system call, and ends none."""
    process = subprocess.Popen(["sleep", "20"])
    before = signal.signal(signal.SIGUSR1, lambda *_: process.kill())
    try:
        threading.Timer(0.5, _thread.interrupt_main, [signal.SIGUSR1]).start()
        assert wait_for(process) == -signal.SIGKILL
    finally:
        signal.signal(signal.SIGUSR1, before)

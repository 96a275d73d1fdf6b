"""One owner at a time; one that is gone is noticed."""

import errno
import json
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from ppldm.data.formats.index import cache as index_lock
from ppldm.data.formats.index.cache import build_lock


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(index_lock, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(index_lock, "_TOUCH_SECONDS", 0.02)


def write_lock(path, host, pid):
    path.write_text(json.dumps({"host": host, "pid": pid, "time": 0}))


def test_owners_take_turns_and_leave_nothing(tmp_path):
    inside, most = [], []

    def work():
        with build_lock(tmp_path / "p.idx"):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.05)
            inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 4 and not list(tmp_path.iterdir())


def test_the_lock_says_who_holds_it_and_goes_with_an_error(tmp_path):
    with pytest.raises(KeyboardInterrupt), build_lock(tmp_path / "p.idx"):
        owner = json.loads((tmp_path / "p.idx.lock").read_text())
        assert (owner["host"], owner["pid"]) == (socket.gethostname(), os.getpid())
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_a_lock_of_a_dead_process_of_this_host_is_taken_over(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    write_lock(tmp_path / "p.idx.lock", socket.gethostname(), ended.pid)
    before = time.monotonic()
    with build_lock(tmp_path / "p.idx"):
        assert time.monotonic() - before < index_lock.STALE_SECONDS / 2, "not by waiting until it is stale"
        assert json.loads((tmp_path / "p.idx.lock").read_text())["pid"] == os.getpid()


def test_a_lock_of_another_host_is_waited_for_until_it_is_no_longer_touched(tmp_path, monkeypatch):
    monkeypatch.setattr(index_lock, "STALE_SECONDS", 0.3)
    lock, done = tmp_path / "p.idx.lock", threading.Event()
    write_lock(lock, "elsewhere", os.getpid() + 1)
    owner = threading.Thread(target=index_lock._keep_fresh, args=(lock, done))
    owner.start()
    threading.Timer(0.8, done.set).start()
    before = time.monotonic()
    with build_lock(tmp_path / "p.idx"):
        assert time.monotonic() - before >= 0.8 + 0.2
    owner.join()


def test_where_no_lock_can_be_made_nobody_waits(tmp_path):
    with build_lock(tmp_path / "no such folder" / "p.idx"):
        pass


def test_a_full_disk_leaves_no_lock_that_says_nothing(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(json, "dump", fail)
        with build_lock(tmp_path / "p.idx"):
            assert list(tmp_path.iterdir()) == []
    with build_lock(tmp_path / "p.idx"):  # without waiting
        pass

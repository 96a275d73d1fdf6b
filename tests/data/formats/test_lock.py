"""One owner at a time; one that is gone is noticed."""

import errno
import fcntl
import os
import subprocess
import sys
import threading
import time

import pytest

from ppldm.data.formats.index import build_lock

OWNER = """
import sys
from pathlib import Path
from ppldm.data.formats.index import build_lock

with build_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


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


def test_the_lock_goes_with_an_error(tmp_path):
    with pytest.raises(KeyboardInterrupt), build_lock(tmp_path / "p.idx"):
        assert (tmp_path / "p.idx.lock").exists()
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("is_killed", [True, False])
def test_another_process_is_waited_for_until_it_is_done_or_dead(tmp_path, is_killed):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", OWNER, tmp_path / "p.idx"], **pipes) as owner:
        assert owner.stdout.readline() == b"held\n"
        held, waiting = threading.Event(), threading.Thread(target=lambda: wait(tmp_path / "p.idx", held))
        waiting.start()
        assert not held.wait(0.2)
        owner.kill() if is_killed else owner.stdin.close()
        waiting.join()
    assert held.is_set() and not list(tmp_path.iterdir())


def wait(target, held):
    with build_lock(target):
        held.set()


def test_a_lock_that_its_owner_removed_is_made_again(tmp_path, monkeypatch):
    flock, before = fcntl.flock, []

    def remove_first(number, how):
        flock(number, how)
        before.append(number)
        if len(before) == 1:  # as an owner does that was waited for
            (tmp_path / "p.idx.lock").unlink()

    monkeypatch.setattr(fcntl, "flock", remove_first)
    with build_lock(tmp_path / "p.idx"):
        assert (tmp_path / "p.idx.lock").exists() and len(before) == 2
    assert not list(tmp_path.iterdir())


def test_what_a_dead_process_left_is_nobodys(tmp_path):
    (tmp_path / "p.idx.lock").touch()
    with build_lock(tmp_path / "p.idx"):
        assert (tmp_path / "p.idx.lock").exists()
    assert not list(tmp_path.iterdir())


def test_where_no_lock_can_be_made_nobody_waits(tmp_path):
    with build_lock(tmp_path / "no such folder" / "p.idx"):
        pass


def test_a_file_system_without_locks_has_none(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", fail)
    with build_lock(tmp_path / "p.idx"), build_lock(tmp_path / "p.idx"):
        pass

"""One process builds an index, and those that want the same one wait for it, on this machine or another.

The owner keeps `<index>.lock` beside the index that it makes: a JSON object with host, process and time, touched every
few seconds. An owner that died is known by its process where it is of this host, and else by a lock that was not
touched for `STALE_SECONDS` of the waiter's own clock, so that clocks need not agree. The lock only spares work: an
index is the same whoever makes it and appears by one rename, so that two owners do no harm.
"""

import json
import os
import socket
import threading
import time
from contextlib import contextmanager
from pathlib import Path

from ....utils.files import read_json
from ....utils.log import get_logger

STALE_SECONDS = 60.0
_TOUCH_SECONDS = 5.0
_POLL_SECONDS = 0.2


@contextmanager
def build_lock(target: Path):
    """Hold the right to build the index `target`, after waiting for whoever holds it. Without effect where no file can
    be made there."""
    lock = target.with_name(target.name + ".lock")
    if not _acquire(lock):
        yield
        return
    done = threading.Event()
    thread = threading.Thread(target=_keep_fresh, args=(lock, done), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        lock.unlink(missing_ok=True)


def _acquire(lock: Path) -> bool:
    """False where no lock can be made."""
    seen, since, told = None, 0.0, False
    while True:
        try:
            handle = os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        except FileExistsError:
            pass
        except OSError:
            return False
        else:
            try:
                with os.fdopen(handle, "w") as file:
                    json.dump({"host": socket.gethostname(), "pid": os.getpid(), "time": time.time()}, file)
            except OSError:  # a full disk: one that does not say whose it is would be waited for
                lock.unlink(missing_ok=True)
                return False
            return True
        touched = _touched(lock)
        if touched != seen:
            seen, since = touched, time.monotonic()
        if touched is not None and (_is_dead(lock) or time.monotonic() - since > STALE_SECONDS):
            get_logger().warning("%s was left by a process that is gone; the index is built here", lock)
            lock.unlink(missing_ok=True)
            continue
        if not told:
            get_logger().info("waiting for the process that builds %s", lock.name.removesuffix(".lock"))
            told = True
        time.sleep(_POLL_SECONDS)


def _touched(lock: Path) -> int | None:
    try:
        return os.stat(lock).st_mtime_ns
    except OSError:
        return None


def _is_dead(lock: Path) -> bool:
    """Whether the owner is a process of this host that has ended."""
    owner = read_json(lock, optional=True)
    if not isinstance(owner, dict) or owner.get("host") != socket.gethostname():
        return False
    pid = owner.get("pid")
    if not isinstance(pid, int) or pid == os.getpid():
        return False  # another thread of this process
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass
    return False


def _keep_fresh(lock: Path, done: threading.Event) -> None:
    while not done.wait(_TOUCH_SECONDS):
        try:
            os.utime(lock)
        except OSError:
            return

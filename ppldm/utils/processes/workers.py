"""Work spread over processes that end with their parent, whether it ends well or not; and a command that is started
again when it fails: what a machine loses in a night need not cost the night."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import islice
from multiprocessing.connection import wait
from typing import TypeVar

from ..errors import ConfigError, DataError, Interrupted, PpldmError, Preempted
from ..log import be_quiet, get_logger, progress
from ..machine.resources import count_usable_cores
from ..text import EscapingStream, count_of
from .signals import end_with_parent, handled

T = TypeVar("T")
R = TypeVar("R")

_NUM_THREADS = 32
_CHUNK = 64
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 1.0, 60.0
_FINAL = (0, ConfigError.exit_status, Interrupted.exit_status, Preempted.exit_status)
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def check_workers(num_workers: int) -> int:
    """The number of processes that a flag asks for, 0 meaning one per core. Raises ConfigError."""
    if num_workers < 0:
        raise ConfigError(f"--num-workers is {num_workers}; it must be 0 (one per core) or more")
    return num_workers or count_usable_cores()


def map_unordered(function: Callable[[T], R], tasks: Sequence[T], num_workers: int) -> Iterator[tuple[T, R]]:
    """(task, function(task)) as they are done; in this process where num_workers or the tasks are at most one.
    `function` is one of a module, or a partial of one. The first error ends the work. Processes give only warnings."""
    num_workers = min(num_workers, len(tasks))
    if num_workers <= 1:
        yield from ((task, function(task)) for task in tasks)
        return
    # Spawned, not forked: the progress bar runs a thread, and a forked copy of its lock may never open.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, mp_context=context, initializer=_start_worker) as executor:
        try:
            futures = {executor.submit(function, task): task for task in tasks}
            for future in as_completed(futures):
                # Popped, so that a result is kept no longer than its user keeps it.
                yield futures.pop(future), future.result()
        except BrokenProcessPool as error:
            raise DataError(
                "a worker process died, most likely as memory ran out; run again with fewer workers"
            ) from error
        finally:
            executor.shutdown(cancel_futures=True)


def map_with_deadline(
    function: Callable[[T], R], tasks: Iterable[T], num_workers: int, seconds: float
) -> Iterator[tuple[T, R | PpldmError]]:
    """(task, function(task)) as they are done, each in a process of its own that is killed after `seconds`, for tasks
    that may hang. `tasks` is asked for one when a process is free. In place of a result comes the PpldmError that the
    function raised, or a DataError where the process was killed or ended by itself."""
    context = multiprocessing.get_context("spawn")
    tasks, running = iter(tasks), {}
    try:
        while True:
            for task in islice(tasks, num_workers - len(running)):
                reader, writer = context.Pipe(duplex=False)
                process = context.Process(target=_run_task, args=(writer, function, task), daemon=True)
                process.start()
                writer.close()
                running[reader] = process, task, time.monotonic() + seconds
            if not running:
                return
            soonest = min(deadline for *_, deadline in running.values())
            ready = wait(running, timeout=max(0, soonest - time.monotonic()))
            overdue = [reader for reader, (*_, deadline) in running.items() if deadline <= time.monotonic()]
            for reader in {*ready, *overdue}:
                process, task, _ = running[reader]
                result: R | PpldmError = DataError(f"it was killed after {seconds:.0f} s")
                if reader in ready:
                    try:
                        result = reader.recv()
                    except EOFError:
                        process.join()
                        status = process.exitcode
                        result = DataError(f"its process ended with status {status}, most likely as memory ran out")
                _end_process(reader, process)
                del running[reader]
                yield task, result
    finally:
        for reader, (process, *_) in running.items():
            _end_process(reader, process)


def _run_task(writer, function, task) -> None:
    _start_worker()
    sys.stdout = sys.stderr  # only a command's result goes to stdout
    try:
        writer.send(function(task))
    except PpldmError as error:
        writer.send(error)


def _end_process(reader, process) -> None:
    process.kill()
    process.join()
    reader.close()


def map_in_threads(function: Callable[[T], R], items: Sequence[T], name: str) -> list[R]:
    """function(item) of each, in order, for what waits for disks or a network. `name`: of the progress bar."""
    chunks = [items[start : start + _CHUNK] for start in range(0, len(items), _CHUNK)]
    if len(chunks) <= 1:
        return [function(item) for item in items]
    results = []
    with (
        ThreadPoolExecutor(_NUM_THREADS) as executor,
        progress(total=len(items), desc=name, unit="part", delay=3) as bar,
    ):
        for done in executor.map(lambda chunk: [function(item) for item in chunk], chunks):
            results += done
            bar.update(len(done))
    return results


def _start_worker() -> None:
    """Ctrl-C reaches the whole process group: workers finish their task, the parent hands out no more. Where the parent
    was killed, they end as well. What libraries print is escaped: it may quote what they were given."""
    be_quiet()
    sys.stdout, sys.stderr = EscapingStream(sys.stdout), EscapingStream(sys.stderr)
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def follow_parent() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=follow_parent, daemon=True).start()


def start_child(command: Sequence[str], **settings) -> subprocess.Popen:
    """Start a command that the terminal's Ctrl-C does not reach, and that ends with this process, however that ends."""
    dies = partial(end_with_parent, os.getpid())
    return subprocess.Popen(command, start_new_session=True, preexec_fn=dies, **settings)


def wait_for(process: subprocess.Popen) -> int:
    """The status of a process at its end. Meanwhile this thread handles its signals; `Popen.wait()` without a time
    would leave one that came a moment earlier unhandled until then."""
    while True:
        try:
            return process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            pass


def wait_before(start: int) -> float:
    """Seconds before the start number `start` since the last progress; the first again is 1."""
    return min(FIRST_WAIT_SECONDS * 2 ** (start - 1), LONGEST_WAIT_SECONDS)


def supervise(command: Sequence[str], max_restarts: int, progress: Callable[[], int], environ=None) -> int:
    """Run `command` until it ends well, at most `max_restarts` times again while the number `progress()` does not rise;
    the last exit status, 128 and the signal's number of one that was killed. A signal goes to it, and is the end."""
    restarts, reached = 0, progress()
    process: subprocess.Popen | None = None
    stopped_by = 0

    def forward(number: int, _frame) -> None:
        nonlocal stopped_by
        stopped_by = number
        if process and process.poll() is None:
            process.send_signal(number)

    with handled(_SIGNALS, forward):
        while True:
            process = start_child(command, env=environ)
            if stopped_by:  # just before
                process.send_signal(stopped_by)
            status = wait_for(process)
            status = status if status >= 0 else 128 - status
            if status in _FINAL or stopped_by:
                return status
            if (now := progress()) > reached:
                restarts, reached = 0, now
            restarts += 1
            if restarts > max_restarts:
                if max_restarts > 1:
                    get_logger().error("failed %d times without progress between", restarts)
                return status
            wait = wait_before(restarts)
            left = count_of(max_restarts - restarts, "restart")
            get_logger().warning("ended with exit status %d; starts again in %g s, with %s left", status, wait, left)
            until = time.monotonic() + wait
            while time.monotonic() < until and not stopped_by:
                time.sleep(min(0.1, wait))
            if stopped_by:
                return status

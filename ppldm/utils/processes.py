"""One function over many tasks in several processes, with no process left behind."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from .errors import ConfigError, DataError
from .machine import count_usable_cores

Task = TypeVar("Task")
Result = TypeVar("Result")


def check_workers(num_workers: int) -> int:
    """The number of processes that a flag asks for, 0 meaning one per core. Raises ConfigError."""
    if num_workers < 0:
        raise ConfigError(f"--num-workers is {num_workers}; it must be 0 (one per core) or more")
    return num_workers or count_usable_cores()


def run_tasks(
    function: Callable[[Task], Result], tasks: Sequence[Task], num_workers: int
) -> Iterator[tuple[Task, Result]]:
    """(task, result) of each task as it is finished; in this process with one worker. Errors arrive as themselves.

    Raises DataError where a process dies.
    """
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
                # Taken out, so that results do not pile up.
                yield futures.pop(future), future.result()
        except BrokenProcessPool as error:
            raise DataError(
                "a worker process died, most likely for want of memory; run again with a smaller --num-workers"
            ) from error
        finally:
            executor.shutdown(cancel_futures=True)


def _start_worker() -> None:
    """Ctrl-C reaches the whole process group: workers finish their task, the parent hands out no more. Where the parent
    was killed, they end as well."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)

"""Batches, the same ones with any number of worker processes; those of one process are made in a thread.

A batch is a dict of paddle tensors, the keys of `ppldm.data.dataset` with a leading dimension [micro batch], and
`skipped`, the list of reasons of all bad rows met on the way. Batch n is made by worker n % `num_workers`, which is
asked for it by a pipe of its own; an error, or the end of a killed worker, is raised where its batch is taken.

Large arrays come through anonymous memory that a worker shares with the main process since before the fork, in slots
that hold those of a batch each: no allocation, no lock, no file in /dev/shm. The number of a batch decides its slot:
who takes batch n out before asking for the next, with at most `num_slots - 1` asked for, never sees one overwritten.

Parts of a store come to this machine before their rows' turn: a thread walks the order one window of the shuffle ahead
of the batches that are taken. It only saves waiting: whoever opens a part fetches it where it is not here.
"""

import atexit
import gc
import mmap
import multiprocessing
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import paddle

from ..utils.errors import DataError, PpldmError, debugging, describe
from ..utils.log import get_logger
from ..utils.machine.devices import current_kind
from ..utils.processes.signals import end_with_parent
from ..utils.store.cache import bring, in_store
from .dataset import TextImageDataset
from .order import RUN_LENGTH, WINDOW_RUNS, StepSampler

_ALIGNMENT_BYTES = 64  # a cache line
_ROWS_AHEAD = RUN_LENGTH * WINDOW_RUNS
_AT_ONCE = 8  # parts that are fetched at a time
_BATCHES_AHEAD = 2  # of each worker; no fewer in all than of two
_SECONDS_TO_END = 10.0  # of a worker, with the batch that it makes
_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Stored:
    """Where an array lies in the memory."""

    start: int
    dtype: str
    shape: tuple[int, ...]


class Slots:
    """`num_slots` slots with room for arrays of `num_bytes` bytes each."""

    def __init__(self, num_slots: int, num_bytes: int):
        self.num_slots = num_slots
        self.slot_bytes = (num_bytes // mmap.PAGESIZE + 2) * mmap.PAGESIZE  # up to a page is lost by alignment
        self._memory = mmap.mmap(-1, self.num_slots * self.slot_bytes)

    def put(self, number: int, batch: dict) -> dict:
        """Batch `number` with `Stored` in place of the arrays that its slot has room for."""
        start = number % self.num_slots * self.slot_bytes
        end, left = start + self.slot_bytes, {}
        for name, value in batch.items():
            if isinstance(value, np.ndarray) and start + value.nbytes <= end:
                stored = Stored(start, value.dtype.str, value.shape)
                np.copyto(self.view(stored), value)
                start += -(-value.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
                value = stored
            left[name] = value
        return left

    def view(self, stored: Stored) -> np.ndarray:
        """The array itself, not a copy."""
        return np.ndarray(stored.shape, stored.dtype, self._memory, stored.start)


class BatchLoader:
    """The batches of a sampler, in order. num_workers: 0 makes them in a thread. Raises DataError where one fails."""

    def __init__(self, dataset: TextImageDataset, sampler: StepSampler, num_workers: int):
        self._dataset, self._sampler, self._num_workers = dataset, sampler, num_workers
        self._num_ahead, self._slots = _BATCHES_AHEAD * max(num_workers, 2), None
        if num_workers:
            self._slots = Slots(self._num_ahead + 1, sampler.micro_batch_size * dataset.sample_bytes)

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[dict]:
        workers: list[_Worker | _Thread] = [] if self._num_workers else [_Thread(self.make)]
        try:
            while len(workers) < self._num_workers:
                workers.append(_Worker(self.make, workers))
            batches = self._ask(workers)
            asked = deque(islice(batches, self._num_ahead))
            with reading_ahead(self._dataset, self._sampler) as advance:
                while asked:
                    batch = asked.popleft()()
                    asked.extend(islice(batches, 1))
                    advance()
                    if isinstance(batch, str):
                        raise DataError(batch)
                    stored = {name: self._slots.view(one) for name, one in batch.items() if isinstance(one, Stored)}
                    yield _to_tensors(batch | stored)
        finally:
            for worker in workers:
                worker.stop()
            for worker in workers:
                worker.join()

    def make(self, number: int, keys: list[tuple[int, int]]) -> dict | str:
        """A batch, its arrays in a slot where there are any, or the text of the error that there was instead."""
        try:
            batch = self._dataset.make_batch(keys, self._sampler.strata(number))
            if not self._slots and current_kind().is_cpu:
                return _to_tensors(batch)  # by the core in whose cache it lies
            return self._slots.put(number, batch) if self._slots else batch
        except PpldmError as error:
            return str(error)
        except Exception as error:  # whatever it is, it ends the run where the batch is taken
            if debugging():
                traceback.print_exc()
            return f"batch {number} of samples {keys} cannot be made: {describe(error)}"

    def _ask(self, workers: list) -> Iterator[Callable[[], dict | str]]:
        """For each batch, when it is asked for, what waits for it."""
        number = -1
        try:
            for number, keys in enumerate(self._sampler):
                yield workers[number % len(workers)].ask(number, keys)
        except Exception as error:
            text = f"the samples of batch {number + 1} cannot be listed: {describe(error)}"
            yield lambda: text


class _Thread:
    """Makes batches in this process, one after the other."""

    def __init__(self, make: Callable):
        self._make, self._pool = make, ThreadPoolExecutor(1, "batches")

    def ask(self, *batch) -> Callable[[], dict | str]:
        return self._pool.submit(self._make, *batch).result

    def stop(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def join(self) -> None:
        self._pool.shutdown()


class _Worker:
    """A process that does so. others: those that were forked before, whose pipes it must not hold open."""

    def __init__(self, make: Callable, others: list["_Worker"]):
        self._pipe, theirs = _FORK.Pipe()
        inherited = [self._pipe, *(other._pipe for other in others)]
        self._process = _FORK.Process(target=_work, args=(theirs, make, inherited, os.getpid()), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, *batch) -> Callable[[], dict | str]:
        with suppress(OSError):  # it was killed, as `_take` will find
            self._pipe.send(batch)
        return self._take

    def _take(self) -> dict | str:
        try:
            return self._pipe.recv()
        except (EOFError, OSError):
            self._process.join()
        how = f"was killed by signal {-status}" if (status := self._process.exitcode or 0) < 0 else "ended"
        return (
            f"data worker {self._process.pid} {how}; if memory was short, use fewer --dataloader_num_workers; the same "
            "command goes on from the last checkpoint"
        )

    def stop(self) -> None:
        with suppress(OSError):
            self._pipe.send(None)  # for one whose pipe another forked process has a copy of
        self._pipe.close()

    def join(self) -> None:
        self._process.join(_SECONDS_TO_END)
        self._process.kill()
        self._process.join()


def _work(pipe, make: Callable, inherited: list, main_process: int) -> None:
    """Ctrl-C and a scheduler's SIGTERM reach every process: a worker ends by its pipe, or with the main process."""
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent(main_process)
    gc.enable()  # the training process may collect at set times, which do not come here
    for one in inherited:
        one.close()
    with suppress(EOFError, OSError):
        while batch := pipe.recv():
            pipe.send(make(*batch))


@atexit.register
def _kill_workers() -> None:
    """Before multiprocessing asks those left to end by SIGTERM, and waits."""
    for process in multiprocessing.active_children():
        process.kill()


@contextmanager
def reading_ahead(dataset: TextImageDataset, sampler: StepSampler) -> Iterator[Callable[[], None]]:
    """Within it parts of stores are brought ahead of the batches; what to call when one more of these is taken."""
    room = threading.Semaphore(max(2, _ROWS_AHEAD // (sampler.world.size * sampler.micro_batch_size)))
    stopped = threading.Event()

    def run() -> None:
        asked: dict[Path, Future] = {}
        with ThreadPoolExecutor(_AT_ONCE, "fetch") as pool:
            for keys in sampler:
                room.acquire()
                if stopped.is_set():
                    break
                for path in dict.fromkeys(dataset.find_row(dataset.selection[place])[0] for _, place in keys):
                    is_asked = path in asked and not asked[path].done()
                    if not is_asked and in_store(path) and not path.exists():
                        asked[path] = pool.submit(_fetch, path)
            pool.shutdown(cancel_futures=stopped.is_set())

    if any(in_store(path) for source in dataset.sources for path in source.parts):
        threading.Thread(target=run, name="read ahead", daemon=True).start()
    try:
        yield room.release
    finally:
        stopped.set()
        room.release()


def _fetch(path: Path) -> None:
    try:
        bring(path)
    except PpldmError as error:  # raised again by whoever needs the part, where it lasts
        get_logger().info("reading ahead: %s", error)


def first_epoch(dataset: TextImageDataset, places: list[int]) -> dict:
    """The samples of epoch 0 of these places, as tensors; `skipped` stays a list."""
    return _to_tensors(dataset.make_batch([(0, place) for place in places]))


def _to_tensors(batch: dict) -> dict:
    return {name: paddle.to_tensor(one) if isinstance(one, np.ndarray) else one for name, one in batch.items()}

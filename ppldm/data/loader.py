"""Batches through Paddle's DataLoader, the same ones with any number of worker processes.

A batch is a dict of paddle tensors, the keys of `ppldm.data.dataset` with a leading dimension [micro batch], and
`skipped`, the list of reasons of all bad rows met on the way.

Paddle turns an exception in a worker, or in its reader thread, into a fatal error of its own without the message. So
errors travel as data, in place of the batch, and are raised where the batch is taken.

Large arrays come through memory of our own (`Slots`), the rest through pipes, and nothing through Paddle's
shared memory: for that a worker would allocate in Paddle's C++, whose locks a fork may have copied while another thread
held them, and then it waits for ever; and a small /dev/shm kills it.

A killed worker is reported at once: Paddle would raise its own error wherever the main process is just then, and would
wait for ever where the worker died with half a batch in the pipe.

Parts of a store come to this machine before their rows' turn (`ReadAhead`). The order of rows is known, so a thread
walks it one window of the shuffle (`order.rows`) ahead of the batches that are taken, and fetches the parts it meets
that are not here. It only saves waiting: whoever opens a part fetches it where it is not here yet, or no longer.

Worker processes share memory with the main one, in slots that hold the large arrays of a batch each. It is there before
the workers are forked, so that they need no allocation, no lock and no file, and anonymous, so that the size of
/dev/shm does not matter. The number of a batch decides its slot: who takes batch n out before asking for the next, of a
loader that makes at most `num_slots - 1` batches ahead of it, never sees one overwritten.
"""

import atexit
import mmap
import multiprocessing.connection
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import paddle
from paddle.io import DataLoader, Dataset

from ..utils.errors import DataError, PpldmError, debugging, describe
from ..utils.log import get_logger
from ..utils.processes.signals import end_with_parent
from ..utils.store.cache import bring, in_store
from .dataset import TextImageDataset
from .images.resize import compile_kernels as compile_resize
from .normals import compile_kernel as compile_normals
from .order.rows import RUN_LENGTH, WINDOW_RUNS
from .order.step_sampler import StepSampler

_ALIGNMENT_BYTES = 64  # a cache line
_ROWS_AHEAD = RUN_LENGTH * WINDOW_RUNS
_AT_ONCE = 8  # parts that are fetched at a time
_PREFETCH_FACTOR = 2


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


class ReadAhead:
    """find_part: the path of the part of a place among the selected rows. Runs from `start`
    to `stop`, or to the sampler's end; `advance` tells that a batch was taken."""

    def __init__(self, sampler: StepSampler, find_part: Callable[[int], Path]):
        self._sampler, self._find_part = sampler, find_part
        self._ahead = max(2, _ROWS_AHEAD // (sampler.world.size * sampler.micro_batch_size))
        self._taken, self._stopped, self._changed = 0, False, threading.Condition()

    def start(self) -> None:
        """Begin; after the loader's processes are forked."""
        threading.Thread(target=self._run, name="read ahead", daemon=True).start()

    def advance(self) -> None:
        """One more batch is taken."""
        with self._changed:
            self._taken += 1
            self._changed.notify()

    def stop(self) -> None:
        """Begin no further file."""
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def _run(self) -> None:
        asked: dict[Path, Future] = {}
        with ThreadPoolExecutor(_AT_ONCE, "fetch") as executor:
            for number, keys in enumerate(self._sampler):
                with self._changed:
                    self._changed.wait_for(partial(self._is_near, number))
                    if self._stopped:
                        break
                for path in dict.fromkeys(self._find_part(place) for _, place in keys):
                    is_asked = path in asked and not asked[path].done()
                    if not is_asked and in_store(path) and not path.exists():
                        asked[path] = executor.submit(self._fetch, path)
            executor.shutdown(cancel_futures=self._stopped)

    def _is_near(self, number: int) -> bool:
        return self._stopped or number < self._taken + self._ahead

    def _fetch(self, path: Path) -> None:
        try:
            bring(path)
        except PpldmError as error:  # raised again by whoever needs the part, where it lasts
            get_logger().info("reading ahead: %s", error)


class BatchLoader(DataLoader):
    """A DataLoader that raises DataError where a sample could not be made or a worker was killed.

    slots: the memory of the workers' arrays, for `_outstanding_batches` and the one that is taken out; None without.
    read_ahead: brings parts of stores; None where there are none.
    """

    slots: Slots | None = None
    read_ahead: ReadAhead | None = None

    def __iter__(self) -> Iterator[dict]:
        on_child = signal.getsignal(signal.SIGCHLD)
        batches = super().__iter__()
        deaths = _watch_workers(batches) if self.num_workers else []
        if signal.getsignal(signal.SIGCHLD) is not on_child:
            signal.signal(signal.SIGCHLD, on_child)
        if self.read_ahead:
            self.read_ahead.start()
        try:
            for batch in batches:
                if self.read_ahead:
                    self.read_ahead.advance()
                if "error" in batch:
                    raise DataError(batch["error"])
                yield {
                    name: paddle.to_tensor(self.slots.view(value)) if isinstance(value, Stored) else value
                    for name, value in batch.items()
                }
        except SystemError as error:
            if not deaths:
                raise
            raise DataError(
                f"data worker {deaths[0]}; if memory was short, use fewer --dataloader_num_workers; "
                "the same command goes on from the last checkpoint"
            ) from error
        finally:
            if self.read_ahead:
                self.read_ahead.stop()
            # Paddle keeps its last iterator, workers and all, until the process exits.
            if deaths or (self.num_workers and any(worker.exitcode for worker in batches._workers)):
                _abandon(batches)
            else:
                batches._try_shutdown_all()


def build_loader(dataset: TextImageDataset, sampler: StepSampler, num_workers: int) -> BatchLoader:
    """The batches of a sampler, in its order; `len()` is the sampler's. num_workers 0 loads in this process."""
    compile_resize()  # once, and not in each worker
    compile_normals()
    slots = None
    if num_workers:
        # Paddle's DataLoader: so many batches are asked for and not handed out, at most.
        num_outstanding = _PREFETCH_FACTOR * max(num_workers, 2)
        slots = Slots(num_outstanding + 1, sampler.micro_batch_size * dataset.sample_bytes)
    loader = BatchLoader(
        _Keys(len(dataset)),
        batch_sampler=_Numbered(sampler),
        num_workers=num_workers,
        collate_fn=partial(_make_batch, dataset, sampler, slots),
        prefetch_factor=_PREFETCH_FACTOR,
        worker_init_fn=partial(_leave_signals_to_the_main_process, os.getpid()),
        use_shared_memory=False,
    )
    loader.slots = slots
    if any(in_store(path) for source in dataset.sources for path in source.parts):
        loader.read_ahead = ReadAhead(sampler, lambda place: dataset.find_row(dataset.selection[place])[0])
    return loader


def first_epoch(dataset: TextImageDataset, places: list[int]) -> dict:
    """The samples of epoch 0 of these places, as tensors; `skipped` stays a list."""
    batch = dataset.make_batch([(0, place) for place in places])
    return {name: value if name == "skipped" else paddle.to_tensor(value) for name, value in batch.items()}


def _watch_workers(batches) -> list[str]:
    """A list to which a worker's untimely end is added, after which the next batch raises SystemError."""
    deaths, workers = [], {worker.sentinel: worker for worker in batches._workers}

    def watch() -> None:
        while workers:
            for sentinel in multiprocessing.connection.wait(list(workers)):
                worker = workers.pop(sentinel)
                while worker.exitcode is None:  # another thread is about to set it
                    time.sleep(0.01)
                if worker.exitcode and not batches._shutdown:
                    how = f"was killed by signal {-worker.exitcode}" if worker.exitcode < 0 else "ended"
                    deaths.append(f"{worker.pid} {how}")
                    batches._exit_thread_unexpectedly()

    threading.Thread(target=watch, name="watch data workers", daemon=True).start()
    return deaths


def _abandon(batches) -> None:
    """End all workers, of which one was killed: it may have held a lock of theirs, so that nothing is asked of them."""
    batches._shutdown = True
    for worker in batches._workers:
        worker.kill()
        worker.join()
    for queue in batches._indices_queues:
        queue.cancel_join_thread()
        queue.close()
    batches._exit_thread_unexpectedly()
    paddle.base.core._erase_process_pids(id(batches))


def _leave_signals_to_the_main_process(main_process: int, _worker: int) -> None:
    """Ctrl-C reaches every process of the terminal, and a scheduler's SIGTERM every one of the job. The main process
    decides; a worker ends when it is told to, or killed, or with the main process."""
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent(main_process)


@atexit.register
def _kill_workers() -> None:
    """Before multiprocessing asks those left to end by SIGTERM, and waits."""
    for process in multiprocessing.active_children():
        process.kill()


def _make_batch(
    dataset: TextImageDataset, sampler: StepSampler, slots: Slots | None, keys: list[tuple[int, tuple[int, int]]]
) -> dict:
    """The batch, or the text of the error that there was instead."""
    number, first = keys[0]
    try:
        if isinstance(first, str):
            raise DataError(first)
        batch = dataset.make_batch([key for _, key in keys], sampler.strata(number))
        if slots is None:
            return batch
        return {"row_ids": batch.pop("row_ids"), **slots.put(number, batch)}  # an array for DataLoader's queue
    except PpldmError as error:
        text = str(error)
    except Exception as error:  # whatever it is, it ends the run where the batch is taken
        if debugging():
            traceback.print_exc()
        text = f"batch {number} of samples {[key for _, key in keys]} cannot be made: {describe(error)}"
    return {"error": text, "row_ids": np.empty(1, dtype=np.int64)}


class _Numbered:
    """A sampler's batches, each key with the number of its batch before it; its error as the last batch's only key."""

    def __init__(self, sampler: StepSampler):
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[list[tuple[int, tuple[int, int] | str]]]:
        number = -1
        try:
            for number, keys in enumerate(self.sampler):
                yield [(number, key) for key in keys]
        except Exception as error:  # in DataLoader's reader thread
            yield [(number + 1, f"the samples of batch {number + 1} cannot be listed: {describe(error)}")]


class _Keys(Dataset):
    """The key of a sample as the sample itself: samples are made a batch at a time, where DataLoader collates them."""

    def __init__(self, num_rows: int):
        self.num_rows = num_rows

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, key):
        return key

"""Batches through Paddle's DataLoader, the same ones with any number of worker processes.

A batch is a dict of paddle tensors, the keys of `ppldm.data.dataset` with a leading dimension [micro batch], and
`skipped`, the list of reasons of all bad rows met on the way.

Paddle turns an exception in a worker, or in its reader thread, into a fatal error of its own without the message. So
errors travel as data, in place of the batch, and are raised where the batch is taken.
"""

import shutil
import signal
from collections.abc import Iterator
from functools import partial

import numpy as np
from paddle.io import DataLoader, Dataset

from ..utils.errors import DataError, PpldmError
from ..utils.log import get_logger
from .dataset import TextImageDataset
from .sampler import StepSampler

_PREFETCH_FACTOR = 2


class BatchLoader(DataLoader):
    """A DataLoader that raises DataError where a sample could not be made."""

    def __iter__(self) -> Iterator[dict]:
        batches = super().__iter__()
        try:
            for batch in batches:
                if "error" in batch:
                    raise DataError(batch["error"])
                yield batch
        finally:
            # Paddle keeps its last iterator, workers and all, until the process exits.
            batches._try_shutdown_all()


def build_loader(dataset: TextImageDataset, sampler: StepSampler, num_workers: int) -> BatchLoader:
    """The batches of a sampler, in its order; `len()` is the sampler's. num_workers 0 loads in this process."""
    return BatchLoader(
        _Keys(len(dataset)),
        batch_sampler=sampler,
        num_workers=num_workers,
        collate_fn=partial(_make_batch, dataset),
        prefetch_factor=_PREFETCH_FACTOR,
        worker_init_fn=_leave_signals_to_the_main_process,
        use_shared_memory=False,
    )


def _leave_signals_to_the_main_process(_worker: int) -> None:
    """Ctrl-C reaches every process of the terminal; the main one decides, and ends its workers by SIGTERM."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _make_batch(dataset: TextImageDataset, keys: list[tuple[int, int]]) -> dict:
    """The batch, or the text of the error that there was instead."""
    try:
        return dataset.make_batch(keys)
    except PpldmError as error:
        # DataLoader's queue takes no batch without arrays.
        return {"error": str(error), "row_ids": np.empty(1, dtype=np.int64)}


class _Keys(Dataset):
    """(epoch, row) as the sample of itself: samples are made a batch at a time, where DataLoader collates them."""

    def __init__(self, num_rows: int):
        self.num_rows = num_rows

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, key: tuple[int, int]) -> tuple[int, int]:
        return key


def _shared_memory_fits(dataset: TextImageDataset, sampler: StepSampler, num_workers: int) -> bool:
    """Whether /dev/shm has room for all batches in flight; a full one kills workers with SIGBUS."""
    sample_bytes = 3 * dataset.resolution**2 + 8 * int(np.prod(dataset.latent_shape)) + (1 << 12)
    due = 2 * _PREFETCH_FACTOR * num_workers * sampler.micro_batch_size * sample_bytes
    free = shutil.disk_usage("/dev/shm").free
    if free < due:
        get_logger().warning(
            "/dev/shm has %d MB free of the %d MB that %d workers need; batches go through pipes, which is slower",
            free >> 20,
            due >> 20,
            num_workers,
        )
    return free >= due

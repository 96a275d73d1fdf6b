"""Batches through Paddle's DataLoader, the same ones with any number of worker processes.

A batch is a dict of paddle tensors, the keys of `ppldm.data.dataset` with a leading dimension [micro batch], and
`skipped`, the list of reasons of all bad rows met on the way.

Paddle turns an exception in a worker, or in its reader thread, into a fatal error of its own without the message. So
errors travel as data, in place of the batch, and are raised where the batch is taken.

Batches come through pipes, not through shared memory: for that a worker would allocate in Paddle's C++, whose locks a
fork may have copied while another thread held them, and then it waits for ever; and a small /dev/shm kills it. Pixels
are bytes until the model has them, so that pipes are wide enough.
"""

import signal
from collections.abc import Iterator

import numpy as np
from paddle.io import DataLoader, Dataset

from ..utils.errors import DataError, PpldmError
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
        _ErrorsAsSamples(dataset),
        batch_sampler=sampler,
        num_workers=num_workers,
        collate_fn=collate,
        prefetch_factor=_PREFETCH_FACTOR,
        worker_init_fn=_leave_signals_to_the_main_process,
        use_shared_memory=False,
    )


def _leave_signals_to_the_main_process(_worker: int) -> None:
    """Ctrl-C reaches every process of the terminal; the main one decides, and ends its workers by SIGTERM."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def collate(samples: list) -> dict:
    """Stack samples; `skipped` lists are joined. If one of them is an error, the batch is that error's text."""
    for sample in samples:
        if isinstance(sample, PpldmError):
            # DataLoader's queue takes no batch without arrays.
            return {"error": str(sample), "row_ids": np.empty(1, dtype=np.int64)}
    batch = {key: np.stack([sample[key] for sample in samples]) for key in samples[0] if key != "skipped"}
    return batch | {"skipped": [reason for sample in samples for reason in sample["skipped"]]}


class _ErrorsAsSamples(Dataset):
    def __init__(self, dataset: TextImageDataset):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: tuple[int, int]):
        try:
            return self.dataset[key]
        except PpldmError as error:
            return error

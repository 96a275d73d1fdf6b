"""Memory that worker processes share with the main one, in slots that hold the large arrays of a batch each.

It is there before the workers are forked, so that they need no allocation, no lock and no file, and anonymous, so that
the size of /dev/shm does not matter. The number of a batch decides its slot: who takes batch n out before asking for
the next, of a loader that makes at most `num_slots - 1` batches ahead of it, never sees one overwritten.
"""

import mmap
from dataclasses import dataclass

import numpy as np

_ALIGNMENT_BYTES = 64  # a cache line


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

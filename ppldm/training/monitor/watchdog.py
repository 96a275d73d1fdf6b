"""The end of a rank that waits for its data for ever, so that it does not keep all the others waiting."""

import faulthandler
import threading
import time
from contextlib import closing

from ...utils.processes.failure import end_process


class BatchesWithTimeout:
    """An iterable of batches; the process ends with an error where one takes longer than `seconds` (0: no limit).

    A read that hangs cannot be interrupted from within, so a thread writes where every other one stands, names the
    rank, and ends the process by exit status 1. Loader processes end with it.
    """

    def __init__(self, batches, seconds: float, rank: int):
        self.batches, self.seconds, self.rank = batches, seconds, rank
        self._waiting_since: float | None = None

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self):
        ended = threading.Event()
        if self.seconds > 0:
            threading.Thread(target=self._watch, args=(ended,), daemon=True).start()
        try:
            with closing(iter(self.batches)) as source:
                while True:
                    self._waiting_since = time.monotonic()
                    batch = next(source, None)
                    self._waiting_since = None
                    if batch is None:
                        return
                    yield batch
        finally:
            self._waiting_since = None
            ended.set()

    def _watch(self, ended: threading.Event) -> None:
        while not ended.wait(min(1.0, self.seconds / 4)):
            since = self._waiting_since
            if since is not None and time.monotonic() - since > self.seconds:
                faulthandler.dump_traceback()
                end_process(
                    self.rank,
                    f"rank {self.rank} has waited {self.seconds:g} s for a batch; see to its storage, "
                    "or allow more with --data_timeout",
                )

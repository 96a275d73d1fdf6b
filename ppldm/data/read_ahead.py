"""Parts of a store come to this machine before their rows' turn.

The order of rows is known, so a thread walks it one window of the shuffle (`order.rows`) ahead of the batches that are
taken, and fetches the parts it meets that are not here. It only saves waiting: whoever opens a part fetches it where it
is not here yet, or no longer.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

from ..utils.errors import PpldmError
from ..utils.log import get_logger
from ..utils.store.cache import bring, in_store
from .order.rows import RUN_LENGTH, WINDOW_RUNS
from .order.step_sampler import StepSampler

_ROWS_AHEAD = RUN_LENGTH * WINDOW_RUNS
_AT_ONCE = 8  # parts that are fetched at a time


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

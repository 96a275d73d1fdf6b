"""How large a share of the rows could not be used lately, and when that is too much.

Counted are the rows read for the newest updates that together have `WINDOW_SAMPLES` samples, or for all since the run's
first while there are fewer; so the window moves by whole updates, and what it says is a function of (config, seed,
step). Its state is part of the checkpoint. All ranks are told the same numbers, and so raise together.
"""

from collections import Counter, deque

from ...utils.errors import DataError

WINDOW_SAMPLES = 1000
LEAST_SAMPLES = 100  # a share of fewer says nothing


class SkippedShare:
    """`limit`: the share of skipped rows, of all rows read, above which the run ends. `state`: what `state` gave."""

    def __init__(self, limit: float, state: list | None = None):
        self.limit = limit
        self._updates = deque(map(tuple, state or []))

    def add(self, samples: int, skipped: int) -> None:
        """One update: its samples, and the rows that were skipped to find them, over all ranks."""
        self._updates.append((samples, skipped))
        total = sum(count for count, _ in self._updates)
        while total - self._updates[0][0] >= WINDOW_SAMPLES:
            total -= self._updates.popleft()[0]

    def state(self) -> list:
        """What a checkpoint keeps, ready for JSON."""
        return [list(update) for update in self._updates]

    @property
    def is_too_large(self) -> bool:
        """Whether the run has to end. False before there are `LEAST_SAMPLES` samples."""
        samples, skipped = map(sum, zip(*self._updates, strict=True)) if self._updates else (0, 0)
        return samples >= LEAST_SAMPLES and skipped > self.limit * (samples + skipped)

    def error(self, reasons: Counter) -> DataError:
        """What ends the run. `reasons`: rows skipped since its first update, by reason, on all ranks."""
        samples, skipped = map(sum, zip(*self._updates, strict=True))
        counts = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common(5))
        return DataError(
            f"of the {samples + skipped} rows read for the last {samples} samples, {skipped} could not be used, more "
            f"than the share of {self.limit:g} that --max_skipped_share allows (since the first update: {counts}); "
            "look at the data with ppldm verify, or go on with a larger share and --accept_changes max_skipped_share"
        )

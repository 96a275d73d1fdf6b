"""What happens to a row that cannot be used: raise, or count it by reason and go on with the next."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from ..utils.errors import DataError, RowError

T = TypeVar("T")

EXAMPLES_PER_REASON = 3  # of bad rows, in accounts


@dataclass(frozen=True)
class BadRows:
    """`on_error`: "raise" stops at the first bad row; "count" takes the next candidate instead, and gives up after
    `limit` bad rows in a row."""

    on_error: str = "count"
    limit: int = 100

    def load(self, load: Callable[[int], T], candidates: Iterable[int]) -> tuple[T, int, list[str]]:
        """(`load` of the first good candidate, that candidate, the reasons of the bad ones before it).

        No more candidates are asked for than needed. Raises DataError.
        """
        errors: list[RowError] = []
        for candidate in islice(candidates, self.limit):
            try:
                return load(candidate), candidate, [error.reason for error in errors]
            except RowError as error:
                if self.on_error == "raise":
                    raise DataError(f"bad row ({error.reason}): {error}") from error
                errors.append(error)
        examples = "; ".join(str(error) for error in errors[:EXAMPLES_PER_REASON])
        raise DataError(f"{len(errors)} bad rows in a row, so the data or a flag must be wrong; the first: {examples}")

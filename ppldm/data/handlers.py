"""What happens to a row that cannot be used: raise, or count it by reason and go on with the next."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ..utils.errors import DataError, RowError

T = TypeVar("T")


@dataclass(frozen=True)
class BadRows:
    """`on_error`: "raise" stops at the first bad row; "count" takes the next row number instead, modulo the total, so
    that ranks stay in step, and gives up after `limit` bad rows in a row."""

    on_error: str = "count"
    limit: int = 100

    def load(self, load: Callable[[int], T], row: int, num_rows: int) -> tuple[T, int, list[str]]:
        """(`load` of the first good row from `row` on, that row's number, the reasons of the bad ones before it).

        Raises DataError.
        """
        errors: list[RowError] = []
        for candidate in range(row, row + min(self.limit, num_rows)):
            try:
                return load(candidate % num_rows), candidate % num_rows, [error.reason for error in errors]
            except RowError as error:
                if self.on_error == "raise":
                    raise DataError(f"bad row ({error.reason}): {error}") from error
                errors.append(error)
        examples = "; ".join(str(error) for error in errors[:3])
        raise DataError(f"{len(errors)} bad rows in a row, so the data or a flag must be wrong; the first: {examples}")

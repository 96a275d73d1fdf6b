"""In which updates a place of the selection was used: the inverse of `StepSampler`, stand-ins for bad rows included.

Where a place stands in an epoch is computed, not searched for. A place also stood in for the bad rows just before it in
the order of its list and shape. These are tried, the nearest first, until another row stood in for one of them. So a
row costs a look-up and, where rows may be bad, about one reading an epoch.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, count

from .groups import BucketSuccessors, Groups
from .rows import Mix, Successors


@dataclass(frozen=True, order=True)
class Use:
    """The sample at `position` of a run's sequence was asked for as (`epoch`, `asked`), a place."""

    position: int
    epoch: int
    asked: int


def uses_of(
    place: int,
    order: Mix | Groups,
    successors: Successors | BucketSuccessors,
    stop: int,
    used: Callable[[int, int], int] | None,
) -> Iterator[Use]:
    """Each use of a place before position `stop`, in no order.

    used: (epoch, place asked for) -> the place that is used; None where no row is bad.
    """
    if used and used(0, place) != place:
        return  # a bad row
    starts = (place, *successors.elsewhere(place)) if used else (place,)
    for start in starts:
        for epoch in count():
            first = order.position(epoch, start)
            if first is None:
                break
            for asked in chain([start], successors.before(epoch, start) if used else ()):
                if used and asked != place and used(epoch, asked) != place:
                    break
                if (position := order.position(epoch, asked)) < stop:
                    yield Use(position, epoch, asked)
            if first >= stop:
                break


def first_use(
    places: list[int],
    order: Mix | Groups,
    successors: Successors | BucketSuccessors,
    stop: int,
    used: Callable[[int, int], int] | None,
) -> int:
    """The first position before `stop` at which any of the places was used; `stop` where there is none."""
    for place in places:
        stop = min((use.position for use in uses_of(place, order, successors, stop, used)), default=stop)
    return stop

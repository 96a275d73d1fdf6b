"""Things that a process opens by their number, of which it keeps the latest few."""

from collections.abc import Callable
from functools import lru_cache
from typing import Generic, TypeVar

T = TypeVar("T")


class LastUsed(Generic[T]):
    """`open(number)`, of which the latest `count` are kept; a copy in another process opens its own."""

    def __init__(self, open: Callable[[int], T], count: int):
        self._arguments = open, count
        self._kept = lru_cache(maxsize=count)(open)

    def __call__(self, number: int) -> T:
        """Raises what `open` raises."""
        return self._kept(number)

    def __getstate__(self):
        return self._arguments

    def __setstate__(self, state):
        self.__init__(*state)

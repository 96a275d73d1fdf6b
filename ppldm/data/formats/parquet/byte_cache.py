"""What can be read again, kept within a number of bytes: the latest used stays."""

from collections import OrderedDict
from collections.abc import Callable


class ByteCache:
    """Values by a key, a tuple that begins with their owner. limit: of bytes; one value may be larger, alone."""

    def __init__(self, limit: int):
        self.limit, self.num_bytes = limit, 0
        self._kept: OrderedDict[tuple, tuple[object, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: tuple, make: Callable[[], tuple[object, int]]):
        """The value of `key`; where it is not there, that of `make`, which says its bytes as well."""
        found = self._kept.pop(key, None)
        if found is None:
            found = make()
            self.num_bytes += found[1]
        self._kept[key] = found
        while self.num_bytes > self.limit and len(self._kept) > 1:
            self.num_bytes -= self._kept.popitem(last=False)[1][1]
        return found[0]

    def drop(self, owner) -> None:
        """Forget what belongs to an owner."""
        for key in [key for key in self._kept if key[0] is owner]:
            self.num_bytes -= self._kept.pop(key)[1]

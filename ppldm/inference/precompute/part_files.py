"""The cached files of one part while they are made: finished or absent, and continued where a killed run left them.

A file is made under a temporary name, in which a killed run leaves what it has computed, and gets its own name once all
wanted rows are there. In one that has its name already, what is missing is filled in: rows that another `--where`
selects or that training did not come to, and what is damaged.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from ...data.cached.file import CachedFile
from ...data.cached.key import CacheKey, unfinished_path
from ...data.formats.index.lock import build_lock
from ...data.formats.open import open_part
from ...data.formats.rows import Rows
from ...utils.errors import PartError
from ...utils.files import finish_file
from ...utils.log import get_logger

File = TypeVar("File", bound=CachedFile)

# Of a row in a file of its own, which may be there the next time.
_PASSING = "unreadable"


@dataclass
class Account:
    """What became of arrays. encoded: computed now. found: there before. repaired: of those encoded, damaged before.
    bad: of rows that cannot be used, by reason, now or before."""

    encoded: int = 0
    found: int = 0
    repaired: int = 0
    bad: Counter = field(default_factory=Counter)

    def __add__(self, other: "Account") -> "Account":
        return Account(self.encoded + other.encoded, self.found + other.found, self.repaired + other.repaired,
                       self.bad + other.bad)  # fmt: skip

    def wants(self, file: CachedFile, row: int, variant: int) -> bool:
        """Whether an array is to be computed, which is then missing; one that is there is counted."""
        reason = file.reason(row, variant)
        if file.is_damaged(row, variant) or reason == _PASSING:
            self.repaired += reason != _PASSING
            file.forget(row, variant)
        elif file.states[row, variant]:
            self.found += reason is None
            self.bad.update([reason] if reason else [])
            return False
        return True


@contextmanager
def locked_part(task) -> Iterator[Rows]:
    """The part of a task, while no other process makes its files. Raises PartError where it is another by now."""
    with ExitStack() as stack:
        for target in task.paths:
            stack.enter_context(build_lock(target))
        part = stack.enter_context(closing(open_part(task.path, task.source)))
        if part.identity[:2] != task.content:
            raise PartError(f"{task.path} has changed since the command began; run it again")
        yield part


@contextmanager
def unfinished_file(
    opened: type[File], target: Path, key: CacheKey, create: Callable[[Path], None], fits=lambda file: True
) -> Iterator[File]:
    """The file of a locked part, to be filled in: as it is there, whole or as a killed run left it, else created. It is
    durable, and has its name, afterwards. opened: its class. create: writes an empty one. fits: whether one that is
    there can be continued."""
    file = _open_file(opened, target, key, fits)
    if file is None:
        create(unfinished_path(target))
        file = opened(unfinished_path(target), key, writable=True)
    try:
        yield file
        file.flush()
    finally:
        file.close()
    if file.path != target:
        finish_file(file.path, target)


def _open_file(opened: type[File], target: Path, key: CacheKey, fits: Callable[[File], bool]) -> File | None:
    for path in (target, unfinished_path(target)):
        if path.exists():
            try:
                if fits(file := opened(path, key, writable=True)):
                    return file
                file.close()
                error = f"{path} is of other texts"
            except PartError as damage:
                error = damage
            get_logger().warning("making a file of %s again: %s", key.what, error)
            path.unlink()
    return None

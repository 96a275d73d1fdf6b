"""The cached files of one part while they are made: finished or absent, and continued where a killed run left them.

A file is made under a temporary name, in which a killed run leaves what it has computed, and gets its own name once all
wanted rows are there. In one that has its name already, what is missing is filled in: rows that another `--where`
selects or that training did not come to, and what is damaged. No paddle here: what encodes is handed in.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..data.cached.file import CachedFile, create_file, unfinished_path
from ..data.cached.key import CacheKey
from ..data.formats.index.cache import build_lock
from ..data.formats.open import open_part
from ..utils.errors import PartError, RowError
from ..utils.files import finish_file
from ..utils.log import get_logger
from .kinds import Cell, Contents, Encoder, Task, Wanted

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
        sums = (getattr(self, name) + getattr(other, name) for name in ("encoded", "found", "repaired", "bad"))
        return Account(*sums)

    def wants(self, cell: Cell) -> bool:
        """Whether an array is to be computed, which is then missing; one that is there is counted."""
        file, place = cell.file, (cell.row, cell.variant)
        reason = file.reason(*place)
        if file.is_damaged(*place) or reason == _PASSING:
            self.repaired += reason != _PASSING
            file.forget(*place)
        elif file.states[place]:
            self.found += reason is None
            self.bad.update([reason] if reason else [])
            return False
        return True


def encode_part(
    task: Task, encoder: Encoder, pool: Executor, told: Callable[[int], object] = lambda count: None
) -> Account:
    """Make the files of a part whole. pool: threads that decode pictures. told: is called with how many rows of files
    are settled. Raises PartError, ConfigError, OSError."""
    account, wanted = Account(), []
    own = [file for file in task.files if len(file.rows)]
    with ExitStack() as stack:
        for file in own:
            stack.enter_context(build_lock(file.path))
        part = stack.enter_context(closing(open_part(task.path, task.source)))
        if part.identity[:2] != task.content:
            raise PartError(f"{task.path} has changed since the command began; run it again")
        contents = task.request.open(part, encoder)
        files = [stack.enter_context(_unfinished_file(one, contents)) for one in own]
        for one, file in zip(own, files, strict=True):
            for cell in filter(account.wants, contents.list_cells(file, one.rows)):
                file.check_engine(task.request.engine)
                wanted.append(cell)
        told(task.num_rows - _count_rows(wanted))
        _fill(wanted, contents.load(wanted, pool), encoder, account, told)
    return account


def _fill(
    wanted: list[Cell],
    loaded: Iterator[tuple[Cell, Any]],
    encoder: Encoder,
    account: Account,
    told: Callable[[int], object],
) -> None:
    """Write the arrays of cells, encoded in batches of one shape."""
    left, batches = Counter(cell.shape for cell in wanted), defaultdict(list)
    for cell, content in loaded:
        batch = batches[cell.shape]
        left[cell.shape] -= 1
        if isinstance(content, RowError):
            cell.file.mark_bad(cell.row, cell.variant, content.reason)
            account.bad[content.reason] += 1
            told(_count_rows([cell]))
        else:
            batch.append((cell, content))
        if len(batch) == encoder.batch_size or (batch and not left[cell.shape]):
            cells, contents = zip(*batch, strict=True)
            for one, array in zip(cells, encoder(contents), strict=True):
                is_finite = one.file.write(one.row, one.variant, array) is not None
                account.encoded += is_finite
                account.bad.update([] if is_finite else ["not_finite"])
            told(_count_rows(cells))
            batch.clear()


def _count_rows(cells) -> int:
    """How many rows these are of, each counted with its first array."""
    return sum(cell.variant == 0 for cell in cells)


@contextmanager
def _unfinished_file(wanted: Wanted, contents: Contents) -> Iterator[CachedFile]:
    """A file of a locked part, to be filled in: as it is there, whole or as a killed run left it, else created. It is
    durable, and has its name, afterwards."""
    unfinished, key = unfinished_path(wanted.path), wanted.key
    codes = contents.find_codes(key)
    file = _open_file(wanted.path, key, codes) or _open_file(unfinished, key, codes)
    if file is None:
        create_file(unfinished, key, contents.header, codes, contents.sizes, contents.texts)
        file = CachedFile(unfinished, key, writable=True)
    try:
        yield file
        file.flush()
    finally:
        file.close()
    if file.path == unfinished:
        finish_file(unfinished, wanted.path)


def _open_file(path: Path, key: CacheKey, codes: np.ndarray) -> CachedFile | None:
    if not path.exists():
        return None
    try:
        file = CachedFile(path, key, writable=True)
        if np.array_equal(file.codes, codes):
            return file
        file.close()
        error = f"{path} is of other texts"
    except PartError as damage:
        error = str(damage)
    get_logger().warning("making a file of %s again: %s", key.what, error)
    path.unlink()
    return None

"""The embeddings of one part's captions: encoded in batches, kept in its file (`part_files`).

No paddle here: what encodes is handed in.
"""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from contextlib import closing
from functools import partial
from typing import Protocol

import numpy as np

from ...data.cached.embeddings import count_texts, create_embeddings
from ...data.cached.file import CachedFile
from ...data.formats.open import open_part
from ...data.formats.rows import Rows
from ...data.text.captions import CaptionRule
from ...utils.errors import RowError
from .part_files import Account, locked_part, unfinished_file
from .texts_plan import TextTask


class EncodeTexts(Protocol):
    """Captions, at most `batch_size`, to float32 [n, L, D]; those of a caption are the same whatever the others are
    (`inference.precompute.text_encoder`)."""

    batch_size: int
    digest: str
    width: int

    def __call__(self, captions: list[str]) -> np.ndarray: ...


def measure_texts(task: TextTask, encoder: EncodeTexts, pool: Executor) -> tuple[float, list[float]]:
    """(captions of a row, [seconds of a caption]), of the first rows of a part."""
    with closing(open_part(task.path, task.source)) as part:
        texts = read_captions(part, task.settings.captions, task.rows[: encoder.batch_size].tolist())
    for _ in range(2):  # the first time is slower
        began = time.monotonic()
        encoder([""])
    seconds = (time.monotonic() - began) / encoder.batch_size
    return float(np.mean([0 if isinstance(one, RowError) else len(one) for one in texts])), [seconds]


def read_captions(part: Rows, rule: CaptionRule, rows: Iterable[int] | None = None) -> list[list[str] | RowError]:
    """The texts that may be drawn of rows of a part, None for all, or why a row has none."""
    found: list[list[str] | RowError] = []
    for number in range(len(part)) if rows is None else rows:
        try:
            row = part.read(number)
            rule.check(row)
            found.append(rule.texts(row))
        except RowError as error:
            found.append(error)
    return found


def encode_texts(
    task: TextTask, encoder: EncodeTexts, pool: Executor, told: Callable[[int], None] = lambda count: None
) -> Account:
    """Make the file of a part whole. told: is called with how many rows are settled. Raises PartError, OSError."""
    (target,), (key,) = task.paths, task.keys
    with locked_part(task) as part:
        texts = read_captions(part, task.settings.captions)
        codes = count_texts(texts)
        create = partial(create_embeddings, key=key, width=encoder.width, texts=texts)
        with unfinished_file(CachedFile, target, key, create, lambda file: np.array_equal(file.codes, codes)) as file:
            return _fill(file, [*task.rows.tolist(), len(part)], [*texts, [""]], encoder, told)


def _fill(
    file: CachedFile,
    rows: list[int],
    texts: list[list[str] | RowError],
    encoder: EncodeTexts,
    told: Callable[[int], None],
) -> Account:
    """Write what is missing of these rows. texts: of all."""
    account, batch = Account(), []
    for row in rows:
        found = texts[row]
        if isinstance(found, RowError):
            if account.wants(file, row, 0):
                file.mark_bad(row, 0, found.reason)
                account.bad[found.reason] += 1
        else:
            batch += [(row, place, text) for place, text in enumerate(found) if account.wants(file, row, place)]
        while len(batch) >= encoder.batch_size:
            _encode(file, batch[: encoder.batch_size], encoder, account)
            batch = batch[encoder.batch_size :]
        told(1)
    if batch:
        _encode(file, batch, encoder, account)
    return account


def _encode(file: CachedFile, batch: list[tuple[int, int, str]], encoder: EncodeTexts, account: Account) -> None:
    for (row, place, _), one in zip(batch, encoder([text for _, _, text in batch]), strict=True):
        if file.write(row, place, one) is None:
            account.bad["not_finite"] += 1
        else:
            account.encoded += 1

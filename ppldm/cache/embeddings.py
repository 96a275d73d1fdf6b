"""Embeddings of captions: the texts that may be drawn of the rows of a part. No paddle."""

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..data.cached.file import CachedFile, count_file_bytes, create_file
from ..data.cached.key import EmbeddingsKey
from ..data.formats.open import open_part
from ..data.formats.rows import Rows as PartRows
from ..data.text.captions import CaptionRule
from ..utils.errors import PartError, RowError
from .plan import Cell, Encoder, Request, Rows, Shapes, Task, Wanted

MOST_TEXTS = 250  # of a row
Texts = list[list[str] | RowError]  # of each row, or why it has none


@dataclass(frozen=True, kw_only=True)
class EmbeddingsRequest(Request):
    """Embeddings of captions by a text encoder. tokenizer: by default the one in or beside it. model_max_length,
    mask_pad_tokens, text_projection: of `EmbeddingsKey`. captions: which of a row's texts."""

    name = "text_embeddings"
    things = "captions"
    flag = "--text_embeddings cached"

    tokenizer: str | None = None
    model_max_length: int
    mask_pad_tokens: bool = False
    text_projection: bool = False
    captions: CaptionRule = CaptionRule()  # noqa: RUF009 (frozen)

    def load(self) -> Encoder:
        from .encoders import load_text_encoder

        own = self.tokenizer, self.model_max_length, self.mask_pad_tokens, self.text_projection
        return load_text_encoder(self, *own)

    def list_keys(self, encoder, shapes: Sequence[Shapes]) -> list[EmbeddingsKey]:
        return [encoder.key.with_captions(self.captions)]

    def choose(self, shapes: Sequence[Shapes], selected: list[Rows], num_rows: int) -> list[Rows]:
        """Rows that are selected at any of the shapes, and behind the last of a part the empty caption."""
        rows = np.unique(np.concatenate([rows for rows, _ in selected]))
        rows = np.append(rows, num_rows) if len(rows) else rows
        return [(rows, np.zeros(len(rows), np.uint8))]

    def open(self, part: PartRows, encoder: Encoder) -> "PartCaptions":
        return PartCaptions(read_captions(part, self.captions), encoder.header)

    def measure(self, task: Task, encoder: Encoder, pool: Executor) -> tuple[float, list[float]]:
        with closing(open_part(task.path, task.source)) as part:
            texts = read_captions(part, self.captions, task.files[0].rows[:-1][: self.batch_size].tolist())
        for _ in range(2):  # the first time is slower
            began = time.monotonic()
            encoder([""])
        seconds = (time.monotonic() - began) / self.batch_size
        return float(np.mean([0 if isinstance(one, RowError) else len(one) for one in texts])), [seconds]

    def estimate(self, file: Wanted, encoder: Encoder, measured: float) -> tuple[int, int]:
        """Of rows that are not wanted there is nothing. measured: texts of a row."""
        count = round((len(file.rows) - 1) * measured) + 1
        cells = file.key.cells({**encoder.header, "variants": 1})
        return count, count_file_bytes(cells, self.dtype, np.ones(count, np.uint8), 0)


class PartCaptions:
    """What the embeddings of a part are made of."""

    def __init__(self, texts: Texts, header: dict):
        self._texts, self._header, self._codes = texts, header, count_texts(texts)

    def create(self, path: Path, key: EmbeddingsKey) -> None:
        create_embeddings(path, key, self._header["width"], self._texts)

    def fits(self, file: CachedFile) -> bool:
        return np.array_equal(file.codes, self._codes)

    def list_cells(self, file: CachedFile, rows: np.ndarray) -> Iterator[Cell]:
        for row in rows.tolist():
            texts = self._texts[row] if row < len(self._texts) else [""]
            found = [texts] if isinstance(texts, RowError) else texts
            yield from (Cell(file, row, place, text) for place, text in enumerate(found))

    def load(self, cells: list[Cell], pool: Executor) -> Iterator[tuple[Cell, str | RowError]]:
        return ((cell, cell.what) for cell in cells)


def create_embeddings(path: Path, key: EmbeddingsKey, width: int, texts: Texts) -> None:
    """`cached.file.create_file` for rows of these texts; hidden states have `width`. Raises OSError, PartError."""
    codes = count_texts(texts)
    header = {"width": width, "variants": int(codes.max())}
    create_file(path, key, header, codes, np.zeros((2, len(codes))), [b""] * len(codes))


def count_texts(texts: Texts) -> np.ndarray:
    """The codes of rows with these texts, and of the empty caption: uint8 [rows + 1]. Raises PartError."""
    counts = [0 if isinstance(one, RowError) else len(one) for one in texts]
    if max(counts, default=0) > MOST_TEXTS:
        raise PartError(
            f"row {int(np.argmax(counts))} has {max(counts)} captions, and embeddings are for {MOST_TEXTS} at most; "
            "choose the first with --caption_choice first"
        )
    return np.array([*counts, 1], np.uint8)


def read_captions(part: PartRows, rule: CaptionRule, rows: Iterable[int] | None = None) -> Texts:
    """The texts that may be drawn of rows of a part, None for all."""
    found: Texts = []
    for number in range(len(part)) if rows is None else rows:
        try:
            row = part.read(number)
            rule.check(row)
            found.append(rule.texts(row))
        except RowError as error:
            found.append(error)
    return found
